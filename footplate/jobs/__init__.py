"""Training jobs: the description of a job, the machines that it can run on, and the code that runs it there.

Start with `operations.py`.

operations.py    submit, wait, cancel, …: all that can be done with jobs
submission.py    one path from a request to a job in the queue, dry run included
questions.py     questions to a running job: the stacks of its processes, a profile; hangs.py: the hangs that were explained

catalog/         machine types, accelerators and regions, with their sources, and the rules for combining them
spec/            a job as its config.yaml and flags describe it, checked and resolved
package/         the job's program: a snapshot when it is submitted, installed where it runs
cluster_env.py   the variables that tell each process about the others
translate/       the same job as a document of another system

tuning/          hyperparameter tuning: trials as jobs
fork_server/     a process from which the trials of a tuning begin

states.py        QUEUED, RUNNING, …, and the allowed transitions
store/           jobs and their transitions, on disk or in PostgreSQL
listing.py       filters and orders of a list
job_html.py      a job, a list of jobs and a tuning in a notebook
scheduling.py    which of the waiting jobs start now
supervision/     reconcile passes, supervisors, logs
backends/        the places where a job's processes run: this machine, a Ray cluster, Vertex AI
process_env.py   the environment variables of a job's processes
redaction.py     secrets, hidden in output and in a server's answers

execution.py, record.py, home.py    the values that these parts pass to each other
"""
