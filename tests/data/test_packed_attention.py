"""A packed document has the loss that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from footplate.data import Loader, Table, block_mask, cumulative_lengths, document_mask, next_token_targets

WORDS, WIDTH, HEADS, SIZE = 50, 16, 2, 24

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Transformer(torch.nn.Module):
    """A causal transformer of two layers with learned positions, whose attention is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.positions = torch.nn.Embedding(SIZE, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor, attention: Attention) -> torch.Tensor:
        hidden = self.words(tokens) + self.positions(position_ids)
        for layer in self.layers:
            heads = layer(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            hidden = hidden + attention(*heads).transpose(1, 2).flatten(2)
        return self.head(hidden)


def packed_batch() -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """40 documents, and the same documents packed into one batch."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, WORDS, length).tolist() for length in rng.integers(1, SIZE + 1, 40)]
    table = Table(pa.table({"tokens": pa.array(documents, pa.list_(pa.int32()))})).pack(SIZE)
    return documents, next(iter(Loader(table, table.num_rows)))


def total_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def by_mask(ids: torch.Tensor) -> Attention:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(ids))


def by_blocks(ids: torch.Tensor) -> Attention:
    return lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask(ids))  # type: ignore[return-value]


def by_lengths(ids: torch.Tensor) -> Attention:
    """The attention of each document by itself, as a kernel for sequences of variable length computes it."""
    edges = cumulative_lengths(ids).tolist()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # flat: (heads, n·L, width)
        flat = [part.transpose(0, 1).flatten(1, 2) for part in (q, k, v)]
        documents = [
            F.scaled_dot_product_attention(*(part[:, first:last] for part in flat), is_causal=True)
            for first, last in pairwise(edges)
        ]
        return torch.cat(documents, 1).unflatten(1, (len(q), -1)).transpose(0, 1)

    return attention


def padded_loss(model: Transformer, documents: list[list[int]]) -> torch.Tensor:
    """The loss of the documents, each a row of its own."""
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in documents], batch_first=True)
    lengths = torch.tensor([len(text) for text in documents])
    is_token = torch.arange(tokens.shape[1]) < lengths[:, None]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = model(tokens, positions, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return total_loss(logits, next_token_targets(tokens, is_token.long()))


def packed_loss(model: Transformer, batch: dict[str, torch.Tensor], attention: Attention) -> torch.Tensor:
    targets = next_token_targets(batch["tokens"], batch["document_ids"])
    return total_loss(model(batch["tokens"], batch["position_ids"], attention), targets)


@pytest.mark.parametrize("attention", [by_mask, by_lengths])
def test_packed_documents_have_the_loss_and_gradients_of_padded_ones(
    attention: Callable[[torch.Tensor], Attention],
) -> None:
    torch.manual_seed(0)
    documents, batch = packed_batch()
    model = Transformer().double()
    expected = padded_loss(model, documents)
    loss = packed_loss(model, batch, attention(batch["document_ids"]))
    assert len(batch["tokens"]) < len(documents)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(of, list(model.parameters())) for of in (loss, expected)]
    torch.testing.assert_close(*gradients)


# On a CPU, flex_attention has no gradients. Uncompiled, it warns that it is slow.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_packed_documents_have_the_loss_of_padded_ones_with_flex_attention() -> None:
    torch.manual_seed(0)
    documents, batch = packed_batch()
    model = Transformer()
    loss = packed_loss(model, batch, by_blocks(batch["document_ids"]))
    torch.testing.assert_close(loss, padded_loss(model, documents))


@torch.no_grad()
def test_without_the_mask_the_loss_is_another() -> None:
    torch.manual_seed(0)
    documents, batch = packed_batch()
    model = Transformer()
    loss = packed_loss(model, batch, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert (loss - padded_loss(model, documents)).abs() > 0.1


def test_a_token_attends_to_earlier_tokens_of_its_document() -> None:
    ids = torch.tensor([[1, 1, 2, 0]])
    assert document_mask(ids).int().tolist() == [[[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]]
    assert document_mask(ids, causal=False).int().tolist() == [
        [[[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_and_mask_are_the_same_attention(causal: bool) -> None:
    ids = packed_batch()[1]["document_ids"]
    blocks = block_mask(ids, causal)
    rows, queries, keys = torch.meshgrid(*(torch.arange(n) for n in (len(ids), SIZE, SIZE)), indexing="ij")
    attends = blocks.mask_mod(rows, torch.zeros_like(rows), queries, keys)
    assert torch.equal(attends[:, None], document_mask(ids, causal))


def test_cumulative_lengths_part_documents_sequences_and_padding() -> None:
    lengths = cumulative_lengths(torch.tensor([[1, 1, 2], [1, 0, 0], [1, 1, 1]]))
    assert lengths.tolist() == [0, 2, 3, 4, 6, 9]
    assert lengths.dtype == torch.int32


def test_the_last_token_of_a_document_and_padding_have_no_target() -> None:
    tokens, ids = torch.tensor([[5, 6, 7, 0, 0], [1, 2, 3, 4, 5]]), torch.tensor([[1, 1, 2, 0, 0], [1, 1, 1, 1, 1]])
    assert next_token_targets(tokens, ids).tolist() == [[6, -100, -100, -100, -100], [2, 3, 4, 5, -100]]
    assert next_token_targets(tokens, ids, ignore_index=-1)[0, 1] == -1
