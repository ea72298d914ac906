"""Attention within documents, and the targets of packed sequences, from the `document_ids` of a batch.

    attention                                 call
    scaled_dot_product_attention              attn_mask=document_mask(batch["document_ids"])
    flex_attention, usually compiled          block_mask=block_mask(batch["document_ids"])
    varlen_attn, flash_attn_varlen_func       cu_seqlens=cumulative_lengths(batch["document_ids"]), over a flattened batch

    targets = next_token_targets(batch["tokens"], batch["document_ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())

A token attends to tokens of its own document only, or of its own piece if the document was cut. So a packed document has
the same loss as alone. Tokens of padding attend to padding, since a softmax over nothing would be NaN. They have no target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def document_mask(document_ids: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """Return a mask for `scaled_dot_product_attention`: bool (n, 1, L, L), True where a token attends to another.

    It has n·L² entries. For long sequences, use `block_mask`.

    Args:
        document_ids: the number of each token's document, (n, L).
        causal: True if a token doesn't attend to later tokens.

    Examples:
        >>> from footplate.data import document_mask
        >>> document_mask(torch.tensor([[1, 1, 2]]))[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    mask = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return mask.tril() if causal else mask


def block_mask(document_ids: torch.Tensor, causal: bool = True) -> BlockMask:
    """Return a mask for `flex_attention`, which skips blocks of tokens that don't attend to each other.

    Make it once for a batch, and use it in every layer. It is made on the device of `document_ids`.

    Args:
        document_ids: the number of each token's document, (n, L).
        causal: True if a token doesn't attend to later tokens.

    Examples:
        >>> from footplate.data import block_mask
        >>> block_mask(torch.tensor([[1, 1, 2]])).shape
        (1, 1, 3, 3)
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def attends(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same = document_ids[row, query] == document_ids[row, key]
        return same & (query >= key) if causal else same

    rows, length = document_ids.shape
    return create_block_mask(attends, rows, None, length, length, device=document_ids.device)


def cumulative_lengths(document_ids: torch.Tensor) -> torch.Tensor:
    """Return where each document begins in the flattened batch, and where the last one ends: int32 (documents + 1,).

    The padding of a sequence counts as a document. No document is longer than a sequence, so pass L as the longest length.
    The number of documents differs from batch to batch. So on a GPU, this waits for the device.

    Args:
        document_ids: the number of each token's document, (n, L).

    Examples:
        >>> from footplate.data import cumulative_lengths
        >>> cumulative_lengths(torch.tensor([[1, 1, 2], [3, 3, 3]])).tolist()
        [0, 2, 3, 6]
    """
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([document_ids.numel()])]).to(torch.int32)


def next_token_targets(tokens: torch.Tensor, document_ids: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return the token that follows each token in its document, (n, L).

    Args:
        tokens: (n, L).
        document_ids: the number of each token's document, (n, L).
        ignore_index: the target of the last token of a document, and of padding. torch's losses ignore -100.

    Examples:
        >>> from footplate.data import next_token_targets
        >>> next_token_targets(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 1, 2]])).tolist()
        [[6, -100, -100]]
    """
    targets = torch.full_like(tokens, ignore_index)
    follows = (document_ids[:, 1:] == document_ids[:, :-1]) & (document_ids[:, 1:] != 0)
    targets[:, :-1] = torch.where(follows, tokens[:, 1:], targets[:, :-1])
    return targets
