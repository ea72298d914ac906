"""Compiled modules: by the argument `compile`, and as torch.compile returns them."""

from __future__ import annotations

import copy
import pickle
from typing import ClassVar

import pytest
import torch
from models.small import Classifier, dataset, loader

import footplate as fp
from footplate import checkpoint
from training.fits import Plain, final


def test_compile_options_reach_torch_and_training_is_the_same(make_trainer):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    results = []
    for options in (False, {"backend": backend}):
        torch.manual_seed(0)
        model = Plain()
        make_trainer(compile=options, max_epochs=1).fit(model, loader())
        results.append(final(model))
        assert set(model.state_dict()) == set(Plain().state_dict())
    assert graphs
    assert torch.equal(*results)


class ManyChildren(fp.Module):
    """Twelve layers, each of other sizes than the others."""

    def __init__(self) -> None:
        super().__init__()
        for size in range(12):
            setattr(self, f"layer{size}", torch.nn.Linear(8 + size, 9 + size))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.children():
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_each_of_many_children_is_compiled_once_also_in_later_calls(make_trainer):
    """torch.compile compiles a code object eight times, and then runs it eagerly."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    for _ in range(3):
        make_trainer(compile={"backend": backend}, max_epochs=1, limit_train_batches=2).fit(ManyChildren(), loader())
        assert len(compiled) == 12


@pytest.mark.slow
def test_compiled_for_real_it_trains_the_same(make_trainer):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Plain()
        make_trainer(compile=compiled, max_epochs=1).fit(model, loader())
        results.append(final(model))
    assert torch.allclose(*results, atol=1e-5)


class OwnForward(Classifier):
    """Computes something in `forward` itself, which only a compiled `forward` compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.scale

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


class Graphs:
    """A backend that keeps the graphs it compiles. Lightning puts it on the module, so that a module's pickle holds it."""

    kept: ClassVar[list[torch.fx.GraphModule]] = []

    def __call__(self, graph, inputs):
        self.kept.append(graph)
        return graph.forward


def test_a_module_that_torch_compile_returned_is_trained_compiled(make_trainer):
    graphs, backend = Graphs.kept, Graphs()
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = OwnForward()
        model = torch.compile(module, backend=backend) if compiled else module
        trainer = make_trainer(max_epochs=1)
        trainer.fit(model, loader(), loader(40))
        results = trainer.validate(model, loader(40), verbose=False), trainer.test(model, loader(40), verbose=False)
        predictions = torch.cat(trainer.predict(model, loader(40)))
        saved = checkpoint.load(trainer.checkpoint_callback.best_model_path)["state_dict"]
        runs.append((final(module), results, predictions, saved))
        assert trainer.module is module
        assert list(saved) == list(OwnForward().state_dict())
        assert trainer.lightning_module is module
        module.eval()
        for copied in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
            assert torch.equal(copied(dataset(8).tensors[0]), module(dataset(8).tensors[0]))

    eager, compiled = runs
    assert any("scale" in str(node) for graph in graphs for node in graph.graph.nodes)
    assert torch.equal(eager[0], compiled[0])
    assert eager[1] == compiled[1]
    assert torch.equal(eager[2], compiled[2])
    before = len(graphs)
    trainer.fit(model, loader())  # what is compiled stays so
    assert len(graphs) <= before + 1


@pytest.mark.slow
def test_a_compiled_module_is_compiled_in_every_rank(make_trainer):
    states = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = Seen()
        trainer = make_trainer(max_epochs=1, devices=2)
        trainer.fit(torch.compile(module, backend="aot_eager") if compiled else module, loader())
        assert trainer.module is module
        assert module.compiled.tolist() == [float(compiled)]
        states.append(final(module))
    assert torch.allclose(*states, atol=1e-6)


class Seen(OwnForward):
    """Records whether its `forward` runs compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("compiled", torch.zeros(1))

    def forward(self, x):
        if torch.compiler.is_compiling():
            self.compiled.fill_(1.0)
        return super().forward(x)


def test_a_compiled_module_is_refused_where_nothing_is_compiled(make_trainer):
    with pytest.raises(fp.ConfigError, match='strategy="replicas"'):
        make_trainer(strategy="replicas", devices=2).fit(torch.compile(Classifier(), backend="eager"), loader())
