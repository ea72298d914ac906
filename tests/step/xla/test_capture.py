"""Captured programs, their names, and refusals with the refused line."""

from __future__ import annotations

import copy
import math
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import footplate as fp
from footplate.core.errors import ConfigError
from footplate.data import next_token_targets
from footplate.step.xla.capture import CaptureError, capture_evaluation, capture_training, state_of
from footplate.step.xla.capture.tracing import graph_outputs
from step.xla.nets import Trained, made, mlp

pytestmark = pytest.mark.filterwarnings("ignore:.*not attached to a Trainer")


class Tiny(fp.Module):
    """A linear model. A test replaces its `training_step` by one line."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.scale = 2.0
        self.seen = 0
        self.outputs: list[Any] = []

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1]) * self.scale

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


BATCH = (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))


def capture(module: fp.Module, batch: Any = BATCH):
    return capture_training(module, torch.optim.SGD(module.parameters(), lr=0.1), batch)


def test_the_state_has_the_modules_and_the_optimizers_own_names():
    module = Trained(mlp())
    captured = capture_training(
        module, torch.optim.AdamW(module.parameters()), (torch.randn(4, 6), torch.zeros(4).long())
    )
    assert ("params", "net.0.weight") in captured.paths
    assert ("buffers", "net.1.running_mean") in captured.paths
    assert ("optimizer", "net.0.weight", "exp_avg_sq") in captured.paths
    assert captured.rates == 1
    assert captured.logs == {"train_loss": {"prog_bar": True}, "accuracy": {}}


def test_a_capture_leaves_module_and_optimizer_as_they_were():
    module, batches = made("mlp")
    optimizer = torch.optim.AdamW(module.parameters())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    kind, parameters = type(module), list(module.parameters())
    capture_training(module, optimizer, batches[0])
    assert type(module) is kind
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all(parameter.grad is None for parameter in module.parameters())


def test_weights_need_no_memory_to_be_captured():
    with torch.device("meta"):
        module = Tiny()
        module.net = nn.Linear(3, 10**12)  # four terabytes and more
    captured = capture(module)
    assert captured.graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape == (10**12, 3)


def test_a_mask_of_constants_selects_rows_and_a_large_tensor_of_one_number_needs_no_memory():
    class Selects(Tiny):
        def training_step(self, batch, batch_idx):
            rows = batch[0].new_ones(len(batch[0]), dtype=torch.bool).nonzero().flatten()
            return self.net(batch[0][rows]).mean() + batch[0].new_zeros(10**12)[0]

    assert capture(Selects()).trains


def test_state_that_no_step_changes_is_handed_on_by_no_operation():
    module = Tiny()
    module.unused = nn.Parameter(torch.ones(2))
    module.register_buffer("mask", torch.ones(2))
    captured = capture(module)
    inputs = dict(zip(captured.paths, captured.graph.graph.find_nodes(op="placeholder"), strict=False))
    after = dict(zip(captured.paths, graph_outputs(captured.graph), strict=False))
    kept = [path for path in captured.paths if after[path] is inputs[path]]
    assert kept == [("params", "unused"), ("buffers", "mask")]


def test_a_shared_parameter_is_one():
    module, batches = made("gpt")
    captured = capture(module, batches[0])
    assert ("params", "net.tokens.weight") in captured.paths
    assert ("params", "net.head.weight") not in captured.paths


def test_hooks_of_the_step_are_captured_with_it():
    class Hooked(Tiny):
        def on_after_backward(self):
            self.net.weight.grad.zero_()

    plain, hooked = ([str(node.target) for node in capture(kind()).graph.graph.nodes] for kind in (Tiny, Hooked))
    assert plain != hooked


def test_a_lightning_module_is_captured_as_it_stands():
    import lightning.pytorch as lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 2)

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_epoch=True)
            self.log_dict({"twice": 2 * loss})
            return {"loss": loss}

    captured = capture(Model())
    assert list(captured.logs) == ["loss", "twice"]
    assert captured.logs["loss"]["on_epoch"] is True


VALUES = {
    "an item": lambda self, batch: self.loss(batch) * (2 if self.loss(batch).item() > 1 else 1),
    "a branch": lambda self, batch: self.loss(batch) if self.loss(batch) > 1 else 2 * self.loss(batch),
    "a float": lambda self, batch: self.loss(batch) * float(batch[0].sum()),
    "a mask": lambda self, batch: self.net(batch[0])[batch[1] > 0].sum(),
    "nonzero": lambda self, batch: self.net(batch[0][batch[1].nonzero()]).sum(),
    "numpy": lambda self, batch: self.loss(batch) * batch[1].numpy().sum(),
    "a list": lambda self, batch: self.loss(batch) * batch[1].tolist()[0],
}


@pytest.mark.parametrize("kind", VALUES)
def test_what_depends_on_values_is_refused_with_its_line(kind):
    module = Tiny()
    step = VALUES[kind]
    type(module).training_step = lambda self, batch, batch_idx: step(self, batch)
    try:
        with pytest.raises(CaptureError) as refused:
            capture(module)
    finally:
        type(module).training_step = _plain_step
    assert f"test_capture.py:{step.__code__.co_firstlineno}:" in str(refused.value)


_plain_step = Tiny.training_step


def test_torchs_check_of_values_is_left_out_as_when_compiled():
    class Checking(Tiny):
        def training_step(self, batch, batch_idx):
            torch._check_tensor_all(batch[1] >= 0)
            return self.loss(batch)

    assert capture(Checking()).trains
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        torch._check_tensor_all(torch.tensor([False]))


def test_a_counter_may_be_handed_on():
    class Handing(Tiny):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)

    assert capture(Handing()).name == "Handing.training_step"


def test_a_counter_of_the_modules_own_is_refused_with_its_line():
    class Counting(Tiny):
        def training_step(self, batch, batch_idx):
            self.seen += 1
            return self.loss(batch)

    with pytest.raises(CaptureError, match=r"self\.seen: .*test_capture\.py:\d+: self\.seen \+= 1"):
        capture(Counting())


def test_tensors_left_in_attributes_are_refused():
    class Keeping(Tiny):
        def training_step(self, batch, batch_idx):
            self.last = self.loss(batch)
            return self.last

    class Collecting(Tiny):
        def training_step(self, batch, batch_idx):
            self.outputs.append(self.loss(batch))
            return self.outputs[-1]

    module = Keeping()
    with pytest.raises(CaptureError, match=r"self\.last: .*self\.last = self\.loss"):
        capture(module)
    assert not hasattr(module, "last")
    with pytest.raises(CaptureError, match=r"self\.outputs"):
        capture(Collecting())


def test_a_buffer_that_the_step_makes_another_of_is_refused():
    class Growing(Tiny):
        def __init__(self, more):
            super().__init__()
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
            self.more = more

        def training_step(self, batch, batch_idx):
            self.count = self.more(self.count)
            return self.loss(batch)

    capture(Growing(lambda count: count + 1))
    for more, what in ((lambda count: count + 0.5, "float32"), (lambda count: torch.cat([count, count]), r"\(2,\)")):
        with pytest.raises(CaptureError, match=rf"the buffer count one of .*{what}"):
            capture(Growing(more))


def test_the_schedulers_rates_are_no_constants():
    class Logging(Tiny):
        def training_step(self, batch, batch_idx):
            self.log("rate", self.trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0])
            return self.loss(batch)

    module = Logging()
    module._trainer = SimpleNamespace(current_epoch=0, global_step=0)
    with pytest.raises(CaptureError, match=r"self\.trainer\.lr_scheduler_configs is used"):
        capture(module)


def test_a_plain_value_that_only_the_first_run_sets_is_no_counter():
    class Caching(Tiny):
        def training_step(self, batch, batch_idx):
            self.seen = self.seen or batch[0].shape[1]
            return self.loss(batch) / self.seen

    assert capture(Caching()).reads.attributes["", "seen"][0] == 3


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_pythons_and_numpys_draws_are_refused(draw):
    class Drawing(Tiny):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * draw()

    with pytest.raises(CaptureError, match="random"):
        capture(Drawing())


def test_an_attribute_that_the_step_read_is_watched():
    module = Tiny()
    captured = capture(module)
    captured.check_attributes(module)
    module.scale = 3.0
    with pytest.raises(CaptureError, match=r"self\.scale was 2\.0 .* is 3\.0 now; read at .*test_capture\.py"):
        captured.check_attributes(module)


def test_a_plain_attribute_of_the_class_is_watched():
    class Scaled(Tiny):
        weight = 1.0

        def training_step(self, batch, batch_idx):
            return self.loss(batch) * self.weight

    module = Scaled()
    captured = capture(module)
    captured.check_attributes(module)
    module.weight = 0.5
    with pytest.raises(CaptureError, match=r"self\.weight was 1\.0 .* is 0\.5 now"):
        captured.check_attributes(module)


def test_a_function_in_an_attribute_is_watched():
    class Chosen(Tiny):
        def __init__(self):
            super().__init__()
            self.criterion = F.cross_entropy

        def training_step(self, batch, batch_idx):
            return self.criterion(self.net(batch[0]), batch[1])

    module = Chosen()
    captured = capture(module)
    captured.check_attributes(module)
    module.criterion = F.multi_margin_loss
    with pytest.raises(CaptureError, match=r"self\.criterion was <function cross_entropy.*multi_margin_loss"):
        captured.check_attributes(module)


def test_another_submodule_or_buffer_in_the_place_of_one_is_seen():
    class Judged(Tiny):
        def __init__(self):
            super().__init__()
            self.criterion = nn.CrossEntropyLoss()

        def training_step(self, batch, batch_idx):
            return self.criterion(self.net(batch[0]), batch[1])

    module = Judged()
    captured = capture(module)
    captured.check_attributes(module)
    module.criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]))
    with pytest.raises(CaptureError, match=r"criterion\.weight was nothing .* is float32\[2\] now"):
        captured.check_attributes(module)
    module.criterion = nn.MultiMarginLoss()
    with pytest.raises(
        CaptureError, match=r"criterion was a CrossEntropyLoss .* is a MultiMarginLoss in training mode"
    ):
        captured.check_attributes(module)


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 2.0), ([1, 2], [1.0, 2]), (np.ones(2), np.array([1.0, 2.0])), ({1}, {1, 2}), (1, True)],
)
def test_a_value_of_another_type_and_one_inside_of_an_array_is_seen(before, after):
    class Reading(Tiny):
        def __init__(self):
            super().__init__()
            self.read, self.same = before, math.nan

        def training_step(self, batch, batch_idx):
            assert self.read is not None
            assert self.same != 0
            return self.loss(batch)

    module = Reading()
    captured = capture(module)
    module.read, module.same = copy.deepcopy(before), float("nan")
    captured.check_attributes(module)
    if isinstance(before, np.ndarray):
        module.read[:] = after  # in place
    else:
        module.read = after
    with pytest.raises(CaptureError, match=r"self\.read was .* is .* now"):
        captured.check_attributes(module)


def test_a_hook_that_is_registered_later_is_seen():
    module = Tiny()
    captured = capture(module)
    handle = module.net.register_forward_hook(lambda part, given, made: made * 2)
    with pytest.raises(CaptureError, match=r"net was a .* is a .* with hooks"):
        captured.check_attributes(module)
    handle.remove()
    captured.check_attributes(module)


@pytest.mark.parametrize("where", ["submodule", "list", "dictionary", "record", "private", "tensor"])
def test_whatever_the_step_read_of_attributes_is_watched(where):
    class Reading(Tiny):
        def __init__(self):
            super().__init__()
            self.net.submodule = 1.0
            self.list, self.dictionary = [1.0, [2.0]], {"a": {"b": 1.0}}
            self.record, self._private, self.tensor = SimpleNamespace(a=1.0), 1.0, torch.ones(())
            self.unread = 1.0

        def training_step(self, batch, batch_idx):
            number = self.net.submodule + self.list[1][0] + self.dictionary["a"]["b"] + self.record.a + self._private
            return self.loss(batch) * number * self.tensor

    module = Reading()
    captured = capture(module)
    module.unread = 5.0
    captured.check_attributes(module)
    if where == "submodule":
        module.net.submodule = 5.0
    elif where == "tensor":
        module.tensor.add_(1)
    elif where == "private":
        module._private = 5.0
    else:
        {"list": module.list[1], "dictionary": module.dictionary["a"], "record": vars(module.record)}[
            where
        ].__setitem__({"list": 0, "dictionary": "b", "record": "a"}[where], 5.0)
    with pytest.raises(CaptureError, match=rf"self\.(net\.|_)?{where} was .*; read at .*test_capture\.py"):
        captured.check_attributes(module)


def test_a_changed_mode_is_seen():
    module = Tiny()
    captured = capture(module)
    module.net.eval()
    with pytest.raises(CaptureError, match=r"net was a Linear in training mode .* in evaluation mode"):
        captured.check_attributes(module)


def test_what_a_batch_has_beside_tensors_is_refused():
    with pytest.raises(CaptureError, match=r"\['name'\].*'a\.png'"):
        capture(Tiny(), {"x": BATCH[0], "name": "a.png"})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: torch.optim.Adafactor(p), "Adafactor can't be captured yet"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS can't be captured yet: of torch's, there are SGD, Adam, AdamW"),
        (lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(2))], lr=0.1), "no parameter of Tiny"),
    ],
)
def test_optimizers_that_are_not_supported_say_so(make, says):
    module = Tiny()
    with pytest.raises(CaptureError, match=says):
        capture_training(module, make(module.parameters()), BATCH)


def test_a_step_that_returns_none_is_skipped_and_one_that_returns_something_else_is_refused():
    class Lossless(Tiny):
        def training_step(self, batch, batch_idx):
            return self.returned

    module = Lossless()
    module.returned = None
    captured = capture(module)
    assert captured.skips
    assert captured.steps == 0
    module.returned = 7
    with pytest.raises(ConfigError, match="expected the loss"):
        capture(module)


def test_an_optimizer_step_of_the_users_own_is_refused():
    class Stepping(Tiny):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            optimizer.step(closure)

    with pytest.raises(CaptureError, match="Stepping overrides optimizer_step"):
        capture(Stepping())


def test_an_evaluation_that_changes_a_buffer_is_refused():
    class Counting(Tiny):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def validation_step(self, batch, batch_idx):
            self.count += 1

    with pytest.raises(CaptureError, match=r"changes buffers\.count"):
        capture_evaluation(Counting(), BATCH)


def test_a_mistake_of_the_users_own_stays_what_it_is():
    class Wrong(Tiny):
        def training_step(self, batch, batch_idx):
            return self.net(batch[0].T)

    with pytest.raises(RuntimeError, match="same reduction dim"):
        capture(Wrong())


def test_the_state_shares_its_memory():
    module = Tiny()
    assert state_of(module)["params", "net.weight"].data_ptr() == module.net.weight.data_ptr()


def test_an_operation_in_footplate_has_the_users_line_that_calls_it():
    class Words(Tiny):
        def training_step(self, batch, batch_idx):
            targets = next_token_targets(batch[1][None], torch.ones(1, 4, dtype=torch.long))
            loss = F.cross_entropy(self.net(batch[0]), targets[0], reduction="sum")
            return {"loss_sum": loss, "weight": (targets != -100).sum()}

    nodes = capture(Words()).graph.graph.nodes
    lines = [node.meta["line"] for node in nodes if "line" in node.meta]
    assert any("targets = next_token_targets" in line for line in lines)
    assert {line.partition(":")[0] for line in lines} == {__file__}


def test_capturing_does_not_import_jax():
    code = "import sys, footplate, footplate.step.xla.capture; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
