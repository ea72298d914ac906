"""Reports: what a run's directory holds, as one HTML file that needs no network.

    run_record.py      a run's directory → a `RunRecord`; it uses the readers below
    metrics_file.py    metrics.csv or metrics.jsonl, tolerantly
    monitor_log.py     monitor.jsonl, tolerantly
    environment.py     machine, packages, commit and command of a run, recorded when it starts
    table_statistics   columns of the run's tables, from all rows or a sample
    predictions.py     saved predictions → confusions, and the best and worst samples
    pictures.py        encoded images → small pictures inside the page
    thinning.py        long series → few points that keep the least and the greatest values
    charts.py          data → descriptions of charts, as plain values
    html.py            tags and tables, with all text escaped
    sections_*.py      data → HTML, one function for each section
    comparison.py      several runs side by side
    page.py            sections → the file, with `page/` (template, style, script) and plotly.js inside it
    report.py          `fp.report`: runs → file
    report_file.py     the file's path, and what a notebook shows of it
    callback.py        `fp.Report`: a report at the end of each `fit`

Sections and charts are pure functions of data. Everything in a run's directory is data: no name or value becomes markup.
"""
