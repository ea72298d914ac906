"""Steps compiled by `torch.compile`, as CUDA graphs, and by XLA, beside the eager step on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.small import Classifier, loader

import footplate as fp


class Plain(Classifier):
    """Without dropout, whose draws differ in a compiled step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))


def trained(make_trainer: Any, **settings: Any) -> tuple[dict[str, torch.Tensor], float]:
    torch.manual_seed(0)
    module = Plain()
    trainer = make_trainer(max_epochs=3, enable_checkpointing=False, **settings)
    trainer.fit(module, loader(), loader(30, shuffle=False))
    return {name: value.cpu() for name, value in module.state_dict().items()}, float(
        trainer.callback_metrics["train_loss"]
    )


GRAPHS = {"mode": "reduce-overhead"}
COMPILERS: dict[str, dict[str, Any]] = {
    "inductor": {"compile": True},
    "cuda graphs": {"compile": GRAPHS},
    "xla": {"accelerator": "xla"},
}


@pytest.mark.parametrize("every", [1, 3], ids=["each step", "accumulated"])
@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiled_step_learns_what_the_eager_step_learns(name, every, make_trainer):
    settings = {"accumulate_grad_batches": every, "gradient_clip_val": 0.5}
    if name == "xla":
        settings["deterministic"] = None  # type: ignore[assignment]
    weights, loss = trained(make_trainer, accumulate_grad_batches=every, gradient_clip_val=0.5)
    found, found_loss = trained(make_trainer, **settings, **COMPILERS[name])
    assert found_loss == pytest.approx(loss, rel=1e-3)
    for key, value in weights.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


def test_predictions_of_a_cuda_graph_outlive_its_next_run(make_trainer):
    class Predicts(Plain):
        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0])

    torch.manual_seed(0)
    module = Predicts()
    plain, graphs = (
        make_trainer(compile=options).predict(module, loader(40, shuffle=False)) for options in (False, GRAPHS)
    )
    for wanted, found in zip(plain, graphs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", ["cuda", "xla"])
def test_a_checkpoint_goes_from_torch_to_xla_and_back(first, make_trainer):
    then = {"cuda": "xla", "xla": "cuda"}[first]
    common = {"deterministic": None}
    saver = fp.ModelCheckpoint(every_n_train_steps=6)
    make_trainer(accelerator=first, max_epochs=1, callbacks=[saver], **common).fit(Plain(), loader())
    runner = make_trainer(accelerator=then, **common)
    runner.fit(Plain(), loader(), ckpt_path="last")
    assert runner.global_step == 24


def test_xla_uses_the_gpu(make_trainer):
    import jax

    make_trainer(accelerator="xla", max_epochs=1, deterministic=None).fit(Plain(), loader())
    assert jax.local_devices()[0].platform == "gpu"


def test_a_sharded_model_on_one_gpu_learns_what_a_whole_one_learns(make_trainer):
    """FSDP2 with NCCL, in a world of one."""
    weights, loss = trained(make_trainer)
    found, found_loss = trained(make_trainer, strategy="fsdp")
    assert found_loss == pytest.approx(loss, rel=1e-4)
    for key, value in weights.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
