"""Adapters of other libraries: found by the package of an object's class, and imported only when they are needed."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from models.small import Classifier, loader

import footplate as fp
from footplate.core import adapters
from footplate.core.adapters import Adapter, adapter_of, register
from footplate.core.hooks import overrides
from footplate.training.prepare import attach


class Made(Adapter):
    """The adapter of a made-up library, `otherlib`."""

    name = "Otherlib"
    hook_bases = frozenset({"Base"})

    def __init__(self) -> None:
        self.trainer_attributes = {"other_rank": lambda trainer: trainer.global_rank, "not_now": lambda trainer: None}
        self.refused_attributes = {"other_loop": "trainer.progress has the counters"}
        self.refused_arguments = {"other": (0, "leave it out")}
        self.seen: list[Any] = []

    def translate_callbacks(self, callbacks: list[Any]) -> list[Any]:
        self.seen += callbacks
        return callbacks

    def attach_module(self, module: Any, trainer: Any) -> None:
        module.trainer = trainer
        self.seen.append(module)

    def batch_outputs(self, output: Any, trainer: Any) -> Any:
        return {"theirs": output}


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The registered adapter, in a module that isn't imported before it is needed."""
    monkeypatch.setattr(adapters, "_targets", dict(adapters._targets))
    monkeypatch.setattr(adapters, "_loaded", dict(adapters._loaded))
    module = types.ModuleType("otherlib_adapter")
    module.ADAPTER = Made()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "otherlib_adapter", module)
    register("otherlib", "otherlib_adapter:ADAPTER")
    return module.ADAPTER  # type: ignore[attr-defined]


def of_package(kind: type, package: str = "otherlib.callbacks") -> type:
    kind.__module__ = package
    return kind


def a_callback() -> Any:
    base = of_package(type("Base", (), {name: vars(fp.Callback)[name] for name in vars(fp.Callback) if name[0] != "_"}))
    return type(
        "Users", (base,), {"on_train_batch_end": lambda self, *args: self.outputs.append(args[2]), "outputs": []}
    )


def test_an_object_has_the_adapter_of_the_package_of_one_of_its_base_classes(other: Made) -> None:
    assert adapter_of(a_callback()()) is other
    assert adapter_of(fp.Callback()) is None
    assert adapter_of(of_package(type("Near", (), {}), "otherlibrary")()) is None


def test_an_adapter_is_imported_when_an_object_of_its_package_is_met(
    monkeypatch: pytest.MonkeyPatch, other: Made
) -> None:
    register("thirdlib", "no_such_module:ADAPTER")
    assert adapter_of(a_callback()()) is other
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        adapter_of(of_package(type("Third", (), {}), "thirdlib")())


def test_a_callback_of_another_library_runs_through_its_adapter(other: Made, make_trainer: Any) -> None:
    callback = a_callback()()
    trainer = make_trainer(callbacks=[callback], max_epochs=1, limit_train_batches=2)
    trainer.fit(Classifier(), loader())

    assert other.seen == [callback]
    assert not overrides(callback, "on_train_start")
    assert [list(outputs) for outputs in callback.outputs] == [["theirs"], ["theirs"]]


class Duck(torch.nn.Module):
    """A module with a step and an optimizer, and no base class of Footplate or another library."""

    def training_step(self, batch: Any, batch_idx: int) -> None: ...
    def configure_optimizers(self) -> None: ...


def test_a_module_of_another_library_is_attached_by_its_adapter(other: Made, make_trainer: Any) -> None:
    module = type("Users", (of_package(type("Their", (Duck,), {})),), {})()
    attach(make_trainer(), "fit", module, None)
    assert other.seen == [module]


def test_a_module_of_no_library_is_attached_without_an_adapter(other: Made, make_trainer: Any) -> None:
    module, made = Duck(), make_trainer()
    attach(made, "fit", module, None)
    assert other.seen == []
    assert module.trainer is made
    assert callable(module.log)
    with pytest.raises(fp.ConfigError, match=r"Linear is a plain torch\.nn\.Module: it has no training_step"):
        attach(made, "fit", torch.nn.Linear(1, 1), None)


def test_attributes_of_the_trainer_come_from_the_adapter_or_are_refused(other: Made, make_trainer: Any) -> None:
    trainer = make_trainer(max_epochs=1)
    assert trainer.other_rank == 0
    assert trainer.not_now is None
    with pytest.raises(
        fp.ConfigError, match=r"trainer\.other_loop is internal to Otherlib and not available here: trainer\.p"
    ):
        _ = trainer.other_loop
    assert not hasattr(trainer, "other_loop")
    with pytest.raises(AttributeError, match=r"no attribute 'other_rnk'\. Did you mean trainer\.other_rank\?"):
        _ = trainer.other_rnk
    with pytest.raises(AttributeError, match=r"no attribute 'is_global_zer'\. Did you mean trainer\.is_global_zero\?"):
        _ = trainer.is_global_zer


def test_a_computed_attribute_may_be_assigned(make_trainer: Any) -> None:
    trainer = make_trainer(max_epochs=1)
    assert trainer.world_size == 1
    trainer.world_size = 3
    assert trainer.world_size == 3
    assert make_trainer(max_epochs=1).world_size == 1


def test_an_argument_of_another_library_is_refused_unless_it_changes_nothing(other: Made) -> None:
    fp.Trainer(max_epochs=1, accelerator="cpu", other=0)  # pyright: ignore
    with pytest.raises(
        fp.ConfigError, match=r"Trainer\(other=1\) is Otherlib's and not supported here: leave it out\."
    ):
        fp.Trainer(max_epochs=1, accelerator="cpu", other=1)  # pyright: ignore


def test_a_program_without_other_libraries_imports_no_adapter(tmp_path: Path) -> None:
    program = """
import sys, torch, footplate as fp

class Net(fp.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        self.log("loss", self.layer(batch).mean())
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = fp.Trainer(max_epochs=1, accelerator="cpu", enable_progress_bar=False)
trainer.fit(Net(), [torch.ones(4, 2)])
assert trainer.global_step == 1 and trainer.world_size == 1
print([name for name in sys.modules if name.startswith(("footplate.compat", "lightning"))])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
