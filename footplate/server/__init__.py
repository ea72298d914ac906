"""`footplate server`: the verbs of `footplate jobs` over HTTP, and a page for people.

    browser, curl ──► guard.py      is it for us, may they, can it be another site's page that asks?
                      app.py        the application: routes, errors, the page's files
                      routes/       a file for each kind of thing: jobs, logs, packages, catalog
                      models.py     what goes over the wire; views.py makes it of what is known of a job
                      submission.py a spec over HTTP → a job
                      figures.py    what a run has recorded → curves
    desk.py ────────► footplate.jobs.operations.Jobs, opened anew for each request

The server holds nothing: jobs are in the store, their output is in files, and what makes them go on is a sweep, as with
the command line. Killing it loses nothing, and several may run at once. A job's supervisor that it has started outlives
it.

**Who may ask.** It listens on this machine alone unless told otherwise, and on any other address only with a token
(`auth.py`). Whoever may ask may run programs as the user who started it: that is what submitting a job is.
"""
