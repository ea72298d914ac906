"""A job's program: taken once, when the job is submitted, and installed wherever it runs.

    taken = snapshot(Path("examples/trainer"), [], home)          when the job is submitted
    ready = install(taken, home, log)                             before each attempt; at once if it is there
    subprocess.run([ready.python, "-m", "trainer.task"], env={**environment, **ready.env})

What is below home, all of it named by what is in it:

    packages/DIGEST.tar       the package as it was when it was taken
    unpacked/BOOT/DIGEST/     the same, unpacked, since the machine was started
    environments/KEY/         a virtual environment with the requirements; many packages share one

    files.py             which files belong to a package: what is left out, and what can't go in
    gitignore.py         what .gitignore says of a path
    secrets.py           which files look like secrets
    archive.py           files → one archive, bit for bit the same wherever it is made
    snapshots.py         snapshot: all of the above, and wheels from --packages
    receiving.py         the same of an archive that was sent from elsewhere
    modules.py           is it a package, and has it the module that is to run
    unpacking.py         the archive → a directory, whatever the archive holds
    requirements.py      what a package says that it needs
    environment_locks.py what keeps an environment from being deleted while it is used
    environment.py       a virtual environment for that, made once
    installing.py        install: unpacked, with its environment

Source that is edited after the job was submitted changes nothing: no file of it is read again.
"""

from footplate.jobs.package.installing import Installed, install
from footplate.jobs.package.snapshots import Snapshot, snapshot, stored

__all__ = ["Installed", "Snapshot", "install", "snapshot", "stored"]
