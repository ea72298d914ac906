"""The trainer's choice of devices with XLA, and refusals before any work begins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import template
import torch
from models.small import loader

import footplate as fp
from footplate import checkpoint
from footplate.hardware.doctor import examine_accelerator
from footplate.hardware.xla import TPU, XLA, cache_directory, tpu_chips
from footplate.step.xla.capture import CaptureError
from step.xla.trained import Steady, equal

TESTS = Path(__file__).parents[2]


def environment(**environ: str) -> dict[str, str]:
    """Environment of this process with the tests' modules on the path, without the settings for its own devices."""
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return {**clean, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "JAX_PLATFORMS": "cpu", **environ}


def output_of(code: str, tmp_path: Path) -> str:
    """Output of a program in a process of its own, where JAX has started no devices."""
    script = tmp_path / "program.py"
    script.write_text(code)
    return forked([sys.executable, script], environment())[1]


def forked(command: list[object], environ: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of a program in a fork of a process that has imported JAX."""
    process = template.Popen(command, packages=template.WITH_JAX, env=environ, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


@pytest.mark.parametrize(
    ("devices", "parsed"),
    [("auto", [0]), (1, [0]), (8, list(range(8))), ("4", [0, 1, 2, 3]), ([5], [5]), ("2,7", [2, 7])],
)
def test_devices_are_virtual_ones_of_the_cpu(devices, parsed):
    assert XLA().parse_devices(devices) == parsed


def test_one_process_drives_all_devices(make_trainer):
    trainer = make_trainer(accelerator="xla", devices=8)
    assert trainer.device_ids == list(range(8))
    assert not trainer.run.placement.starts_ranks
    assert trainer.world.size == trainer.ranks_asked == 1


def test_a_step_runs_on_the_device_that_was_asked_for(make_trainer):
    trainer = make_trainer(accelerator="xla", devices=[5], max_epochs=1)
    devices = []

    class Looks(fp.Callback):
        def on_validation_batch_end(self, trainer, *_):
            devices.extend(device.id for device in trainer.step._mesh.devices)

    trainer.callbacks = trainer.own_callbacks = [*trainer.own_callbacks, Looks()]
    trainer.fit(Steady(), loader(20), loader(10))
    assert set(devices) == {5}


def test_the_trainer_starts_as_many_virtual_devices_as_it_is_asked_for(tmp_path):
    made = 'import footplate as fp; fp.Trainer(accelerator="xla", devices=3, max_epochs=1)'
    script = f"{made}; import jax; print(len(jax.devices()))"
    assert output_of(script, tmp_path) == "3\n"


def test_a_trainer_that_comes_too_late_for_its_devices_says_what_to_do(tmp_path):
    script = """if True:
        import jax, footplate as fp
        jax.devices()
        try:
            fp.Trainer(accelerator="xla", devices=8, max_epochs=1)
        except fp.ConfigError as error:
            print(error)
    """
    said = output_of(script, tmp_path)
    assert "devices=8: JAX was started before with 1 device(s)" in said
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=8" in said


@pytest.mark.parametrize(
    "arguments",
    [
        {"accelerator": "tpu", "devices": 8},
        {"accelerator": "tpu", "devices": [5]},
        {"tpu_cores": 8},
        {"tpu_cores": [5]},
    ],
)
@pytest.mark.filterwarnings("ignore:tpu_cores")
def test_a_tpu_that_is_not_there_is_refused(arguments):
    with pytest.raises(fp.ConfigError, match="no TPU is attached to this machine"):
        fp.Trainer(max_epochs=1, **arguments)


def test_chips_are_counted_by_their_device_files(tmp_path):
    assert tpu_chips(tmp_path) == []
    for index in range(4):
        (tmp_path / f"accel{index}").touch()
    assert [chip.index for chip in tpu_chips(tmp_path)] == [0, 1, 2, 3]


def test_the_doctor_knows_both_without_starting_jax():
    script = """if True:
        import sys
        from footplate.hardware.doctor import examine
        accelerators = {accelerator.name: accelerator for accelerator in examine().accelerators}
        xla, tpu = accelerators["xla"], accelerators["tpu"]
        print(xla.usable, tpu.usable, xla.details[0][0], "jax" in sys.modules)
    """
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.stdout == "True False jax False\n"
    assert "no TPU" in (examine_accelerator(TPU()).reason or "")


def test_auto_is_not_xla_on_a_cpu():
    assert fp.Trainer(max_epochs=1).accelerator.name != "xla"


def test_programs_are_kept_beside_other_caches():
    assert cache_directory({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/footplate/xla")
    assert cache_directory({}) == Path.home() / ".cache/footplate/xla"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("strategy", "ddp"), ("strategy", "replicas"), ("num_nodes", 2), ("compile", True),
        ("detect_anomaly", True), ("deterministic", True), ("min_devices", 1), ("precision", "16-mixed"),
        ("iterations_per_loop", 0),
    ],
)  # fmt: skip
def test_an_argument_that_means_nothing_with_xla_is_refused_by_name(argument, value, make_trainer):
    with pytest.raises(fp.ConfigError, match=f"{argument}=.?{value}"):
        make_trainer(**{"accelerator": "xla", "devices": 2, argument: value})


@pytest.mark.filterwarnings("ignore:XLA_USE_BF16")
def test_the_older_variable_for_bfloat16_holds(make_trainer, monkeypatch):
    monkeypatch.setenv("XLA_USE_BF16", "1")
    assert make_trainer(accelerator="xla").precision.name == "bf16-true"
    assert make_trainer(accelerator="xla", precision="bf16-mixed").precision.name == "bf16-mixed"


def test_several_steps_in_a_call_are_for_xla_alone(make_trainer):
    with pytest.raises(fp.ConfigError, match=r'iterations_per_loop=4: accelerator="cpu" runs step by step'):
        make_trainer(accelerator="cpu", iterations_per_loop=4)


def test_a_module_that_takes_the_sequence_into_its_own_hands_is_refused(make_trainer):
    class Two(Steady):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

    class OwnStep(Steady):
        def optimizer_step(self, *args, **kwargs):
            pass

    class OwnMode(Steady):
        def on_validation_model_eval(self):
            pass

    class Sees(fp.Callback):
        def on_after_backward(self, trainer, pl_module):
            pass

    for model, callbacks, said in (
        (Two(), [], "returned 2 optimizers: with several, set self.automatic_optimization = False"),
        (OwnStep(), [], r"OwnStep overrides optimizer_step\(\)"),
        (OwnMode(), [], r"OwnMode overrides on_validation_model_eval\(\)"),
        (Steady(), [Sees()], r"Sees overrides on_after_backward\(\)"),
    ):
        trainer = make_trainer(accelerator="xla", callbacks=callbacks)
        with pytest.raises(fp.ConfigError, match=said):
            trainer.fit(model, loader())
        assert trainer.global_step == 0


def test_a_step_that_cannot_be_captured_is_refused_with_its_line_and_leaves_the_weights(make_trainer):
    class Branches(Steady):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if loss > 1 else 2 * loss

    model = Branches()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CaptureError, match=r"return loss if loss > 1 else 2 \* loss"):
        make_trainer(accelerator="xla").fit(model, loader())
    assert equal(dict(model.state_dict()), before)


def test_a_batch_whose_rows_cannot_be_told_is_not_split(make_trainer):
    class Odd(Steady):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["rows"], batch_idx)

    batches = [{"rows": (torch.randn(4, 8), torch.zeros(4, dtype=torch.long)), "table": torch.zeros(3, 2)}] * 2
    with pytest.raises(fp.DataError, match=r"\(4, 8\), \(4,\), \(3, 2\) can't be split over several devices"):
        make_trainer(accelerator="xla", devices=2, max_epochs=1).fit(Odd(), batches)


class Named(Steady):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["y"]), batch_idx)


class Reads(Named):
    def training_step(self, batch, batch_idx):
        print(batch["name"])
        return super().training_step(batch, batch_idx)


def test_text_in_a_batch_is_left_out_and_a_step_that_reads_it_is_refused(make_trainer):
    x, y = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    batches = [{"x": x, "y": y, "name": ["a", "b", "c", "d"], "row": 7}] * 3
    trainer = make_trainer(accelerator="xla", devices=2, max_epochs=1)
    trainer.fit(Named(), batches)
    assert trainer.global_step == 3
    with pytest.raises(fp.ConfigError, match=r'Reads reads batch\["name"\], which holds no tensors'):
        make_trainer(accelerator="xla", max_epochs=1).fit(Reads(), batches)
    with pytest.raises(fp.DataError, match="a batch holds 'a': a compiled step takes only tensors"):
        make_trainer(accelerator="xla", max_epochs=1).fit(Steady(), [(x, y, ["a"])])


KILLED = """
import sys, signal, torch
import footplate as fp
from models.small import Classifier, loader

class Ends(fp.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == int(sys.argv[2]):
            signal.raise_signal(signal.SIGTERM)

torch.manual_seed(0)
model = Classifier()
fp.Trainer(
    accelerator="xla", devices=4, max_epochs=2, seed=1, default_root_dir=sys.argv[1], logger=False, callbacks=Ends(),
    enable_progress_bar=False, enable_model_summary=False,
).fit(model, loader(60), loader(20), ckpt_path="last")
"""


@pytest.mark.slow
def test_a_process_that_is_terminated_saves_and_another_continues_bit_for_bit(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    environ = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))

    def run(root: str, ends_at: int) -> int:
        return forked([sys.executable, script, tmp_path / root, ends_at], environ)[0]

    assert run("whole", -1) == 0
    assert run("cut", 4) == 128 + signal.SIGTERM
    assert run("cut", -1) == 0
    states = [checkpoint.load(checkpoint.newest([tmp_path / root / "checkpoints"])) for root in ("whole", "cut")]
    for key in ("state_dict", "optimizer_states", "global_step"):
        assert equal(states[1][key], states[0][key])


class Slots(Steady):
    """Computes with the ids of its rows, which are integers, before it learns."""

    def __init__(self, slots) -> None:
        super().__init__()
        self.slots = slots

    def training_step(self, batch, batch_idx):
        x, ids = batch
        slots = self.slots(ids)
        self.log("slots", slots.sum())
        return self(x).mean() + slots.float().mean()


def of_ids(tmp_path, ids, slots, **given):
    """Sum of slots that a step of XLA logs for some ids."""
    trainer = fp.Trainer(
        accelerator="xla", devices=1, max_epochs=1, log_every_n_steps=1, default_root_dir=tmp_path,
        logger=False, enable_progress_bar=False, enable_model_summary=False, **given,
    )  # fmt: skip
    trainer.fit(Slots(slots), [(torch.zeros(len(ids), 8), torch.tensor(ids))])
    return int(trainer.callback_metrics["slots"])


def test_ids_beyond_32_bits_are_refused_by_name_and_not_wrapped_round(tmp_path):
    ids = [5_000_000_123, 2**40 + 7, 3, 4]

    with pytest.raises(fp.DataError, match=r"batch\[1\]: int64 values go from 3 to 1099511627783"):
        of_ids(tmp_path, ids, lambda ids: ids % 1000)

    assert of_ids(tmp_path, ids, lambda ids: ids % 1000, precision="64-true") == sum(number % 1000 for number in ids)
    assert of_ids(tmp_path, [2**31 - 1, -(2**31)], lambda ids: ids % 1000) == 647 + 352


def test_a_constant_beyond_32_bits_is_refused_with_its_line(tmp_path):
    with pytest.raises(fp.FootplateError, match=r"beyond 32 bits[^\n]*\n.*ids % 2\*\*40"):
        of_ids(tmp_path, [1], lambda ids: ids % 2**40)


def test_a_hash_that_may_wrap_round_is_told_once_with_its_line(tmp_path, caplog):
    of_ids(tmp_path, [1, 2], lambda ids: ids * 3 % 1000)
    assert "multiplies whole numbers" not in caplog.text

    of_ids(tmp_path, [1, 2], lambda ids: ids * 1_000_003 % 1000)
    assert caplog.text.count("multiplies whole numbers") == 1
    assert "ids * 1_000_003 % 1000" in caplog.text


def test_complex_numbers_in_a_batch_are_refused_by_name(tmp_path):
    trainer = fp.Trainer(accelerator="xla", devices=1, max_epochs=1, logger=False, default_root_dir=tmp_path)
    with pytest.raises(fp.DataError, match=r"batch\[0\]: complex64 has no counterpart"):
        trainer.fit(Steady(), [(torch.zeros(4, 8, dtype=torch.complex64), torch.zeros(4, dtype=torch.long))])


class Solves(Steady):
    def training_step(self, batch, batch_idx):
        return torch.linalg.inv(self.net[3].weight[:, :3]).sum()


def test_linear_algebra_that_checks_its_result_is_refused_with_its_line(tmp_path):
    trainer = fp.Trainer(accelerator="xla", devices=1, max_epochs=1, logger=False, default_root_dir=tmp_path)
    with pytest.raises(CaptureError, match=r"torch.linalg[^\n]*\n[^\n]*torch.linalg.inv\(self"):
        trainer.fit(Solves(), loader(20))


def test_a_child_that_was_given_to_torch_compile_is_captured_as_it_was(tmp_path):
    plain, child, in_place = models = [Steady(), Steady(), Steady()]
    for model in models:
        model.load_state_dict(plain.state_dict())
    child.net = torch.compile(child.net)
    in_place.net[0].compile()

    for index, model in enumerate(models):
        fp.Trainer(
            accelerator="xla", devices=1, max_epochs=1, logger=False, enable_progress_bar=False, seed=1,
            default_root_dir=tmp_path / str(index), enable_model_summary=False, enable_checkpointing=False,
        ).fit(model, loader(20))  # fmt: skip

    for model in (child, in_place):
        assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))
