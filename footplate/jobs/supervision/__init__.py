"""Supervision of jobs, without a permanent process.

    reconcile.py   starts jobs that can start, and replaces supervisors that died
    supervisor.py  one process for each running job: it leads the job through its attempts to the end
    prestart.py    a supervisor process that is started before its job is read, to save the time of its imports
    exit_status.py what the exit codes of processes mean for an attempt
    identity.py    the identity of a process, also after the kernel has reused its process id
    locks.py       file locks
    logfiles.py    the output of a job's processes, in files
    follow.py      reads those files while they grow
    cleaning.py    deletes packages and environments that no job needs

A *reconcile pass* (`reconcile.py`) drives everything. It starts a detached supervisor for each job that can start, and for
each job whose supervisor died. Every command makes a pass. So does a supervisor, every few seconds and when its job ends,
and so does `footplate jobs daemon`. A thousand jobs in the queue are a thousand rows of a table, and no process.

    who dies                what follows
    the submitting shell    nothing: the supervisor is in its own session
    a process of the job    the attempt ends, and a new one begins if restarts are left
    the supervisor          the next pass starts a new one. If the attempt outlives its supervisor, the new one continues
                            it. Otherwise the kernel has killed the job's processes, and a new attempt begins, which
                            doesn't count as the program's failure
    the machine             the same: the daemon makes a pass after the reboot, or the next command does
"""
