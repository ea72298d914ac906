"""A real package that adds accelerators, installed for these tests and used from a process of its own.

One test starts a fresh interpreter. The processes of the others are forks of one that has imported torch (`template.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import template

PLUGIN = Path(__file__).parent / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A directory with the package installed in it by pip."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-build-isolation", "--target", target, PLUGIN], check=True)
    return target


@pytest.fixture
def run(installed, tmp_path):
    """Run a script that can import the package. Return its output, parsed as JSON."""

    def run(script: str):
        file = tmp_path / "script.py"
        file.write_text(f"import sys\nsys.path.insert(0, {str(installed)!r})\n{script}")
        done = template.run(file, cwd=tmp_path, packages=template.WITH_JAX, timeout_s=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_it_is_found_by_name(installed):
    script = """
import json
from footplate.hardware.registry import get_accelerator
toy = get_accelerator("Toy")
print(json.dumps([type(toy).__module__, toy.parse_devices("auto"), toy.parse_devices("1,")]))
"""
    folders = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["footplate_toy", [0], [1]]


def test_auto_prefers_it_by_its_priority_and_warns_of_the_broken_one(run):
    name, warned = run("""
import json, warnings
from footplate.hardware.registry import choose_auto
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    name = choose_auto().name
print(json.dumps([name, [str(warning.message) for warning in caught]]))
""")

    assert name == "toy"
    assert len(warned) == 1
    assert 'accelerator "broken" is ignored: the package "footplate-toy" failed to provide it' in warned[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", "AttributeError: module 'footplate_toy' has no attribute 'Missing'"),
        ("shy", "OSError: the shy driver did not answer"),
        ("tooy", 'Did you mean "toy"? There are: auto, broken, cpu, '),
    ],
    ids=["broken", "shy", "misspelt"],
)
def test_one_that_cannot_be_used_is_refused_with_its_own_error(run, name, words):
    text = run(f"""
import json
from footplate.core.errors import ConfigError
from footplate.hardware.registry import get_accelerator
try:
    get_accelerator("{name}")
except ConfigError as error:
    print(json.dumps(str(error)))
""")

    assert words in text


def test_a_name_of_ours_imports_no_package_of_others(run):
    assert (
        run("""
import json, sys
from footplate.hardware.registry import get_accelerator
get_accelerator("cpu")
print(json.dumps("footplate_toy" in sys.modules))
""")
        is False
    )


def test_doctor_shows_it_and_the_broken_one(run):
    report = run("""
import json
from footplate.hardware.doctor import examine, to_dict
print(json.dumps(to_dict(examine())))
""")
    accelerators = {accelerator["name"]: accelerator for accelerator in report["accelerators"]}

    assert report["ok"] is True
    assert [accelerator["name"] for accelerator in report["accelerators"]][:2] == ["shy", "toy"]
    assert accelerators["toy"]["usable"] is True
    assert [device["name"] for device in accelerators["toy"]["devices"]] == ["Toy One", "Toy Two"]
    assert accelerators["toy"]["details"] == {"driver": "toy-driver 7"}
    assert "the shy driver did not answer" in accelerators["shy"]["reason"]
    assert "failed to provide it" in accelerators["broken"]["reason"]
    assert accelerators["cpu"]["usable"] is True


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["toy", "auto"])
def test_it_trains(run, accelerator):
    assert run(f"""
import json
import torch
from torch.utils.data import DataLoader
import footplate as fp

class Line(fp.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

module = Line()
before = module.layer.weight.detach().clone()
trainer = fp.Trainer(accelerator="{accelerator}", devices=1, max_steps=2, logger=False, default_root_dir="runs")
trainer.fit(module, DataLoader(torch.ones(8, 2), batch_size=2))
print()
print(json.dumps([trainer.global_step, trainer.accelerator.name, torch.equal(before, module.layer.weight)]))
""") == [2, "toy", False]
