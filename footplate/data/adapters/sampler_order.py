"""The order that a user's sampler draws for an epoch, as a function of (seed, epoch).

The sampler runs under a seed of its own. Afterwards the global generators have the same state as before, so training isn't
affected. A sampler without a length may never end, so its order is drawn while it is used, `HEAD` items at a
time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data import DataLoader

from footplate.core import rng
from footplate.data.adapters.torch_dataloader import samplers_of

HEAD = 256

Order: TypeAlias = "list[Any] | Iterator[Any]"


class SamplerOrder:
    """Draws the order of each epoch from a sampler.

    Args:
        source: the sampler, or any iterable of indices.
        loader: the user's DataLoader. The generators of its samplers are seeded too.
        seed: the run's seed.
    """

    def __init__(self, source: Iterable[Any], loader: DataLoader[Any], seed: int) -> None:
        self._source = source
        self._loader = loader
        self._seed = seed

    @property
    def endless(self) -> bool:
        """True if the sampler has no length. Its order is then drawn while it is used, a piece at a time."""
        try:
            len(self._source)  # type: ignore[arg-type]
        except TypeError:
            return True
        return False

    def draw(self, epoch: int) -> Order:
        """Draw the order of an epoch: a list, or an iterator if the sampler has no length."""
        pieces = self._draw_pieces(epoch, HEAD if self.endless else None)
        return itertools.chain.from_iterable(pieces) if self.endless else next(pieces)

    def _draw_pieces(self, epoch: int, size: int | None) -> Iterator[list[Any]]:
        """Draw the order in pieces of `size` items, or in one piece if it is None.

        Between two pieces, the sampler's random states are kept apart from those of the training.
        """
        samplers = samplers_of(self._loader)
        generators = [sampler.generator for sampler in samplers if getattr(sampler, "generator", None)]
        seed = rng.mix(self._seed, epoch)
        indices: Iterator[Any] | None = None
        states: tuple[dict[str, Any], list[Tensor]] | None = None
        while True:
            training = rng.capture()
            try:
                if states is None:
                    rng.seed_globals(seed)
                    for generator in generators:
                        generator.manual_seed(seed)
                else:
                    rng.restore(states[0])
                    for generator, state in zip(generators, states[1], strict=True):
                        generator.set_state(state)

                indices = iter(self._source) if indices is None else indices
                piece = list(itertools.islice(indices, size))
                states = rng.capture(), [generator.get_state() for generator in generators]
            finally:
                rng.restore(training)

            if not piece and size is not None:
                return
            yield piece


def head_of(order: Order) -> tuple[list[Any], Order]:
    """Return the part of an order that is hashed and compared, and the same order.

    The part is the whole list, or the first `HEAD` items of an order that is drawn while it is used.
    """
    if isinstance(order, list):
        return order, order
    head = list(itertools.islice(order, HEAD))
    return head, itertools.chain(head, order)
