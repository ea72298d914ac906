"""The fork server of a tuning: a process that has imported what the trials import, and forks for each trial.

Starting a trial from nothing starts two interpreters: its supervisor, and its program. The program's imports take seconds.
A fork of a process that has done all this takes milliseconds.

    a reconcile pass            fork server              supervisor of the trial     program of the trial
    connects           ─────►   forks           ─────►   forks its programs  ─────►  waits for its order
                       ◄──────────────────────────────   its process id
    enters the id in the store
    name, variables    ──────────────────────────────►   supervises the job
                                                         starts an attempt   ─────►  runs the user's code

A trial stays what it is without the fork server: a job with a supervisor of its own. The program is a child of that
supervisor, and dies with it. Neither depends on the fork server once it is forked. The fork server belongs to the tuning's
supervisor (`starting.py`), and dies with it.

imports.py       the modules that a program will import, read from its source
environment.py   the environment of a process: a marker that others can read, and the variables that imports have read
starting.py      a fork server, as the tuning's supervisor starts it: installs the package, and becomes the fork server
server.py        the fork server itself
request.py       what a reconcile pass asks of it
programs.py      forks that wait for their order, and become the program of an attempt

**Never stale.** A trial begins from a fork only if that fork is what its own interpreter would be:

- The interpreter and the package are those of the trial.
- All variables are the same, but for those that only this process of a job gets. No import has read one of these.
- The files of all imported modules are unchanged. Otherwise the fork server ends, and the tuning starts another.
- The fork server has one thread, except the one that importing pyarrow starts, and has touched no device.
- It has imported installed packages alone. The user's own modules are imported in the fork.

A trial that can't begin from a fork starts from nothing, as any job does. That is so for the second attempt of a trial, for
a fork server that can't be made (its last words are in `fork_server.log`), and elsewhere than on Linux.
"""
