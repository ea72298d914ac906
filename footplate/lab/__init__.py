"""A lab: several machines on this one, to see what a training does when a network breaks or a machine is lost.

    with Lab(3) as lab:
        first, second, third = lab.machines
        training = first.start(["footplate", "run", "--nnodes", "3", …])
        lab.cut(second)

A machine is a set of Linux namespaces: it has its own network with a real TCP stack, host name, processes, /home, /tmp,
boot id and clock. All machines have one kernel, and one shared disk, which no cut reaches.

    network.py        what happens to a frame: links that are cut, slow or lossy, firewalls (pure)
    switch.py         the process that carries the frames
    machine_init.py   the first process of a machine
    machine.py        a machine: boot it, run commands, take its power away
    namespaces.py     the words that make and enter namespaces
    lab.py            all of them together
"""

from footplate.lab.lab import Lab
from footplate.lab.machine import Command, Machine
from footplate.lab.namespaces import why_not
from footplate.lab.network import Link

__all__ = ["Command", "Lab", "Link", "Machine", "why_not"]
