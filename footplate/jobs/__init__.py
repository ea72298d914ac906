"""Training jobs: what a job is made of, on which machines it can run, and what runs it there.

catalog/      machine types, accelerators, regions: data with its sources, and what fits together
spec/         a job as its config.yaml and its flags describe it, checked and resolved
package/      its program, taken when it is submitted, installed where it runs
cluster_env.py   what each of its processes is told of the others
translate/    the same job in other systems' words

verbs.py      submit, wait, cancel, …: begin here
states.py     QUEUED, RUNNING, …, and which may follow which
store/        jobs and their transitions, durable
listing.py    filters and orders of a list
scheduling.py which of the waiting jobs begin now
supervision/  sweeps, supervisors, logs
backends/     where a job's processes run: on this machine, …
environment.py the variables that they get
redaction.py    secrets, kept out of what they write and of a server's answers
plan.py, record.py, home.py   what is passed between them
"""
