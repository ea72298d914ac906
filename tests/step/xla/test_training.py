"""Training steps beyond one loss and one optimizer: five steps against eager torch, in double precision."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score

import footplate as fp
from footplate.core.errors import ConfigError
from footplate.step.precision import Precision
from footplate.step.xla.capture import CaptureError, capture_training, load_state, state_of
from footplate.step.xla.lowering import arrays_of, batch_arrays, lower, rates_of, tensors_like
from footplate.step.xla.lowering.data_parallel import data_parallel, mesh_of
from step.xla.test_parity import worst

pytestmark = pytest.mark.filterwarnings("ignore:.*not attached to a Trainer")


class Small(fp.Module):
    """A small network with matrices, vectors and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.ones(2))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


def made(kind: type[fp.Module] = Small, steps: int = 5, rows: int = 8) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    batches = [(torch.randn(rows, 5, dtype=torch.float64), torch.randint(0, 3, (rows,))) for _ in range(steps)]
    return kind().double(), batches


class Programs:
    """A training step by one program, or by two when batches are accumulated."""

    def __init__(self, module: Any, optimizer: Any, batch: Any, devices: int = 1, **settings: Any) -> None:
        self.devices, self.window = devices, settings.get("accumulate_grad_batches", 1)
        share = tuple(tensor[: len(tensor) // devices] for tensor in batch)
        self.made = {}
        for ends in {True} if self.window == 1 else (True, False):
            capture = capture_training(module, optimizer, share, averages=devices > 1, ends_window=ends, **settings)
            if devices > 1:
                step = data_parallel(capture, mesh_of(jax.devices()[:devices]))
            else:
                step = jax.jit(lower(capture), compiler_options={"xla_backend_optimization_level": 0})
            self.made[ends] = capture, step

    def fit(self, module: Any, optimizer: Any, batches: list[Any]) -> list[float]:
        """Train, and update module and optimizer."""
        gradients = self.window > 1
        state, losses = arrays_of(state_of(module, optimizer, gradients)), []
        for index, batch in enumerate(batches):
            captured, step = self.made[(index + 1) % self.window == 0]
            given = batch_arrays(captured, batch, self.devices)
            state, loss, _ = step(state, rates_of(optimizer), jax.random.key(index), given)
            losses.append(float(loss))
        load_state(module, optimizer, tensors_like(state_of(module, optimizer, gradients), state))
        return losses


def fit(module: Any, optimizer: Any, batches: list[Any], devices: int = 1, **settings: Any) -> list[float]:
    return Programs(module, optimizer, batches[0], devices, **settings).fit(module, optimizer, batches)


def eager(module: Any, optimizer: Any, batches: list[Any], window: int = 1) -> list[float]:
    losses = []
    for index, batch in enumerate(batches):
        loss = module.training_step(batch, index)
        (loss / window).backward()
        if (index + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "SGD dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, betas=(0.9, 0.7)),  # it rectifies from the fifth step or so
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2, lambd=0.01),
}


def check(name: str) -> None:
    tolerance, make = 1e-6 if name.startswith("SGD") else 1e-5, OPTIMIZERS[name]
    module, batches = made(steps=7)
    reference = copy.deepcopy(module)
    mine, other = make(module.parameters()), make(reference.parameters())
    with jax.enable_x64(True):
        programs = Programs(module, mine, batches[0])
        losses = programs.fit(module, mine, batches[:3])
    assert losses == pytest.approx(eager(reference, other, batches[:3]), rel=tolerance)
    assert worst(module, reference) <= tolerance
    # The optimizer's state is torch's too: eager torch continues from XLA's state, and XLA from eager torch's.
    eager(module, mine, batches[3:5])
    eager(reference, other, batches[3:5])
    assert worst(module, reference) <= tolerance
    with jax.enable_x64(True):
        programs.fit(module, mine, batches[5:])
    eager(reference, other, batches[5:])
    assert worst(module, reference) <= tolerance


@pytest.mark.parametrize("name", ["SGD dampened", "AdamW", "RMSprop"])
def test_an_optimizer_trains_as_in_eager_torch_and_goes_on_there_and_back(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("SGD dampened", "AdamW", "RMSprop")])
def test_every_optimizer_trains_as_in_eager_torch_and_goes_on_there_and_back(name):
    check(name)


@pytest.mark.slow
def test_muon_trains_matrices_as_in_eager_torch():
    module, batches = made()
    reference = copy.deepcopy(module)

    def matrices(module: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in module.parameters() if p.dim() == 2], lr=0.02)

    with jax.enable_x64(True):
        fit(module, matrices(module), batches)
    eager(reference, matrices(reference), batches)
    assert worst(module, reference) <= 0.05  # it orthogonalises in bfloat16


def test_what_an_optimizer_has_not_begun_is_not_in_its_state():
    module, batches = made()
    optimizer = OPTIMIZERS["SGD dampened"](module.parameters())
    load_state(module, optimizer, {path: tensor.clone() for path, tensor in state_of(module, optimizer).items()})
    assert not any(optimizer.state.values())
    eager(module, optimizer, batches[:1])
    assert not any(torch.isnan(parameter).any() for parameter in module.parameters())


def test_a_scheduler_needs_no_new_capture_and_another_setting_that_changes_is_noticed():
    module, batches = made()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    cycle = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    captured = capture_training(module, optimizer, batches[0])
    assert captured.rates == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer hasn't stepped
        cycle.step()
    captured.check_attributes(module, optimizer)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(CaptureError, match=r"weight_decay of AdamW's group 0 was 0\.01 and is 0\.5 now"):
        captured.check_attributes(module, optimizer)


@pytest.mark.parametrize("name", ["AdamW", "SGD nesterov", "RMSprop"])
def test_a_momentum_that_goes_up_and_down_is_that_of_eager_torch(name):
    make = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
        "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    }[name]
    module, batches = made(steps=6)
    reference = copy.deepcopy(module)
    mine, other = make(module.parameters()), make(reference.parameters())
    cycles = [lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8) for optimizer in (mine, other)]
    with jax.enable_x64(True):
        captured = capture_training(module, mine, batches[0])
        step, state = jax.jit(lower(captured)), arrays_of(state_of(module, mine))
        for index, batch in enumerate(batches):
            state, _, _ = step(state, rates_of(mine), jax.random.key(index), batch_arrays(captured, batch))
            mine.step()
            cycles[0].step()
            eager(reference, other, [batch])
            cycles[1].step()
        trained = tensors_like(state_of(module, mine), state)
    for parameter_name, wanted in reference.named_parameters():
        torch.testing.assert_close(trained["params", parameter_name], wanted.detach(), rtol=1e-5, atol=1e-7)


class Lion(torch.optim.Optimizer):
    """Lion as its authors published it (Chen et al., 2023); `begins` is its initial state."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, begins="zeros"):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "begins": begins})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, (beta1, beta2) = self.state[parameter], group["betas"]
                if not state:
                    begins = {"zeros": torch.zeros_like, "weights": torch.clone, "count": torch.zeros_like}
                    state["exp_avg"] = begins[group["begins"]](parameter)
                if group["begins"] == "count":
                    state["step"] = state.get("step", 0) + 1
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"] * beta1 + parameter.grad * (1 - beta1)
                parameter.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


def test_an_optimizer_that_is_not_torchs_is_tried_and_captured():
    module, batches = made()
    reference = copy.deepcopy(module)
    mine, other = Lion(module.parameters()), Lion(reference.parameters())
    fit(module, mine, batches)
    eager(reference, other, batches)
    for (name, value), wanted in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("begins", "said"), [("weights", "doesn't begin with zeros"), ("count", "keeps step as plain")]
)
def test_an_optimizer_that_does_not_begin_with_zeros_is_refused(begins, said):
    module, batches = made()
    with pytest.raises(CaptureError, match=f"Lion can't be captured: .*{said}"):
        capture_training(module, Lion(module.parameters(), begins=begins), batches[0])


def test_accumulated_batches_make_eager_torchs_steps():
    module, batches = made(steps=6)
    reference = copy.deepcopy(module)
    mine, other = OPTIMIZERS["AdamW"](module.parameters()), OPTIMIZERS["AdamW"](reference.parameters())
    with jax.enable_x64(True):
        losses = fit(module, mine, batches, devices=2, accumulate_grad_batches=3)
    assert losses == pytest.approx(eager(reference, other, batches, 3), rel=1e-6)
    assert worst(module, reference) <= 1e-5
    assert mine.state_dict()["state"][1]["step"] == 2


def test_an_unfinished_window_is_finished_by_eager_torch():
    module, batches = made(steps=6)
    reference = copy.deepcopy(module)
    mine, other = OPTIMIZERS["Adam"](module.parameters()), OPTIMIZERS["Adam"](reference.parameters())
    with jax.enable_x64(True):
        fit(module, mine, batches[:2], accumulate_grad_batches=3)
    assert module.net[0].weight.grad.norm() > 0
    loss = module.training_step(batches[2], 2)
    (loss / 3).backward()
    mine.step()
    eager(reference, other, batches[:3], 3)
    assert worst(module, reference) <= 1e-6


class Wide(fp.Module):
    """Matrices, a convolution and attention, large enough for bfloat16 to matter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 16, 3, padding=1)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def training_step(self, batch, batch_idx):
        x = self.conv(batch[0][:, :, None].expand(-1, -1, 6)).mT
        return F.cross_entropy(self.head(self.layer(x).mean(1)), batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16-mixed", "bf16-true"])
def test_bfloat16_comes_as_near_to_single_precision_as_eager_torchs(name):
    module, batches = made(Wide, steps=8, rows=16)
    module, batches = module.float(), [(x.float(), y) for x, y in batches]
    single, half = copy.deepcopy(module), copy.deepcopy(module)
    precision = Precision.parse(name)
    precision.convert_module(module)
    precision.convert_module(half)
    makes = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (module, half, single)]
    losses = fit(module, makes[0], batches, precision=name)
    expected = eager(single, makes[2], batches)
    in_half = []
    for batch in batches:
        makes[1].zero_grad()
        with precision.forward_context(torch.device("cpu")):
            loss = half.training_step(precision.convert_batch(batch), 0)
        loss.backward()
        makes[1].step()
        in_half.append(loss.item())
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.02)
    assert losses == pytest.approx(in_half, rel=0.02)
    assert next(module.parameters()).dtype == precision.parameters


def test_under_autocast_products_are_bfloat16_and_the_state_is_not():
    module, batches = made(Wide)
    module, batch = module.float(), (batches[0][0].float(), batches[0][1])
    captured = capture_training(module, torch.optim.SGD(module.parameters(), lr=0.1), batch, precision="bf16-mixed")
    nodes = list(captured.graph.graph.nodes)
    kinds = {node.meta["val"].dtype for node in nodes if str(node.target).startswith("aten.addmm")}
    assert kinds == {torch.bfloat16}
    assert {node.meta["val"].dtype for node in nodes[: len(captured.paths)]} == {torch.float32}


class Rematerialised(fp.Module):
    """A layer with dropout whose forward pass is computed again in the backward pass."""

    def __init__(self, again: bool = True) -> None:
        super().__init__()
        self.again = again
        self.layer = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 3))
        self.first = nn.Dropout(0.3)

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0])
        y = checkpoint(self.layer, x, use_reentrant=False) if self.again else self.layer(x)
        return F.cross_entropy(y + self.first(x)[:, :3], batch[1])


def test_a_checkpointed_layer_draws_the_same_numbers_when_it_is_computed_again():
    module, batches = made(Rematerialised)
    plain = copy.deepcopy(module)
    plain.again = False
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (module, plain)]
    with jax.enable_x64(True):
        losses = fit(module, optimizers[0], batches)
        assert losses == pytest.approx(fit(plain, optimizers[1], batches), rel=1e-9)
    assert worst(module, plain) <= 1e-9


def test_metrics_in_their_functional_form_are_part_of_the_program():
    class Measured(Small):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            self.log("accuracy", multiclass_accuracy(logits, batch[1], 3, average="micro", validate_args=False))
            self.log("f1", multiclass_f1_score(logits, batch[1], 3, validate_args=False))
            self.log("weighted", torch.bincount(batch[1], batch[0][:, 0], minlength=4)[1])
            self.log("one_hot", F.one_hot(batch[1], 3)[:, 2].sum())
            return F.cross_entropy(logits, batch[1])

    module, batches = made(Measured)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    captured = capture_training(module, optimizer, batches[0])
    with jax.enable_x64(True):
        state = arrays_of(state_of(module, optimizer))
        given = rates_of(optimizer), jax.random.key(0), batch_arrays(captured, batches[0])
        _, _, logs = jax.jit(lower(captured))(state, *given)
    logits = module.net(batches[0][0])
    assert float(logs["accuracy"]) == pytest.approx(
        multiclass_accuracy(logits, batches[0][1], 3, average="micro").item()
    )
    assert float(logs["weighted"]) == pytest.approx(torch.bincount(batches[0][1], batches[0][0][:, 0])[1].item())
    assert int(logs["one_hot"]) == (batches[0][1] == 2).sum()
    assert float(logs["f1"]) == pytest.approx(multiclass_f1_score(logits, batches[0][1], 3).item())


class Hooked(Small):
    """Overrides all hooks that it may override."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad()

    def backward(self, loss):
        (2 * loss).backward()

    def on_after_backward(self):
        self.net[0].weight.grad.mul_(0.5)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val / 2, gradient_clip_algorithm)


def test_overridden_hooks_are_part_of_the_program():
    module, batches = made(Hooked)
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    with jax.enable_x64(True):
        fit(module, torch.optim.SGD(module.parameters(), lr=0.1), batches, gradient_clip_val=0.2)
    for batch in batches:
        optimizer.zero_grad()
        (2 * reference.training_step(batch, 0)).backward()
        reference.net[0].weight.grad.mul_(0.5)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
    assert worst(module, reference) <= 1e-6


class Adversaries(fp.Module):
    """Two networks with an optimizer each, trained by hand."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            loss = F.softplus(-self.judge(self.generator(batch[0]))).mean()
            first.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(first, 0.5)
            first.step()
        second.zero_grad()
        made = self.judge(self.generator(batch[0]).detach())
        judged = F.softplus(made).mean() + F.softplus(-self.judge(batch[0])).mean()
        self.manual_backward(judged)
        second.step()
        self.log_dict({"generator": loss, "judge": judged})
        return loss + judged


def adversaries(module: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(module.generator.parameters(), lr=0.02, betas=(0.5, 0.999)),
        torch.optim.RMSprop(module.judge.parameters(), lr=0.01),
    ]


def test_two_optimizers_by_hand_train_as_in_eager_torch(make_trainer):
    module, batches = made(Adversaries)
    reference = copy.deepcopy(module)
    reference.configure_optimizers = lambda: adversaries(reference)
    optimizers = adversaries(module)
    with jax.enable_x64(True):
        programs = Programs(module, optimizers, batches[0], devices=2)
        programs.fit(module, optimizers, batches)
    make_trainer(max_epochs=1).fit(reference, batches)
    assert worst(module, reference) <= 1e-5
    assert programs.made[True][0].steps == 2


def test_gradients_that_would_outlive_a_step_by_hand_are_refused():
    class Careless(Adversaries):
        def training_step(self, batch, batch_idx):
            first, _ = self.optimizers()
            self.manual_backward(self.generator(batch[0]).square().mean())
            first.step()

    module, batches = made(Careless)
    with pytest.raises(CaptureError, match="never clears"):
        capture_training(module, adversaries(module), batches[0])


def test_a_scheduler_stepped_inside_a_step_is_refused():
    class Scheduling(Adversaries):
        def training_step(self, batch, batch_idx):
            self.lr_schedulers().step()

    module, batches = made(Scheduling)
    with pytest.raises(CaptureError, match=r"self\.lr_schedulers\(\)"):
        capture_training(module, adversaries(module), batches[0])


@pytest.mark.parametrize(
    ("kind", "settings", "error"),
    [
        (Adversaries, {"accumulate_grad_batches": 2}, ConfigError),
        (Small, {"ends_window": False}, ConfigError),
        (Hooked, {"accumulate_grad_batches": 2}, CaptureError),
        (Small, {"precision": "16-mixed"}, CaptureError),
    ],
)
def test_settings_that_do_not_go_together_are_refused(kind, settings, error):
    module, batches = made(kind)
    optimizers: Any = adversaries(module) if kind is Adversaries else torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(error):
        capture_training(module, optimizers, batches[0], **settings)
