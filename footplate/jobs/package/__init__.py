"""A job's program: one snapshot when the job is submitted, installed wherever the job runs.

    program = snapshot(Path("examples/trainer"), [], home)        when the job is submitted
    ready = install(program, home, log)                           before each attempt; fast if it is installed
    subprocess.run([ready.python, "-m", "trainer.task"], env={**environment, **ready.env})

Below the home folder, everything is named by its contents:

    packages/DIGEST.tar       the snapshot
    unpacked/BOOT/DIGEST/     the snapshot unpacked, since this boot of the machine
    environments/KEY/         a virtual environment with the requirements, shared by many packages

    files.py             the files of a package
    gitignore.py         .gitignore
    secrets.py           a guess which files contain secrets
    archive.py           files → one archive, the same bytes wherever it is made
    snapshots.py         snapshot: all of the above, and wheels from --packages
    receiving.py         a snapshot from an archive that a client uploaded
    modules.py           checks that the package exists, and has the module to run
    unpacking.py         archive → directory, safe for any archive
    requirements.py      the requirements of a package
    environment_locks.py locks that protect an environment in use
    virtualenv.py        a virtual environment with the requirements, created once
    installing.py        install: unpack, and create the environment

After the submission no source file is read again, so a change of the source doesn't change the job.
"""

from footplate.jobs.package.installing import Installed, install
from footplate.jobs.package.snapshots import Snapshot, snapshot, stored

__all__ = ["Installed", "Snapshot", "install", "snapshot", "stored"]
