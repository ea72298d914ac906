"""Several devices in one process, on CUDA: on all GPUs, or with two replicas on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.common import Plain, same, seeded, weights
from distributed.test_replicas import Fails, Logs
from models.small import Classifier, loader

import footplate as fp
from footplate.distributed.replicas import Replicas

SEVERAL = torch.cuda.device_count() > 1
DEVICES = [torch.device("cuda", index if SEVERAL else 0) for index in range(2)]


def shared(make_trainer: Any, **settings: Any) -> fp.Trainer:
    """A trainer with two replicas: on two GPUs, or both on the first."""
    if SEVERAL:
        return make_trainer(devices=2, strategy="replicas", **settings)
    trainer = make_trainer(devices=1, **settings)
    trainer.run.placement.parallel = Replicas(DEVICES)
    return trainer


CASES: dict[str, dict[str, Any]] = {
    "plainly": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("module", [Plain, Logs])
def test_replicas_learn_and_log_what_one_device_does(module, name, make_trainer):
    alone, together = seeded(module), seeded(module)
    first, second = make_trainer(**CASES[name]), shared(make_trainer, **CASES[name])
    first.fit(alone, loader(51, 16))
    second.fit(together, loader(51, 16))
    same(weights(alone), weights(together))
    wanted = {name: float(value) for name, value in first.callback_metrics.items() if not name.startswith("rows")}
    assert {name: float(second.callback_metrics[name]) for name in wanted} == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_replicas_learn_in_mixed_precision(precision, make_trainer):
    runner = shared(make_trainer, precision=precision, max_epochs=8)
    runner.fit(seeded(Plain), loader(120, 16))
    assert float(runner.callback_metrics["train_loss_epoch"]) < 1.0


def test_each_replica_computes_on_its_own_device_and_so_does_its_backward_pass(make_trainer):
    seen: set[tuple[torch.device, ...]] = set()

    class Seen(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            loss.register_hook(lambda gradient: seen.add((gradient.device, batch[0].device, self.device)))
            return loss

    shared(make_trainer, max_epochs=1).fit(seeded(Seen), loader(48, 16))
    assert seen == {(device, device, device) for device in DEVICES}


if SEVERAL:  # two copies on one GPU share its generator, and which of them draws first is not said

    def test_dropout_is_the_same_in_every_run(make_trainer):
        found = []
        for _ in range(2):
            model = seeded(Classifier)
            shared(make_trainer).fit(model, loader(48, 16))
            found.append(weights(model))
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_replica_raises_names_its_device(where, make_trainer):
    with pytest.raises(ValueError, match="no good") as found:
        shared(make_trainer).fit(seeded(type("Fails", (Fails,), {"where": where})), loader(48, 16))
    assert found.value.__notes__ == [f"Raised in replica 1 of 2, on {DEVICES[1]}."]
