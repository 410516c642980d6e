"""Which examples make up which micro-batch of which rank: a function of the seed and the position alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(kw_only=True)
class Micro:
    """The examples of one micro-batch on one rank; a filler stands in where there is none left, with weight 0."""

    indices: list[int]
    is_filler: bool = False


class BatchPlan:
    """The windows of every epoch, as one rank sees them.

    Global batch k of an epoch is the k-th slice of `batch_size * accumulation * world_size` examples of the epoch's
    order; so the product alone decides which examples are in it. The last one of an epoch may be smaller: it has fewer
    micro-batches, its last ones may be short, and a rank for which nothing is left gets a filler, so that every example
    is there once and all ranks have the same number of micro-batches. A plan that wraps has full windows only: the last
    one of an epoch goes on with the examples of the next.
    """

    def __init__(
        self,
        num_examples: int,
        *,
        batch_size: int,
        accumulation: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        wraps: bool = False,
    ) -> None:
        self.num_examples = num_examples
        self.batch_size = batch_size
        self.accumulation = accumulation
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.wraps = wraps

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.accumulation * self.world_size

    @property
    def num_windows(self) -> int:
        """Windows per epoch, the last incomplete one included."""
        return -(-self.num_examples // self.global_batch_size)

    def windows(self, start_step: int = 0) -> Iterator[tuple[int, int, list[Micro]]]:
        """Yields (epoch, step in the epoch, this rank's micro-batches), from a global step on, forever."""
        epoch, step = divmod(start_step, self.num_windows)
        while True:
            order = self.order(epoch)
            for index in range(step, self.num_windows):
                yield (
                    epoch,
                    index,
                    self._window(self._wrapped(epoch, index) if self.wraps else order[self._slice(index)]),
                )
            epoch, step = epoch + 1, 0

    def _slice(self, index: int) -> slice:
        return slice(index * self.global_batch_size, (index + 1) * self.global_batch_size)

    def _wrapped(self, epoch: int, index: int) -> NDArray[np.int64]:
        """Returns the examples of a window of the endless row of epochs."""
        first = (epoch * self.num_windows + index) * self.global_batch_size
        turn, start = divmod(first, self.num_examples)
        num_turns = -(-(start + self.global_batch_size) // self.num_examples)
        row = np.concatenate([self.order(turn + later) for later in range(num_turns)])
        return row[start : start + self.global_batch_size]

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Returns the epoch's order of all examples; touches no global random state."""
        if not self.shuffle:
            return np.arange(self.num_examples)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_examples)

    def _window(self, examples: NDArray[np.int64]) -> list[Micro]:
        stride = self.batch_size * self.world_size
        return [self._micro(examples[start : start + stride]) for start in range(0, len(examples), stride)]

    def _micro(self, examples: NDArray[np.int64]) -> Micro:
        """Returns this rank's share of one micro-batch of all ranks; shares differ by one example at most."""
        share = np.array_split(examples, self.world_size)[self.rank]
        if len(share) == 0:
            return Micro(indices=[int(examples[0])], is_filler=True)
        return Micro(indices=share.tolist())
