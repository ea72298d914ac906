"""An optimizer is stepped and cleared without torch's profiler records, with no other difference."""

import functools
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from footplate.step.torch_internals import clearer, stepper

TESTS = Path(__file__).parents[1]
NAMES = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"]


def make(name="AdamW"):
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
    return weight, getattr(torch.optim, name)([weight], lr=0.1)


def losses(weight, step, clear, steps=5):
    for _ in range(steps):
        clear()
        (weight**2).sum().backward()
        step()
    return weight.detach().clone()


def records(step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    return [event.key for event in profiler.key_averages() if event.key.startswith("Optimizer.step")]


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_bit_for_bit_those_of_the_optimizers_own_calls(name):
    weight, optimizer = make(name)
    other, reference = make(name)
    ours = losses(weight, stepper(optimizer), clearer(optimizer))
    assert ours.equal(losses(other, reference.step, reference.zero_grad))


def test_no_record_is_made_while_nobody_looks(monkeypatch):
    weight, optimizer = make()
    made = []
    monkeypatch.setattr(torch.autograd.profiler, "record_function", lambda name: made.append(name))
    losses(weight, stepper(optimizer), clearer(optimizer))
    assert made == []


def test_a_profiler_finds_the_step_by_its_name():
    weight, optimizer = make()
    step = stepper(optimizer)
    losses(weight, step, clearer(optimizer))
    assert records(step) == ["Optimizer.step#AdamW.step"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_are_called_whenever_they_were_registered(when, kind):
    weight, optimizer = make()
    called = []
    if when == "after":
        step = stepper(optimizer)
    getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: called.append(kind))
    if when == "before":
        step = stepper(optimizer)
    losses(weight, step, clearer(optimizer), steps=2)
    assert called == [kind, kind]


def test_hooks_of_all_optimizers_are_called():
    weight, optimizer = make()
    step, called = stepper(optimizer), []
    handle = register_optimizer_step_post_hook(lambda *_: called.append("global"))
    try:
        losses(weight, step, clearer(optimizer), steps=1)
    finally:
        handle.remove()
    assert called == ["global"]


def test_a_step_of_somebodys_own_is_called_on_the_optimizer_and_on_its_class():
    weight, optimizer = make()
    called = []
    original = optimizer.step
    optimizer.step = lambda: (called.append("own"), original())
    losses(weight, stepper(optimizer), clearer(optimizer), steps=1)

    class Noted(torch.optim.SGD):
        pass

    decorated = torch.optim.SGD.step

    @functools.wraps(decorated)
    def noting(self, closure=None):
        called.append("class")
        return decorated(self, closure)

    Noted.step = noting
    optimizer = Noted([weight], lr=0.1)
    losses(weight, stepper(optimizer), clearer(optimizer), steps=1)
    assert called == ["own", "class"]


def test_a_step_that_is_replaced_during_training_is_called():
    weight, optimizer = make()
    step, called = stepper(optimizer), []
    losses(weight, step, clearer(optimizer), steps=1)
    optimizer.step = lambda: called.append("own")
    losses(weight, step, clearer(optimizer), steps=1)
    assert called == ["own"]


def test_a_scheduler_knows_that_the_optimizer_has_stepped(monkeypatch):
    weight, optimizer = make("SGD")
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    step = stepper(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            losses(weight, step, clearer(optimizer), steps=1)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
    monkeypatch.setattr(torch.autograd.profiler, "record_function", None)  # from its second step on, no record is made
    losses(weight, step, clearer(optimizer), steps=1)


def test_a_zero_grad_of_somebodys_own_is_called():
    weight, optimizer = make()
    optimizer.zero_grad = lambda: weight.grad.zero_()
    weight.grad = torch.ones_like(weight)
    clearer(optimizer)()
    assert weight.grad is not None
    assert not weight.grad.any()


def counted(optimizer, called, name="own"):
    original = type(optimizer).step

    def step(self, closure=None):
        called.append(name)
        return original(self, closure)

    return step


def test_a_method_put_on_the_optimizer_is_called_though_a_scheduler_wraps_it():
    weight, optimizer = make("SGD")
    called = []
    optimizer.step = types.MethodType(counted(optimizer, called), optimizer)
    StepLR(optimizer, step_size=1)
    losses(weight, stepper(optimizer), clearer(optimizer), steps=3)
    assert called == ["own"] * 3


@pytest.mark.parametrize("first", [True, False])
def test_the_latest_step_counts_whenever_it_was_put_there(first):
    weight, optimizer = make("SGD")
    called = []
    if first:
        optimizer.step = types.MethodType(counted(optimizer, called, "first"), optimizer)
    step, clear = stepper(optimizer), clearer(optimizer)
    losses(weight, step, clear, steps=1)
    optimizer.step = types.MethodType(counted(optimizer, called, "second"), optimizer)
    losses(weight, step, clear, steps=1)
    assert called == (["first"] if first else []) + ["second"]


def test_a_class_whose_step_or_zero_grad_is_replaced_during_training_is_asked(monkeypatch):
    weight, optimizer = make("SGD")
    step, clear, called = stepper(optimizer), clearer(optimizer), []
    losses(weight, step, clear, steps=1)
    monkeypatch.setattr(torch.optim.SGD, "step", counted(optimizer, called, "step"))
    monkeypatch.setattr(torch.optim.SGD, "zero_grad", lambda self: called.append("clear"))
    losses(weight, step, clear, steps=1)
    assert called == ["clear", "step"]


def test_a_zero_grad_that_is_replaced_during_training_is_called():
    _, optimizer = make()
    clear, called = clearer(optimizer), []
    clear()
    optimizer.zero_grad = lambda: called.append("own")
    clear()
    assert called == ["own"]


def test_a_profiler_finds_zero_grad_by_its_name():
    weight, optimizer = make()
    clear = clearer(optimizer)
    losses(weight, stepper(optimizer), clear)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        clear()
    assert "Optimizer.zero_grad#AdamW.zero_grad" in [event.key for event in profiler.key_averages()]


class Doubling(torch.optim.SGD):
    """A subclass that overrides `step`; torch puts its recording function around the override too."""

    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("before_training", [True, False])
def test_the_step_of_a_subclass_is_called_with_its_records(before_training):
    weight, _ = make()
    optimizer = Doubling([weight], lr=0.1)
    step = stepper(optimizer)
    if not before_training:
        losses(weight, step, clearer(optimizer), steps=1)
    calls = getattr(optimizer, "calls", 0)
    assert "Optimizer.step#Doubling.step" in records(step)
    assert optimizer.calls == calls + 1


def test_the_fast_path_is_not_taken_for_a_subclass(monkeypatch):
    weight, _ = make()
    optimizer = Doubling([weight], lr=0.1)
    step, made = stepper(optimizer), []
    original = torch.autograd.profiler.record_function
    monkeypatch.setattr(torch.autograd.profiler, "record_function", lambda name: made.append(name) or original(name))
    losses(weight, step, clearer(optimizer), steps=1)
    assert "Optimizer.step#Doubling.step" in made


def test_a_class_patched_before_its_first_optimizer_is_called_by_its_own_step(monkeypatch):
    class Fresh(torch.optim.SGD):
        pass

    called, original = [], torch.optim.SGD.step

    @functools.wraps(original)
    def patched(self, closure=None):
        called.append("patched")
        return original(self, closure)

    del patched.hooked  # torch puts its recording function around it
    Fresh.step = patched
    weight, _ = make()
    optimizer = Fresh([weight], lr=0.1)
    step, made = stepper(optimizer), []
    record = torch.autograd.profiler.record_function
    monkeypatch.setattr(torch.autograd.profiler, "record_function", lambda name: made.append(name) or record(name))
    losses(weight, step, clearer(optimizer), steps=2)
    assert called == ["patched"] * 2
    assert made[0] == "Optimizer.step#Fresh.step"


def test_the_zero_grad_of_a_subclass_is_called():
    class Keeps(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none=False)

    weight, _ = make()
    optimizer = Keeps([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    clearer(optimizer)()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_hooks_in_a_dictionary_that_was_replaced_are_called():
    weight, optimizer = make()
    step, called = stepper(optimizer), []
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.__setstate__({**optimizer.__getstate__(), "_optimizer_step_post_hooks": {0: lambda *_: called.append(1)}})
    losses(weight, step, clearer(optimizer), steps=1)
    assert called == [1]


WITHOUT_COMPILER = """
import sys
import torch
from torch.optim.lr_scheduler import StepLR
import footplate as fp
from footplate.step.examined_step import ExaminedStep
from models.small import Classifier, loader

def examine():
    with ExaminedStep() as examined:
        torch.nn.Linear(8, 3)(torch.ones(2, 8)).sum().backward()
    assert examined.flops

class Scheduled(Classifier):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self):
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01)
        return [optimizer], [StepLR(optimizer, 1)]

for name in "SGD", "AdamW":
    for epochs in 1, 2:
        trainer = fp.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=f"{sys.argv[1]}/{name}")
        trainer.fit(Scheduled(name), loader(), loader(), ckpt_path="last" if epochs == 2 else None)
    assert trainer.global_step == 24
examine()
assert "torch._dynamo" not in sys.modules, "training imported the compiler"

optimizer = trainer.optimizers[0]
torch.compile(optimizer.zero_grad, backend="eager")()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
examine()
names = "zero_grad", "load_state_dict", "state_dict", "add_param_group"
for method in [*(getattr(torch.optim.Optimizer, name) for name in names), ExaminedStep.__torch_dispatch__]:
    assert vars(method.__wrapped__)["__dynamo_disable"]._torchdynamo_disable, method
"""


def test_training_imports_no_compiler_and_a_later_import_tells_it_what_to_pass_over(tmp_path):
    program = [sys.executable, "-c", WITHOUT_COMPILER, str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, cwd=TESTS, check=False)
    assert ended.returncode == 0, ended.stderr
