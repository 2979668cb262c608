"""The contract of tables of rows: what the training loop and checkpoints ask of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

RowPiece = tuple[str, dict[str, torch.Tensor]]
"""Some rows of a SparseEmbedding: its name, and by name what a row has, [n, width] each: ids, values, state."""


class RowTables:
    """What a run asks of the tables of rows; here, that there are none."""

    names: Sequence[str] = ()

    def may_prefetch(self, step: int) -> bool:
        """Whether rows could be fetched now that this worker's part of that step will read."""
        del step
        return False

    def prefetch(self, step: int, now: Sequence[object], coming: Sequence[object]) -> None:
        """The batches of this worker's present part, and of its part of that step; None where one is empty."""
        raise NotImplementedError

    def pieces(self) -> Iterator[RowPiece]:
        """All rows, for a checkpoint, those of a table by ascending ids."""
        return iter(())

    def load(self, step: int, pieces: Iterable[RowPiece]) -> None:
        """Take over the rows of a checkpoint, before the exchange's `start` at that step."""
        raise NotImplementedError
