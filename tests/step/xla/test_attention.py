"""Attention without its matrix: gradients with dropout, models that use it, and the memory of a program."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import footplate as fp
from footplate.step.xla.capture import attention_masks, capture_training, state_of
from footplate.step.xla.lowering import LOWERINGS, arrays_of, batch_arrays, lower, rates_of
from footplate.step.xla.lowering.table import Context
from step.xla.nets import GPT, Encoder, Trained
from step.xla.test_parity import compiled, eager, sgd, worst

pytestmark = pytest.mark.filterwarnings("ignore:.*not attached to a Trainer")
CONTEXT = Context(None, (), None, lambda: jax.random.key(0), "cpu")


def operations(net: nn.Module, batch: Any) -> set[str]:
    module = Trained(net)
    captured = capture_training(module, torch.optim.SGD(module.parameters(), lr=0.1), batch)
    return {str(node.target) for node in captured.graph.graph.nodes}


@pytest.mark.slow
def test_the_gradient_with_dropout_is_that_of_what_was_computed():
    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        q, k, v, toward = (jnp.asarray(draw.normal(size=(2, 300, 4))) for _ in range(4))
        mask = jnp.asarray(draw.normal(size=(300, 300)))
        settings = (0.4, True, 0.5)
        seed = jnp.asarray(7, jnp.int64)

        def forward(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return LOWERINGS[torch.ops.footplate.attention.default](CONTEXT, q, k, v, mask, seed, *settings)

        result, sums = forward(q, k, v, mask)
        backward = LOWERINGS[torch.ops.footplate.attention_backward.default]
        gradients = backward(CONTEXT, toward, q, k, v, mask, seed, result, sums, True, *settings)
        _, pull = jax.vjp(lambda *given: forward(*given)[0], q, k, v, mask)
        for gradient, expected in zip(gradients, pull(toward), strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-9)


def test_dropout_keeps_the_mean_of_what_is_attended_to():
    with jax.enable_x64(True):
        q = jnp.zeros((64, 300, 4))
        v = jnp.ones((64, 300, 1))
        seed = jnp.asarray(3, jnp.int64)
        attention = LOWERINGS[torch.ops.footplate.attention.default]
        result = np.asarray(attention(CONTEXT, q, q, v, None, seed, 0.5, False, 1.0)[0])
    assert result.mean() == pytest.approx(1.0, abs=0.01)
    assert result.std() == pytest.approx((1 / 300) ** 0.5, rel=0.1)


def test_torchs_attention_becomes_one_operation():
    tokens = torch.randint(0, 40, (2, 10))
    counts = operations(GPT(p=0.1), (tokens[:, :-1], tokens[:, 1:]))
    assert {"footplate.attention.default", "footplate.attention_backward.default"} <= counts
    assert "aten._softmax.default" not in counts


def test_torchs_own_attention_layers_use_it_too():
    encoder = Encoder(layers=1)
    counts = operations(encoder, (torch.randint(0, 50, (2, 9)), torch.randint(0, 3, (2,))))
    assert {"footplate.attention.default", "footplate.attention_backward.default"} <= counts
    assert "aten._softmax.default" not in counts


def test_torch_counts_the_operations_of_attention_as_its_own():
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    q.requires_grad_()
    counts = []
    for attend in (
        lambda: torch.ops.footplate.attention(q, k, v, None, None, 0.0, False, 0.5)[0],
        lambda: F.scaled_dot_product_attention(q, k, v, scale=0.5),
    ):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            attend()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


class Biased(nn.Module):
    """Attention with a learned bias, and keys shared by several query heads."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(5, 5), requires_grad=learns)
        self.q, self.kv, self.head = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        kv = self.kv(x).unflatten(-1, (2, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, kv, kv, self.bias, scale=0.7, enable_gqa=True)
        return self.head(y.transpose(1, 2).flatten(-2).mean(1))


@pytest.mark.parametrize("learns", [False, True])
def test_shared_keys_and_a_bias_that_learns_are_eager_torchs(learns):
    torch.manual_seed(0)
    module = Trained(Biased(learns)).double()
    reference = copy.deepcopy(module)
    batches = [(torch.randn(4, 5, 4, dtype=torch.float64), torch.randint(0, 3, (4,))) for _ in range(3)]
    counts = operations(copy.deepcopy(module.net), batches[0])
    assert {"footplate.attention.default", "footplate.attention_backward.default"} <= counts
    assert "aten._softmax.default" not in counts
    with jax.enable_x64(True):
        losses, _ = compiled(module, sgd(module), batches)
    assert losses == pytest.approx(eager(reference, sgd(reference), batches), rel=1e-6)
    assert worst(module, reference) <= 1e-6


class Masked(nn.Module):
    """Attention under a mask that `make(x)` builds in the step."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make, self.qkv, self.head = make, nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v, self.make(x)).mean(1))


def _later(x: torch.Tensor) -> torch.Tensor:
    place = torch.arange(x.shape[1])
    return place[None, :] > place[:, None]


MASKS = {  # the mask as the step builds it, and the captured form: (has a mask, is causal)
    "none": (lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), (False, False)),
    "causal": (lambda x: ~_later(x), (False, True)),
    "causal, for each row": (
        lambda x: (~_later(x)).expand(len(x), -1, -1) & torch.ones(1, dtype=torch.bool),
        (False, True),
    ),
    "causal, added": (lambda x: torch.zeros(5, 5).masked_fill(_later(x), -torch.inf), (False, True)),
    "causal, added finite": (lambda x: _later(x) * torch.finfo(torch.float32).min, (False, True)),
    "changed in place": (lambda x: torch.zeros(5, 5).masked_fill_(_later(x), -1.0).triu_(), (True, False)),
    "a window": (lambda x: ~_later(x) & ~_later(x).flip(0, 1).roll(2, 0), (True, False)),
    "anticausal": (lambda x: ~_later(x).T, (True, False)),
    "one for each query": (lambda x: torch.ones(5, 1, dtype=torch.bool).cumsum(0) > 0, (False, False)),
    "data": (lambda x: (x[:, None, :, 0] < 9) & ~_later(x), (True, False)),
    "drawn": (lambda x: torch.rand(5, 5) < 2.0, (True, False)),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_constants_is_known_for_what_it_is(name):
    make, wanted = MASKS[name]
    torch.manual_seed(0)
    module = Trained(Masked(make)).double()
    reference = copy.deepcopy(module)
    batch = (torch.randn(4, 5, 4, dtype=torch.float64), torch.randint(0, 3, (4,)))

    captured = capture_training(module, sgd(module), batch)

    (node,) = [node for node in captured.graph.graph.nodes if node.target is torch.ops.footplate.attention.default]
    assert (node.args[3] is not None, node.args[6]) == wanted
    if name in ("causal", "causal, added finite", "a window"):
        with jax.enable_x64(True):
            losses, _ = compiled(module, sgd(module), [batch])
        assert losses == pytest.approx(eager(reference, sgd(reference), [batch]), rel=1e-6)


class Layers(nn.Module):
    """Three layers that make their own masks. The second one makes that of the first again."""

    def __init__(self) -> None:
        super().__init__()
        causal, anticausal = (MASKS[name][0] for name in ("causal", "anticausal"))
        self.layers = nn.ModuleList(Masked(make) for make in (causal, causal, anticausal))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers)


def test_a_mask_that_a_later_layer_makes_again_is_computed_once(monkeypatch):
    computed, compute = [], attention_masks._computed
    monkeypatch.setattr(attention_masks, "_computed", lambda *args: computed.append(1) or compute(*args))
    attention_masks._KNOWN.clear()
    module = Trained(Layers())
    captured = capture_training(module, sgd(module), (torch.randn(4, 5, 4), torch.randint(0, 3, (4,))))
    attends = [node for node in captured.graph.graph.nodes if node.target is torch.ops.footplate.attention.default]
    assert [(node.args[3] is not None, node.args[6]) for node in attends] == [
        (False, True),
        (False, True),
        (True, False),
    ]
    assert len(computed) == 2


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_language_model_of_transformers_has_causal_attention_and_no_matrix_of_its_length(use_cache):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    net = transformers.LlamaForCausalLM(config)

    class Learns(fp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(input_ids=batch, labels=batch, use_cache=use_cache).loss

    module = Learns()
    captured = capture_training(module, sgd(module), torch.randint(0, 50, (2, 17)))

    nodes = [node for node in captured.graph.graph.nodes if node.target is torch.ops.footplate.attention.default]
    assert [(node.args[3], node.args[6]) for node in nodes] == [(None, True)]
    assert all(
        tuple(node.meta["val"].shape[-2:]) != (17, 17)
        for node in captured.graph.graph.nodes
        if "val" in node.meta and isinstance(node.meta["val"], torch.Tensor)
    )


class Relative(nn.Module):
    """Attention with a learned bias for each distance and head; batches of 16."""

    def __init__(self, length: int, heads: int = 4) -> None:
        super().__init__()
        self.bias, self.qkv, self.heads = nn.Embedding(2 * length - 1, heads), nn.Linear(8, 24), heads
        places = torch.arange(length)
        self.register_buffer("distances", places[:, None] - places + length - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 2)).permute(2, 0, 3, 1, 4)
        bias = self.bias(self.distances).permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(-2)


def test_a_bias_that_learns_costs_less_memory_than_one_matrix_of_all_scores():
    length, rows, heads = 1024, 16, 4
    batch = (torch.randn(rows, length, 8), torch.randint(0, 8, (rows, length)))
    assert temporary_of(Relative(length, heads), batch) < 4 * rows * heads * length**2


def test_a_bias_that_learns_keeps_its_gradients_type_under_autocast():
    torch.manual_seed(0)
    module = Trained(Biased(learns=True))
    batch = (torch.randn(4, 5, 4), torch.randint(0, 3, (4,)))
    captured = capture_training(module, sgd(module), batch, precision="bf16-mixed")
    (backward,) = captured.graph.graph.find_nodes(
        op="call_function", target=torch.ops.footplate.attention_backward.default
    )
    of_q, *_, of_mask = backward.meta["val"]
    assert (of_q.dtype, of_mask.dtype, of_mask.shape) == (torch.bfloat16, torch.float32, module.net.bias.shape)


def temporary(length: int) -> int:
    """Bytes that a step of a small GPT needs beside its state, at a length."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 40, (1, length + 1))
    return temporary_of(GPT(layers=1, width=8, length=length, p=0.1), (tokens[:, :-1], tokens[:, 1:]))


def temporary_of(net: nn.Module, batch: Any) -> int:
    """Bytes that a step of a model needs beside its state."""
    module = Trained(net)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    captured = capture_training(module, optimizer, batch)
    with jax.enable_x64(False):
        given = arrays_of(state_of(module, optimizer)), rates_of(optimizer), jax.random.key(0)
        program = jax.jit(lower(captured)).lower(*given, batch_arrays(captured, batch)).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_grows_with_the_length_and_not_with_its_square():
    short, long = temporary(1024), temporary(4096)
    assert long < 4.8 * short
    assert long < 4 * 2 * 4096**2  # less than the two heads' matrices, of which plain attention has several
