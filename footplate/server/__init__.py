"""`footplate server`: the actions of `footplate jobs` over HTTP, and a web page of jobs.

    browser, curl ──► guard.py         checks the host, the token, and that no page of another site sends the request
                      app.py           the application: routes, errors, the files of the page
                      routes/          a file for each kind of resource: jobs, logs, packages, catalog
                      models.py        the data of requests and answers; views.py makes answers from jobs
                      submission.py    a request's spec → a job
                      figures.py       recorded metrics → curves
    dependencies.py ► footplate.jobs.operations.Jobs, opened for each request

The server has no state of its own: jobs are in the store, and their output is in files. It advances jobs by reconciling
them with the store, as the command line does. If you kill the server, nothing is lost, and several servers may run at once.
A supervisor of a job that the server has started outlives the server.

**Access.** By default the server listens on this machine alone. On any other address it needs a token (`auth.py`).
Everybody who may send requests can run programs as the user who started the server, because that is what submitting a job
does.
"""
