"""Several machines whose network breaks: what happens to a training, and how long it takes to go on.

    python benchmarks/lab_chaos.py --faults 200
    python benchmarks/lab_chaos.py --faults 50 --launcher ray --json ray.json
    python benchmarks/lab_chaos.py --faults 50 --launcher ray --json ray.json --add --seed 1

Each training runs on two to four machines of a lab (`footplate.lab`: namespaces with a TCP stack of their own), with one
rank on each. One more machine is spare. `footplate run`, a Ray cluster or a Spark cluster starts the training
(`lab_chaos_launchers.py`). Faults strike it one after the other, in random order (`lab_chaos_faults.py`). After a fault,
the benchmark does what a person or a scheduler does: it gives the command again, or starts the machine's part of the
cluster again, on the lost machine when that is back, or on the spare one. A fault counts if the training has gone on
after it.

The figures count defects, and all of them must be 0:

- `diverged`: trainings with a loss, of any rank, step and attempt, that isn't the one of an undisturbed training;
- `corrupt`: checkpoints that claim to be complete but fail to load;
- `hung`: faults after which no step came within `PATIENCE_S`, and programs that didn't end;
- `orphans`: machines with a process that is left after the program has ended, or after a fault has separated the machine
  from the others. The cluster's own processes don't count.

A few hundred faults take hours, so a run can be added to those before it.

For each fault the table has the seconds until the next attempt was announced (detection), and until the first step after
it (recovery). All machines share the wall clock of this one, so the times can be compared.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import arguments_parser, machine, report
from lab_chaos_faults import KINDS, EndedError, Findings, HungError, Training, losses_in
from lab_chaos_launchers import HEARTBEAT_S, LAUNCHERS, Launcher

from footplate.lab import Lab, why_not

SCRIPT = Path(__file__).with_name("lab_train.py")
MACHINES = (2, 3, 4)
EPOCHS = 30
FAULTS_EACH = 6
COUNTED = ("diverged", "corrupt", "hung", "orphans")
TIMES = ("detection_s", "recovery_s")


def kinds_of(launcher: type[Launcher]) -> dict[str, str]:
    """The kinds of faults for a launcher, and their meanings."""
    kills = {kind: kill.meaning for kind, kill in launcher.kills.items()}
    return {"kill rank": KINDS["kill rank"], **kills, **KINDS}


def undisturbed(world: int) -> dict[str, set[str]]:
    """The losses of a training of this many ranks on one machine."""
    with tempfile.TemporaryDirectory() as directory:
        words = [sys.executable, "-m", "footplate", "run", "--np", str(world), str(SCRIPT), directory, "0", str(EPOCHS)]
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        return losses_in(Path(directory))


def earlier(document: dict[str, Any]) -> Findings:
    """The findings of the runs that have written a JSON document."""
    findings = Findings(Counter({name: document["figures"][name] for name in COUNTED}), document["figures"]["findings"])
    for row in document["rows"]:
        findings.struck[row["name"]] = row["faults"]
        for name in TIMES:
            if values := row.get(f"{name}_each"):
                getattr(findings, name)[row["name"]] = values
    return findings


def run(launcher: type[Launcher], faults: int, seed: int, findings: Findings) -> None:
    """Strike trainings until all faults have struck. Add what is found to the findings."""
    chance = random.Random(seed)
    # Every kind occurs equally often.
    left = list(itertools.islice(itertools.cycle(kinds_of(launcher)), faults))
    chance.shuffle(left)
    expected: dict[int, dict[str, set[str]]] = {}
    number = 0
    while left:
        world = MACHINES[number % len(MACHINES)]
        number += 1
        if world not in expected:
            expected[world] = undisturbed(world)
        print(f"training {number} on {world} machines, {len(left)} faults to come", flush=True)
        with Lab(world + 1) as lab:
            training = Training(launcher(lab, EPOCHS), findings, chance)
            try:
                for _ in range(min(FAULTS_EACH, len(left))):
                    training.strike(left[0])
                    left.pop(0)
            except EndedError:
                pass
            except HungError:
                left.pop(0)
                continue
            training.finish(expected[world])


def main() -> None:
    parser = arguments_parser("Break the network of trainings on several machines", "three faults: shows that it works")
    parser.add_argument("--faults", type=int, default=200, help="number of faults")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="footplate", help="what starts the training")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument(
        "--add", action="store_true", help="add to the faults in the JSON file, of runs with other seeds"
    )
    options = parser.parse_args()
    if options.add and options.json is None:
        parser.error("--add needs the file of --json")
    if why := why_not():
        raise SystemExit(why)
    host, begun = machine(), time.monotonic()
    launcher = LAUNCHERS[options.launcher]
    findings, seeds, minutes = Findings(), [options.seed], 0.0
    if options.add and options.json.exists():
        document = json.loads(options.json.read_text())
        before = document["figures"]
        if "seeds" not in before:
            raise SystemExit(f"{options.json} doesn't have the times of each fault. Begin another file.")
        if before["launcher"] != options.launcher or options.seed in before["seeds"]:
            raise SystemExit(f"{options.json} has faults for {before['launcher']}, with the seeds {before['seeds']}.")
        findings, seeds, minutes = earlier(document), [*before["seeds"], options.seed], before["minutes"]
    run(launcher, 3 if options.quick else options.faults, options.seed, findings)
    rows = []
    for kind, meaning in kinds_of(launcher).items():
        row: dict[str, Any] = {"name": kind, "meaning": meaning, "faults": findings.struck[kind]}
        for name in TIMES:
            if values := getattr(findings, name).get(kind):
                worst = name.replace("_s", "_worst_s")
                row |= {name: statistics.median(values), worst: max(values), f"{name}_each": values}
        rows.append(row)
    all_recoveries = [value for values in findings.recovery_s.values() for value in values]
    figures = {
        "launcher": options.launcher,
        "faults": findings.struck.total(),
        **{name: findings.counts[name] for name in COUNTED},
        "heartbeat_timeout_s": HEARTBEAT_S,
        "recovery_s": statistics.median(all_recoveries),
        "recovery_worst_s": max(all_recoveries),
        "minutes": minutes + (time.monotonic() - begun) / 60,
        "seeds": seeds,
        "findings": findings.details,
    }
    columns = {
        "faults": "faults",
        "detection_s": "median s until noticed",
        "detection_worst_s": "worst",
        "recovery_s": "median s until a new step",
        "recovery_worst_s": "worst",
    }
    report(
        "lab_chaos",
        f"{figures['faults']} faults",
        columns,
        rows,
        {},
        figures,
        host,
        ("torch", "footplate", *launcher.packages),
        options.json,
    )
    print({name: figures[name] for name in ("faults", *COUNTED)})
    sys.exit(any(findings.counts.values()))


if __name__ == "__main__":
    main()
