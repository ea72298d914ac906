"""Whole plans: requests, refusals, and the compilers' results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import footplate as fp
from footplate.cli.main import main
from footplate.planning import program_client
from footplate.planning.chart import draw
from footplate.planning.serialized_step import deserialize, fingerprint, serialize
from footplate.planning.subject import Subject, captured, prepared
from footplate.planning.targets import target_of
from footplate.step.xla.capture import CaptureError
from footplate.step.xla.capture.emptied import empty_copy
from planning.nets import CLASSES, WIDTH, Small, batch

WEIGHTS = 4 * (WIDTH * WIDTH + WIDTH * CLASSES)


def test_a_gpu_is_planned_from_the_graph_alone():
    (choice,) = fp.plan(Small(), batch(), on=["A100"], dataset_rows=1_000_000, epochs=3).choices
    assert choice.fits
    assert choice.roofline.roof == "memory"
    assert choice.hours == pytest.approx(3e6 / choice.samples_per_second / 3600)
    assert choice.usd == pytest.approx(choice.hours * 3.673385)
    assert choice.largest_batch > 1_000_000


def test_the_batch_is_the_global_one():
    one, eight = fp.plan(Small(), batch(64), on=["H100", "H100x8"]).choices
    assert (one.per_device, eight.per_device) == (64, 8)
    assert eight.collectives[0].nbytes == WEIGHTS + 8


def test_a_list_of_batches_is_planned_as_it_is_trained_on_by_its_first():
    of_one, of_list = (fp.plan(Small(), data, on=["H100"]) for data in (batch(64), [batch(64), batch(64), batch(9)]))
    assert of_list.choices[0].per_device == of_one.choices[0].per_device == 64
    assert of_list.choices[0].roofline == of_one.choices[0].roofline


def test_the_cheapest_and_the_fastest_are_named_among_those_that_are_known():
    plan = fp.plan(Small(), batch(64), on=["T4", "A100", "H100"])
    assert plan.fastest.target.name == "H100"
    assert plan.cheapest.target.name in ("T4", "A100")
    assert "unknown" in str(plan)


def test_a_notebook_shows_the_choices_and_the_notes_as_a_table():
    plan = fp.plan(Small(), batch(64), on=["T4", "H100"])
    shown = plan._repr_html_()
    assert shown.count("<tr>") == 1 + len(plan.choices)
    assert ">T4<" in shown
    assert "Fastest: H100." in shown
    assert "&lt; 1 ¢" in fp.plan(Small(), batch(64), on=["T4"], dataset_rows=64)._repr_html_()


def test_a_model_that_is_too_large_does_not_fit_and_has_no_time():
    with torch.device("meta"):
        module = Small()
        module.first = torch.nn.Linear(200_000, 200_000, bias=False)
        module.second = torch.nn.Linear(200_000, CLASSES, bias=False)
    (choice,) = fp.plan(module, (torch.empty(8, 200_000, device="meta"), batch(8)[1]), on=["H100"]).choices
    assert not choice.fits
    assert choice.memory.headroom < 0
    assert choice.largest_batch is None
    assert choice.samples_per_second is None


def test_the_users_module_is_left_as_it_was():
    module = Small()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fp.plan(module, batch(), on=["H100"], precision="bf16-true")
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert module._trainer is None


def test_the_copy_that_is_measured_shares_the_weights_that_the_module_shares():
    class Tied(Small):
        def __init__(self):
            super().__init__()
            self.other = torch.nn.Linear(WIDTH, WIDTH, bias=False)
            self.other.weight = self.first.weight

    about = Subject("it", Tied(), batch(), 32, "bf16-mixed")
    copied = empty_copy(prepared(about), "cpu")
    assert copied.other.weight is copied.first.weight
    assert {parameter.device.type for parameter in copied.parameters()} == {"cpu"}


def test_the_module_is_set_up_in_the_trainers_order():
    class Late(Small):
        def setup(self, stage):
            self.width = 3

        def configure_model(self):
            self.head = torch.nn.Linear(WIDTH, self.width)

    assert prepared(Subject("it", Late(), batch(), 32)).head.out_features == 3


def test_what_a_step_in_bfloat16_makes_is_of_that_type_as_in_the_trainer():
    class Making(Small):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + torch.zeros(3, 5).sum()

    step = captured(Subject("it", Making(), batch(), 32, "bf16-true"), 32, averages=False)
    made = [node.meta["val"] for node in step.graph.graph.nodes if node.op == "call_function"]
    assert {value.dtype for value in made if getattr(value, "shape", None) == (3, 5)} == {torch.bfloat16}


def test_bfloat16_halves_the_state():
    full, half = (
        fp.plan(Small(), batch(), on=["H100"], precision=name).choices[0].memory for name in ("32", "bf16-true")
    )
    assert half.arguments < 0.6 * full.arguments


def test_mixed_precision_keeps_the_state_and_multiplies_in_bfloat16():
    step = captured(Subject("it", Small(), batch(), 32, "bf16-mixed"), 32, averages=False)
    products = [node for node in step.graph.graph.nodes if str(node.target) == "aten.mm.default"]
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}
    assert {node.meta["val"].dtype for node in step.graph.graph.nodes if node.op == "placeholder"} >= {torch.float32}


def test_a_module_may_ask_how_many_steps_there_will_be():
    asked = []

    class Asking(Small):
        def configure_optimizers(self):
            asked.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    fp.plan(Asking(), batch(50), on=["H100"], dataset_rows=1001, epochs=2)
    assert set(asked) == {42}


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("take 32 or 40", {"on": ["v5e-8"], "batch_size": 36}),
        ('Did you mean "v5', {"on": ["v5-8"]}),
        ("names of hardware", {"on": []}),
        ('precision="8"', {"on": ["H100"], "precision": "8"}),
    ],
)
def test_a_mistake_is_answered_before_anything_is_compiled(said, asked):
    with pytest.raises(fp.ConfigError, match=said):
        fp.plan(Small(), batch(), **asked)


def test_a_step_that_cannot_be_captured_says_where():
    class Branching(Small):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * 2 if loss > 1 else loss

    with pytest.raises(CaptureError, match=r"test_plan\.py"):
        fp.plan(Branching(), batch(), on=["H100"])


def test_several_optimizers_are_refused():
    class Two(Small):
        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.first, self.second)]

    with pytest.raises(fp.ConfigError, match="one optimizer"):
        fp.plan(Two(), batch(), on=["H100"])


def test_a_question_to_the_trainer_that_nobody_can_answer_yet_is_named():
    class Asking(Small):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size)

    with pytest.raises(CaptureError, match="world_size"):
        fp.plan(Asking(), batch(), on=["H100"])


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": "8"}, {"dataset_rows": -5}, {"epochs": 0}])
def test_numbers_of_samples_and_epochs_that_cannot_be_are_refused(wrong):
    with pytest.raises(fp.ConfigError, match=f"{next(iter(wrong))}=.*from 1 to"):
        fp.plan(Small(), batch(), on=["H100"], **wrong)


def test_operations_that_are_missing_are_all_named_before_a_compilation():
    from footplate.step.xla.lowering import MissingOperation

    class Special(Small):
        def training_step(self, batch, batch_idx):
            x, y = batch
            x = torch.special.bessel_j0(x) + torch.special.i1(x)
            return super().training_step((x, y), batch_idx)

    with pytest.raises(MissingOperation, match=r"(?s)special_bessel_j0.*special_i1"):
        fp.plan(Special(), batch(), on=["v5e-8"])


def test_two_captures_of_a_step_have_one_fingerprint_and_another_batch_another():
    about = Subject("it", Small(), batch(), 32)
    one, again, other = (serialize(captured(about, size, averages=True)) for size in (32, 32, 16))
    assert fingerprint(one) == fingerprint(again) == fingerprint(serialize(deserialize(one)))
    assert fingerprint(one) != fingerprint(other)


def test_the_command_writes_the_plan_as_json(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert main(["plan", "demo", "--on", "H100,T4", "--output", str(file), "--format", "json"]) == 0
    document = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == document
    assert [choice["on"] for choice in document["choices"]] == ["H100", "T4"]
    assert document["dataset_rows"] == 12_000
    assert document["choices"][0]["usd"] is None
    assert document["choices"][1]["sources"][0].startswith("https://")


def test_a_configuration_file_is_planned_with_its_batch_precision_and_epochs(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {class_path: planning.nets.Small}\n"
        "data: {class_path: planning.nets.Batches}\n"
        "trainer: {precision: bf16-mixed, max_epochs: 7}\n"
    )
    assert main(["plan", str(file), "--on", "H100", "--format", "yaml"]) == 0
    shown = capsys.readouterr().out
    for line in ("model: Small", "batch_size: 16", "precision: bf16-mixed", "epochs: 7", "dataset_rows: 96"):
        assert line in shown


def test_the_strategy_of_a_run_is_planned(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {class_path: planning.nets.Small}\n"
        "data: {class_path: planning.nets.Batches}\n"
        "trainer: {strategy: fsdp}\n"
    )
    assert main(["plan", str(file), "--on", "H100x8", "--format", "json"]) == 0
    (choice,) = json.loads(capsys.readouterr().out)["choices"]
    assert choice["layout"].startswith("fsdp 8")


def test_where_data_parallelism_does_not_fit_the_state_is_sharded_and_the_plan_says_why():
    class Adaptive(Small):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    with torch.device("meta"):
        module = Adaptive()
        module.first = torch.nn.Linear(WIDTH, 40_000, bias=False)
        module.second = torch.nn.Linear(40_000, 112_000, bias=False)  # 18 GB, and twice as much of the optimizer's
    (choice,) = fp.plan(module, batch(8), on=["H100x8"]).choices
    assert choice.fits
    assert str(choice.layout) in ("fsdp 8", "fsdp 8, kept")
    assert choice.rejected[0].startswith("ddp: needs")
    assert choice.memory.arguments < 3 * 18e9 / 8 + 1e6


def test_fewer_rows_than_devices_need_tensor_parallelism():
    with pytest.raises(fp.ConfigError, match="can't be divided evenly by 8 devices"):
        fp.plan(Small(), batch(4), on=["H100x8"])


def test_a_librarys_model_is_planned_as_a_classifier_and_that_is_said(capsys):
    argv = ["plan", "--model", "torchvision.models:alexnet", "--batch-size", "8", "--on", "T4"]
    assert main(argv) == 0
    assert "Assumed: inputs of 3x224x224, cross entropy over 1000 classes, AdamW." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "expected one of"),
        (["no_such_file.yaml"], "neither demo nor a file"),
        (["demo", "--on", "H100", "--measure"], "--on H100,cpu"),
        (["--model", "torch.nn:Linaer", "--on", "H100"], "Linaer"),
        (["--model", "torch.nn", "--on", "H100"], "module:callable"),
        (["--model", "torch.nn:Identity", "--input", "3x", "--on", "H100"], "--input"),
        (["demo", "--batch-size", "0"], "from 1 to"),
        (["demo", "--batch-size", "9" * 20], "from 1 to"),
        (["demo", "--dataset-rows", "-1"], "from 1 to"),
        (["demo", "--on", "H100x" + "9" * 5000], "no hardware that a plan knows"),
        (["demo", "--on", "H100x²"], "no hardware that a plan knows"),
        (["demo", "--precision", ""], "precision="),
        (["demo", "--output", "no_such_folder/plan.json"], "an existing folder"),
        (["--model", "", "--on", "H100"], "module:callable"),
        (["--model", "..:x", "--on", "H100"], "module:callable"),
        (["--model", "no_such_package.models:x", "--on", "H100"], "can't be imported"),
        (["--model", "torch.nn:Linear", "--on", "H100"], "without arguments: TypeError"),
        (["--model", "torch:rand", "--on", "H100"], "made a Tensor|without arguments"),
        (["--model", "planning.nets:Pair", "--input", "4", "--on", "H100"], "returned a tuple"),
        (
            ["--model", "planning.nets:Branch", "--input", "4", "--on", "H100"],
            "on the meta device, which have no values",
        ),
        (["--model", "planning.nets:Total", "--input", "4", "--on", "H100"], "expected logits"),
        (["--model", "torch.nn:Identity", "--input", "4", "--on", "H100"], "no parameters"),
        (["--model", "torch.nn:Identity", "--input", "0x3", "--on", "H100"], "--input"),
        (["--model", "torch.nn:Identity", "--input", "99999999x99999999", "--on", "H100"], "--input"),
        (["--model", "torch.nn:Identity", "--input", "3:nn", "--on", "H100"], "--input"),
        (["demo", "--chart", "plan.pdf"], r"\.png or \.svg"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_message(argv, said, capsys):
    import re

    assert main(["plan", *argv]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_the_command_ends_with_1_where_the_training_fits_nowhere(capsys):
    assert main(["plan", "--model", "planning.nets:Huge", "--input", "200000", "--on", "T4,H100"]) == 1
    assert "NO" in capsys.readouterr().out


def test_the_gradient_of_a_large_embedding_takes_no_memory_either(capsys):
    argv = ["plan", "--model", "planning.nets:HugeTable", "--input", "16:int64", "--batch-size", "4", "--on", "H100"]
    assert main(argv) == 1
    assert "NO" in capsys.readouterr().out


def test_a_class_of_transformers_is_made_from_its_configuration_without_weights(capsys):
    argv = ["plan", "--model", "planning.nets:Configured", "--input", "16:int64", "--batch-size", "4", "--on", "H100"]
    assert main(argv) == 0
    assert "Assumed: Settings() with its defaults." in capsys.readouterr().out


def test_a_file_that_is_no_text_is_no_configuration(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert main(["plan", str(file), "--on", "H100"]) == 2
    assert "is no text" in capsys.readouterr().err


def test_a_chart_is_drawn(tmp_path):
    plan = fp.plan(Small(), batch(64), on=["H100", "H100x8", "T4"])
    for name in ("plan.png", "plan.svg"):
        assert draw(plan, tmp_path / name).stat().st_size > 10_000


PARENT = """
import os, subprocess, sys
command = [sys.executable, "-m", "footplate.planning.compiler", *sys.argv[1:], str(os.getpid())]
child = subprocess.Popen(command)
print(child.pid, flush=True)
child.wait()
"""


def test_the_compiler_does_not_outlive_the_plan_that_asked_it(tmp_path):
    os.mkfifo(tmp_path / "request")  # nobody writes into it, so the compiler waits
    command = [sys.executable, "-c", PARENT, str(tmp_path / "request"), str(tmp_path / "reply")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        compiler = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 60
    while running(compiler):
        assert time.monotonic() < until
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_this_machines_cpu_is_planned_by_xla_and_measured():
    plan = fp.plan(Small(), batch(2**16), on=["cpu"], measure=True, search=True)
    (choice,) = plan.choices
    assert choice.searched
    assert choice.largest_batch >= 2**19  # 4 KB a sample, and gigabytes of memory
    assert choice.memory.arguments >= WEIGHTS + 2**16 * 4 * WIDTH
    assert plan.measured.xla_step_s > 0
    assert plan.measured.eager_step_s > 0
    assert plan.measured.peak_bytes == pytest.approx(choice.memory.peak, rel=0.25)  # some MB are the libraries' own


@pytest.mark.engine
@pytest.mark.slow
def test_a_slice_is_planned_by_the_tpus_compiler_once_and_one_at_a_time(caplog):
    caplog.set_level("INFO", logger="footplate")
    module, example = Small(), batch(64)
    (choice,) = fp.plan(module, example, on=["v5e-8"]).choices
    assert choice.fits
    assert choice.counted_by == "the TPU's compiler"
    assert choice.memory.arguments >= WEIGHTS
    assert choice.flops > 0
    assert [collective.kind for collective in choice.collectives] == ["all-reduce"]
    assert choice.collectives[0].nbytes >= WEIGHTS
    assert "Compiling for v5e-8" in caplog.text

    caplog.clear()
    kept = program_client.cache_directory()
    files = {path.name for path in kept.iterdir()}
    (again,) = fp.plan(Small(), example, on=["v5e-8"]).choices
    assert again.memory == choice.memory
    assert "Compiling" not in caplog.text
    assert {path.name for path in kept.iterdir()} == files

    step = serialize(captured(Subject("it", module, example, 64), 16, averages=True))
    with ThreadPoolExecutor(2) as both:
        programs = list(both.map(lambda on: program_client.compiled_program(step, target_of(on)), ("v6e-4", "v4-8")))
    assert [program.devices for program in programs] == [4, 4]
    assert "waiting for it" in caplog.text
