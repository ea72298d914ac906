"""An optimizer's step, replayed for all parameters of one kind, equals the step that torch makes for each."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from footplate.step.xla.capture import Captured, capture_training
from footplate.step.xla.lowering import missing_ops
from step.xla.nets import Trained

pytestmark = pytest.mark.filterwarnings("ignore:.*not attached to a Trainer")


class Numbers:
    """Numbers for the values of a graph: equal for values that are computed alike from the same inputs."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of_outputs(self, captured: Captured) -> list[Any]:
        numbers: dict[Node, int] = {}
        inputs = itertools.count()
        for node in captured.graph.graph.nodes:
            if node.op == "output":
                return [numbers.get(output) for output in node.args[0]]
            words = str(node.target) if node.op != "placeholder" else next(inputs)
            args = map_arg((node.args, node.kwargs), lambda used: numbers[used])
            numbers[node] = self._known.setdefault((words, str(args)), len(self._known))
        raise AssertionError("a graph without an output")


class Net(nn.Module):
    """Parameters of the same shape in several places, one of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    first, *rest = net.parameters()
    return [{"params": [first, *rest[:3]], "weight_decay": 0.1}, {"params": rest[3:]}]


MAKE = {
    "SGD": lambda some: torch.optim.SGD(some, lr=0.1, momentum=0.9, dampening=0.1),
    "AdamW": lambda some: torch.optim.AdamW(some, lr=0.1, amsgrad=True),
    "NAdam": lambda some: torch.optim.NAdam(some, lr=0.1),
    "Rprop": lambda some: torch.optim.Rprop([{"params": group["params"]} for group in some], lr=0.1),
    "ASGD": lambda some: torch.optim.ASGD(some, lr=0.1),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_stamped_step_computes_what_torchs_own_step_for_all_parameters_computes(kind):
    batch = (torch.randn(2, 4), torch.randint(0, 3, (2,)))
    calls, graphs, numbers = [], [], Numbers()
    for watched in (False, True):  # a hook on steps sees the real step: one for all parameters
        module = Trained(Net())
        optimizer = MAKE[kind](groups(module))
        if watched:
            optimizer.register_step_pre_hook(lambda *_: calls.append(True))
        captured = capture_training(module, optimizer, batch, gradient_clip_val=1.0)
        graphs.append((numbers.of_outputs(captured), captured.paths))
    assert graphs[0] == graphs[1]
    assert calls == [True]


@pytest.mark.slow
def test_a_library_model_without_weights_is_captured_and_nothing_is_missing():
    import transformers

    with torch.device("meta"):
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=768, n_layer=2, n_head=12))
        words = torch.zeros(2, 64, dtype=torch.int64)

    class Language(Trained):
        def training_step(self, batch, batch_idx):
            return self.net(input_ids=batch, labels=batch).loss

    module = Language(net)
    captured = capture_training(module, torch.optim.AdamW(module.parameters()), words, precision="bf16-mixed")
    assert missing_ops(captured.graph) == []
    assert sum(1 for path in captured.paths if path[0] == "params") == len(list(module.parameters()))
    assert all(parameter.is_meta for parameter in module.parameters())
