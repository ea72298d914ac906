"""export_model: a file that predicts in a process without Footplate."""

import subprocess
import sys
import textwrap
import threading
import warnings

import pytest
import torch
from torch import nn

import footplate.training.module as fp
from footplate.checkpoint.export import cpu_copy, export_model
from footplate.core.errors import ConfigError


class Classifier(fp.Module):
    def __init__(self, example=None):
        super().__init__()
        self.example_input_array = example
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, image):
        return self.head(self.features(image))


class TwoInputs(nn.Module):
    def forward(self, left, right):
        return {"sum": left + right, "product": left * right}


class FixedBatch(nn.Module):
    def forward(self, x):
        return x.reshape(4, 3) @ torch.ones(3, 1)


@pytest.fixture
def image():
    return torch.rand(4, 1, 8, 8)


def test_the_file_predicts_in_a_process_that_never_imports_footplate(tmp_path, image):
    module = Classifier().eval()
    path = export_model(module, tmp_path / "deep" / "model.pt2", image)
    torch.save({"input": image, "expected": module(image).detach()}, tmp_path / "case.pt")
    there = """
        import sys, torch
        case = torch.load(sys.argv[2])
        model = torch.export.load(sys.argv[1]).module()
        torch.testing.assert_close(model(case["input"]), case["expected"])
        assert not any(name.split(".")[0] == "footplate" for name in sys.modules)
        for rows in (1, 7):
            assert model(case["input"][:1].repeat(rows, 1, 1, 1)).shape == (rows, 3)
    """
    command = [sys.executable, "-c", textwrap.dedent(there), str(path), str(tmp_path / "case.pt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_module_in_training_keeps_its_mode_its_weights_and_its_gradients(tmp_path, image):
    module = Classifier(image)
    module(image).sum().backward()
    module.features[1].eval()  # a part that the user froze
    modes = [part.training for part in module.modules()]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    rng = torch.get_rng_state()

    export_model(module, tmp_path / "model.pt2")

    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(module.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


def test_an_example_of_one_row_still_gives_a_free_batch_dimension(tmp_path, image):
    path = export_model(Classifier(image[:1]), tmp_path / "model.pt2")
    assert torch.export.load(path).module()(image).shape == (4, 3)


@pytest.mark.parametrize(
    "example", [(torch.ones(2, 3), torch.ones(2, 3)), {"left": torch.ones(2, 3), "right": torch.ones(2, 3)}]
)
def test_tuples_are_positional_arguments_and_dicts_are_keywords(tmp_path, example):
    path = export_model(TwoInputs(), tmp_path / "model.pt2", example)
    five = torch.full((5, 3), 2.0)
    given = (
        {"args": (five, five), "kwargs": {}}
        if isinstance(example, tuple)
        else {"args": (), "kwargs": dict.fromkeys(example, five)}
    )
    outputs = torch.export.load(path).module()(*given["args"], **given["kwargs"])
    torch.testing.assert_close(outputs, {"sum": five + five, "product": five * five})


def test_a_model_tied_to_one_batch_size_is_exported_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="FixedBatch is exported for the example's batch size only"):
        path = export_model(FixedBatch(), tmp_path / "model.pt2", torch.ones(4, 3))
    assert torch.export.load(path).module()(torch.ones(4, 3)).shape == (4, 1)


def test_a_fixed_batch_that_was_asked_for_gives_no_warning(tmp_path, image):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        path = export_model(Classifier(), tmp_path / "model.pt2", image, dynamic_batch=False)
    with pytest.raises(Exception, match=r"shape|size|Guard"):
        torch.export.load(path).module()(image[:3])


def test_without_an_example_the_error_says_how_to_give_one(tmp_path):
    with pytest.raises(ConfigError, match=r"Classifier can't be exported without.*example_input_array"):
        export_model(Classifier(), tmp_path / "model.pt2")


def test_another_suffix_is_refused(tmp_path, image):
    with pytest.raises(ConfigError, match=r'model\.onnx": expected a file name that ends in "\.pt2"'):
        export_model(Classifier(image), tmp_path / "model.onnx")


def test_a_forward_that_fails_leaves_the_older_file_alone(tmp_path, image):
    path = tmp_path / "model.pt2"
    path.write_bytes(b"older")
    with pytest.raises(ConfigError, match=r"Classifier\.forward can't be exported"):
        export_model(Classifier(), path, torch.ones(4, 7, 8, 8))
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]
    assert path.read_bytes() == b"older"


def test_a_copy_shares_nothing_with_the_original_and_keeps_tied_weights():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    replica = cpu_copy(module)
    assert replica[1].weight is replica[0].weight
    assert replica[0].weight.data_ptr() != module[0].weight.data_ptr()


def test_a_module_that_holds_a_lock_is_named():
    module = Classifier()
    module.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"Classifier can't be copied .*lock"):
        cpu_copy(module)
