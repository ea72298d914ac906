"""Jobs on this machine, without a process that is always there.

    machine.py      what the machine has for jobs, and what a job needs of it
    identity.py     which process is meant, also after its number was given to another
    environment.py  the variables that a job's processes get
    sweep.py        whose turn it is, and which supervisors have died
    supervisor.py   one process for each running job: its attempts, from the first to the end
    gang.py         the processes of one attempt
    logfiles.py     what they write, in files that nobody loses
    follow.py       those files, read while they grow

A *sweep* (`sweep.py`) is what makes anything happen. It starts a detached supervisor for each job whose turn it is, and for
each whose supervisor has died. Every verb of the command line sweeps; so does a supervisor, every few seconds and when its
job has ended, and `footplate jobs daemon`. So a thousand jobs in the queue are a thousand rows, and no process.

    who dies                what follows
    the submitting shell    nothing: the supervisor is in a session of its own
    a process of the job    its gang is ended, and started again as a new attempt, while there are restarts left
    the supervisor          the kernel kills the job's processes; the next sweep starts a new supervisor, which begins a new
                            attempt: the program is not to blame
    the machine             as above: the daemon sweeps after the reboot, or the next command does
"""
