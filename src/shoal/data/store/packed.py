"""Token sequences of any length as samples of one length, with the boundaries kept.

Two ways. By default the sequences are laid end to end and cut every `length` tokens: no token is lost and none is
padding, but in the last sample; a sequence may go on in the next sample. With `whole=True` no sequence is cut: each
sample holds as many sequences, in the order of the store, as fit, and is padded to `length`.

Every sample says which token belongs to which sequence (`segments`, from 0; -1 is padding) and its place in it
(`positions`), so that attention and position embeddings never cross a boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shoal.data.batch import Batch
from shoal.data.source import BatchSource
from shoal.data.store.columns import Lists
from shoal.data.store.store import Store
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids

TOKENS, SEGMENTS, POSITIONS = "tokens", "segments", "positions"


class PackedTokens(BatchSource):
    """Samples of `length` tokens from a store's column of token lists.

    >>> import tempfile, pyarrow as pa
    >>> store = Store.write(tempfile.mkdtemp(), pa.table({"tokens": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]}))
    >>> packed = PackedTokens(store, "tokens", length=4)
    >>> packed[0]["tokens"].tolist(), packed[0]["segments"].tolist(), packed[1]["positions"].tolist()
    ([1, 2, 3, 4], [0, 0, 0, 1], [1, 0, 1, 2])
    >>> whole = PackedTokens(store, "tokens", length=5, whole=True)
    >>> [whole[i]["tokens"].tolist() for i in range(len(whole))]
    [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]
    """

    def __init__(self, store: Store, column: str, length: int, *, whole: bool = False, pad: int = 0) -> None:
        """`pad` fills what is left of a sample."""
        found = store.column(column)
        if not isinstance(found, Lists):
            raise ConfigError(
                f"column '{column}' is {store.manifest.columns[column]}, and packing needs lists."
            )
        if length < 1:
            raise ConfigError(f"length={length}; a sample holds at least one token.")
        self._store = store
        self._column = column
        self._lists = found
        self._length = length
        self._whole = whole
        self._pad = pad
        lengths = store.keys(column)[np.arange(len(store))]
        self._ends = np.cumsum(lengths)
        """Of each sequence, among all tokens."""
        self._cuts = self._whole_cuts(lengths) if whole else self._plain_cuts()
        self._token_starts = self._starts_of_files()

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._cuts) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample."""
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: value[0] for name, value in self.batch(np.array([number])).items()}

    @property
    def whole_batches(self) -> bool:
        """Nothing of the user's sees single samples."""
        return True

    @property
    def features(self) -> Mapping[str, Any]:
        """Of the store."""
        return self._store.features

    @property
    def key_names(self) -> tuple[str, ...]:
        """None: a sample is made of several rows."""
        return ()

    def keys(self, name: str) -> object:
        """Refused: see `key_names`."""
        raise ConfigError(f"packed samples have no column '{name}'.")

    def batch(self, ids: Ids) -> Batch:
        """Tokens, segments and positions of some samples, one row each."""
        shape = (len(ids), self._length)
        tokens = torch.full(shape, self._pad, dtype=self._lists.dtype, device="cpu")
        segments = np.full(shape, -1, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        for row, (begin, end) in enumerate(
            zip(self._cuts[ids].tolist(), self._cuts[ids + 1].tolist(), strict=True)
        ):
            count = end - begin
            tokens[row, :count] = self._tokens(begin, end)
            self._bounds(begin, end, segments[row, :count], positions[row, :count])
        return {TOKENS: tokens, SEGMENTS: torch.from_numpy(segments), POSITIONS: torch.from_numpy(positions)}

    def _bounds(
        self, begin: int, end: int, segments: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> None:
        """Which sequence each of the tokens [begin, end) is of, and its place in it."""
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        ends = np.minimum(self._ends[first : last + 1], end)
        begins = np.concatenate([self._ends[first - 1 : first] if first else [0], self._ends[first:last]])
        counts = ends - np.maximum(begins, begin)
        numbers = np.cumsum(counts > 0) - 1  # empty sequences are no segments
        segments[:] = np.repeat(numbers, counts)
        positions[:] = np.arange(begin, end) - np.repeat(begins, counts)

    def _tokens(self, begin: int, end: int) -> torch.Tensor:
        """Tokens [begin, end) of all, from the files that they lie in."""
        first = int(np.searchsorted(self._token_starts, begin, side="right")) - 1
        parts = []
        while begin < end:
            start = int(self._token_starts[first])
            stop = min(end, int(self._token_starts[first + 1]))
            if stop > begin:
                parts.append(self._lists.piece(first, begin - start, stop - start))
            begin = max(begin, stop)
            first += 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _starts_of_files(self) -> npt.NDArray[np.int64]:
        """The number of the first token of each file, and of all at the end."""
        if self._store.starts_late:
            raise ConfigError("since= cannot be packed; pack the whole store, or flow the new rows into one.")
        counts = self._lists.values_in_files
        return np.concatenate([[0], np.cumsum(counts)])

    def _plain_cuts(self) -> npt.NDArray[np.int64]:
        total = int(self._ends[-1]) if len(self._ends) else 0
        return np.append(np.arange(0, total, self._length), total)

    def _whole_cuts(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        longest = int(lengths.max(initial=0))
        if longest > self._length:
            row = int(np.argmax(lengths))
            raise ConfigError(
                f"row {row} has {longest} tokens, and whole=True wants each in one sample of {self._length}; give a "
                "larger length, or leave whole out."
            )
        cuts = [0]
        total = int(self._ends[-1]) if len(self._ends) else 0
        while cuts[-1] < total:  # as many sequences as fit, found by where they end
            fits = int(np.searchsorted(self._ends, cuts[-1] + self._length, side="right"))
            cuts.append(int(self._ends[fits - 1]))
        return np.array(cuts, dtype=np.int64)
