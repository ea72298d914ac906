"""Models of transformers, planned from their configurations by command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from footplate.cli.main import main
from footplate.core.errors import ConfigError
from footplate.planning.huggingface_models import configured_model

CONFIGS = Path(__file__).parent / "configs"


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3-8b", 8.03), ("llama-3-70b", 70.6), ("qwen3-8b", 8.19), ("vit-huge", 0.632)]
)
def test_a_well_known_configuration_has_its_published_number_of_parameters(name, billions):
    subject = configured_model(CONFIGS / f"{name}.json", None, None, None, None, None, "bf16-mixed")
    assert sum(p.numel() for p in subject.module.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)
    assert {p.device.type for p in subject.module.parameters()} == {"meta"}


def test_a_configuration_is_planned_by_command_with_the_best_batch(tmp_path, capsys):
    config = json.loads((CONFIGS / "llama-small.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["--sequence-length", "64", "--batch-size", "8", "--on", "H100:8", "--strategy", "fsdp", "--format", "json"]
    assert main(["plan", str(tmp_path), *argv]) == 0
    plan = json.loads(capsys.readouterr().out)
    (choice,) = plan["choices"]
    assert plan["precision"] == "bf16-mixed"
    assert plan["assumed"] == ["texts of 64 tokens, the model's loss of the next token, AdamW."]
    assert choice["layout"].startswith("fsdp 8")
    assert choice["strategy"].startswith("fp.FSDPStrategy(") or choice["strategy"] == '"fsdp"'
    assert {collective["kind"] for collective in choice["collectives"]} == {"all-gather", "reduce-scatter"}
    assert any(reason.startswith("fsdp 8") and "ms a step" in reason for reason in choice["rejected"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["no_such/config.json"], "there is no such file"),
        (["{dir}/list.json"], "expected an object of JSON"),
        (["{dir}/broken.json"], "is no JSON"),
        (["{dir}/nameless.json"], 'names no "architectures"'),
        (["{dir}/nameless.json", "--sequence-length", "0"], "--sequence-length 0"),
        ([f"{CONFIGS}/llama-small.json", "--sequence-length", "513"], "the model has 512 positions"),
        ([f"{CONFIGS}/vit-huge.json", "--sequence-length", "9"], "takes images"),
        ([f"{CONFIGS}/llama-small.json", "--on", "v5e-8"], "Give --batch-size, or"),
        ([f"{CONFIGS}/llama-small.json", "--on", "H100x8", "--strategy", "fsdq"], "a plan doesn't know it"),
        (["--config", f"{CONFIGS}/llama-small.json", "--model", "transformers:LlamaModel"], "language models"),
        (["--config", f"{CONFIGS}/llama-small.json", "demo"], "goes with --model"),
        (["--model", "torch.nn:Linear", "--sequence-length", "9"], "goes with the config.json"),
    ],
)
def test_a_mistake_is_one_message(argv, said, tmp_path, capsys):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "nameless.json").write_text("{}")
    assert main(["plan", *(word.format(dir=tmp_path) for word in argv)]) == 2
    assert said in capsys.readouterr().err


def test_a_longer_text_than_the_model_has_positions_is_refused():
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        configured_model(CONFIGS / "llama-small.json", None, 1024, None, None, None, "bf16-mixed")
