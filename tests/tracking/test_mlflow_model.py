"""The model in MLflow: the parts that load again, and the loaders."""

import itertools
import sys
import types
from importlib import metadata

import pytest
import template
import torch
import yaml
from mlflow.models import ModelSignature, infer_signature
from mlflow.types import Schema, TensorSpec
from torch import nn

import footplate.training.module as fp
from footplate.checkpoint import export
from footplate.tracking import MLflow
from footplate.tracking.mlflow_model import PICKLE, PROGRAM, log_staged, stage

pytestmark = pytest.mark.engine


class Classifier(fp.Module):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.rand(1, 4)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x)


class KeywordOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.example_input_array = {"x": torch.rand(2, 4)}

    def forward(self, *, x):
        return 2 * x


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.example_input_array = (torch.rand(1, 4), torch.rand(1, 4))

    def forward(self, left, right):
        return left + 2 * right


class NoExample(nn.Module):
    def forward(self, x):
        return 3 * x


@pytest.fixture
def mlflow_models(monkeypatch):
    """MLflow's loaders, without the Lightning that `mlflow.pytorch` imports for a callback."""
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    import mlflow
    import mlflow.pyfunc
    import mlflow.pytorch

    uri = mlflow.get_tracking_uri()
    yield mlflow
    mlflow.set_tracking_uri(uri)


def only_run(client, experiment="default"):
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def trainer(module, run_dir):
    return types.SimpleNamespace(module=module, run_dir=run_dir, global_step=7)


@pytest.mark.slow
def test_the_model_is_loaded_by_pyfunc_and_pytorch_and_registered(run_dir, database, mlflow_models):
    module = Classifier()
    logger = MLflow(register_as="flowers")
    logger.setup(run_dir, {})
    logger.log_model(trainer(module, run_dir))
    assert module.training
    logger.finalize("success")

    mlflow_models.set_tracking_uri(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    images = torch.rand(5, 4)
    expected = module.eval()(images).detach()
    uri = f"runs:/{logger.run_id}/model"
    torch.testing.assert_close(mlflow_models.pytorch.load_model(uri)(images), expected)
    predictor = mlflow_models.pyfunc.load_model(uri)
    torch.testing.assert_close(torch.from_numpy(predictor.predict(images.numpy())), expected)
    assert predictor.metadata.signature.inputs.inputs[0].shape == (-1, 4)
    assert predictor.input_example.shape == (2, 4)
    (version,) = database.search_model_versions("name = 'flowers'")
    assert (int(version.version), version.run_id) == (1, logger.run_id)
    assert only_run(database).info.status == "FINISHED"
    assert not list(run_dir.glob("mlflow-model-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "inputs", "has_pyfunc"),
    [(TwoInputs(), (torch.rand(5, 4), torch.rand(5, 4)), False), (NoExample(), (torch.rand(5, 4),), True)],
)
def test_models_of_several_inputs_and_without_an_example_are_loaded_again(
    tmp_path, database, run_dir, mlflow_models, module, inputs, has_pyfunc
):
    mlflow_models.set_tracking_uri(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    experiment = database.create_experiment("models", artifact_location=(tmp_path / "artifacts").as_uri())
    run_id = database.create_run(experiment).info.run_id
    stage(module, tmp_path / "staged")
    log_staged(tmp_path / "staged", run_id, 1, None)
    uri = f"runs:/{run_id}/model"
    expected = module(*inputs)
    assert torch.equal(mlflow_models.pytorch.load_model(uri)(*inputs), expected)
    assert ("python_function" in mlflow_models.models.get_model_info(uri).flavors) == has_pyfunc
    if has_pyfunc:
        predicted = mlflow_models.pyfunc.load_model(uri).predict(inputs[0].numpy())
        torch.testing.assert_close(torch.from_numpy(predicted), expected)


@pytest.mark.slow
@pytest.mark.parametrize("module", [Classifier(), TwoInputs()], ids=["one input", "two inputs"])
def test_an_exported_program_is_logged_as_mlflow_does_it(tmp_path, database, run_dir, mlflow_models, module):
    """All that `mlflow.pytorch.log_model` writes is there, but for the trace, which is ours."""
    mlflow_models.set_tracking_uri(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    experiment = database.create_experiment("models", artifact_location=(tmp_path / "artifacts").as_uri())
    run_id = database.create_run(experiment).info.run_id
    stage(module, tmp_path / "staged")
    log_staged(tmp_path / "staged", run_id, 1, None)

    example = module.example_input_array
    inputs = tuple(torch.cat([each, each]) for each in (example if isinstance(example, tuple) else (example,)))
    arrays, output = [each.numpy() for each in inputs], module.eval()(*inputs).detach().numpy()
    signature = infer_signature(arrays[0], output)
    if len(arrays) > 1:
        specs = [TensorSpec(each.dtype, (-1, *each.shape[1:]), f"input_{i}") for i, each in enumerate(arrays)]
        signature = ModelSignature(Schema(specs), signature.outputs)
    mlflow_models.pytorch.save_model(
        module,
        tmp_path / "theirs",
        serialization_format="pt2",
        signature=signature,
        input_example=arrays[0] if len(arrays) == 1 else inputs,
        pip_requirements=[f"{name}=={metadata.version(name).partition('+')[0]}" for name in ("torch", "numpy")],
    )
    roots = [next((tmp_path / "artifacts").rglob("MLmodel")).parent, tmp_path / "theirs"]
    ours, theirs = ({str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} for root in roots)
    assert ours == theirs
    of_one_model = ("artifact_path", "model_id", "model_uuid", "run_id", "utc_time_created", "model_size_bytes")
    for name in ours - {"data/model.pt2"}:
        our_text, their_text = (yaml.safe_load((root / name).read_text()) for root in roots)
        if name == "MLmodel":
            for text, key in itertools.product((our_text, their_text), of_one_model):
                text.pop(key, None)
        assert our_text == their_text, name


@pytest.mark.slow
def test_a_program_is_logged_without_importing_torch(run_dir, database, tmp_path):
    stage(Classifier(), tmp_path / "staged")
    uri, run_id = f"sqlite:///{run_dir.parent / 'mlflow.db'}", database.create_run("0").info.run_id
    program = f"""
import pathlib, sys
import mlflow
from footplate.tracking.mlflow_model import log_staged
mlflow.set_tracking_uri({uri!r})
log_staged(pathlib.Path({str(tmp_path / "staged")!r}), {run_id!r}, 1, None)
print("torch" in sys.modules)
"""
    logged = template.Popen(
        [sys.executable, "-c", program], packages=template.TRACKERS, launches=False, stdout=-1, text=True, cwd=tmp_path
    )
    assert logged.communicate()[0].splitlines()[-1] == "False"
    assert [model.name for model in database.search_logged_models(["0"])] == ["model"]


def test_a_program_that_fails_for_its_own_example_is_a_pickle(run_dir, database, caplog, monkeypatch):
    """An assertion of the trace may hold for the model's shapes only."""
    traced = export.trace(Classifier())
    broken = types.SimpleNamespace(example_inputs=traced.example_inputs, module=lambda: KeywordOnly())
    monkeypatch.setattr(export, "trace", lambda module: broken)
    stage(Classifier(), run_dir / "staged")
    assert not (run_dir / "staged" / PROGRAM).exists()
    assert (run_dir / "staged" / PICKLE).exists()
    assert "its exported program fails for the example" in caplog.text


@pytest.mark.slow
def test_a_model_that_mlflow_cannot_describe_is_logged_as_a_pickle(run_dir, database, mlflow_models):
    logger = MLflow()
    logger.setup(run_dir, {})
    logger.log_model(trainer(KeywordOnly(), run_dir))
    logger.finalize("success")
    mlflow_models.set_tracking_uri(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    model = mlflow_models.pytorch.load_model(f"runs:/{logger.run_id}/model")
    assert torch.equal(model(x=torch.ones(3)), 2 * torch.ones(3))


def test_a_model_that_cannot_be_copied_costs_a_warning_and_not_the_run(run_dir, database, caplog):
    module = Classifier()
    module.file = open(__file__)  # noqa: PTH123, SIM115
    logger = MLflow()
    logger.setup(run_dir, {})
    logger.log_model(trainer(module, run_dir))
    logger.finalize("failed")
    module.file.close()
    assert "The model is not logged to MLflow: Classifier can't be copied" in caplog.text
    assert only_run(database).info.status == "FAILED"
