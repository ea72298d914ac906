"""Jobs are looked after, without a process that is always there.

    reconcile.py   whose turn it is, and which supervisors have died
    supervisor.py  one process for each running job: its attempts, from the first to the end
    prestart.py    a supervisor that is started before its job, so that nobody waits for its imports
    exit_status.py what the ends of its processes mean for an attempt
    identity.py    which process is meant, also after its number was given to another
    locks.py       files that one process holds
    logfiles.py    what a job's processes write, in files that nobody loses
    follow.py      those files, read while they grow
    cleaning.py    packages and environments that nobody needs any more, deleted

A *sweep* (`reconcile.py`) is what makes anything happen. It starts a detached supervisor for each job whose turn it is, and
for each whose supervisor has died. Every verb of the command line sweeps; so does a supervisor, every few seconds and when
its job has ended, and `footplate jobs daemon`. So a thousand jobs in the queue are a thousand rows, and no process.

    who dies                what follows
    the submitting shell    nothing: the supervisor is in a session of its own
    a process of the job    its attempt is ended, and a new one begun, while there are restarts left
    the supervisor          the next sweep starts a new one. It takes the attempt up where that outlives its supervisor;
                            else the kernel has killed the job's processes, and a new attempt begins: the program is not
                            to blame
    the machine             as above: the daemon sweeps after the reboot, or the next command does
"""
