"""`shoal.data.PreparedStore`: training reads the first parts of a store while the next are being made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.batch import Batch
from shoal.data.prepared.parts import GRACE_SECONDS, Division, Parts, Prepare
from shoal.data.source import BatchSource
from shoal.data.store.build import BuildOptions
from shoal.data.store.columns import Fill
from shoal.data.store.store import Sample, Store, Transform
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids
from shoal.world.failure import end_in_one_sentence
from shoal.world.launch import from_environment, training_is_over


class PreparedStore(BatchSource):
    """A store of parts, each made by `prepare(number)` when training comes near it.

    Under `shoal run --preparers 2` other processes make the parts; a part that nobody makes is made by training itself.
    The first epoch takes part after part, each shuffled in itself: so the samples of a step are the same however fast
    parts come. Each part is a version of the store, which is an ordinary one when all are there.

    >>> import tempfile
    >>> def prepare(part):
    ...     return {"x": np.arange(part * 4, part * 4 + (4 if part < 2 else 2))}
    >>> data = PreparedStore(tempfile.mkdtemp(), prepare, rows=4, samples=10)
    >>> len(data), data[9], data.batch(np.array([1, 5]))["x"].tolist()
    (10, {'x': tensor(9)}, [1, 5])
    """

    def __init__(
        self,
        url: str | Path,
        prepare: Prepare,
        *,
        rows: int,
        samples: int,
        ahead: int = 4,
        columns: Sequence[str] | None = None,
        pad: Mapping[str, float] | None = None,
        fill: Mapping[str, Fill] | None = None,
        transform: Transform | None = None,
        options: BuildOptions | None = None,
    ) -> None:
        """`rows`: of each part; the last has what is left of `samples`. `ahead`: parts made before they are needed.

        `columns`, `pad`, `fill`, `transform`: as those of `Store`. `options`: how files are made.
        """
        launch = from_environment()
        end_in_one_sentence(launch.rank)
        text = str(url).removeprefix("file://")
        if "://" in text:
            raise ConfigError(f"{text}: a store is prepared in a folder; copy it there with shoal data copy.")
        self.url = text
        self.arrives = rows
        self._division = Division(rows, samples, ahead)
        grace = GRACE_SECONDS if launch.stages.preparers else 0.0
        self._parts = Parts(Path(text), prepare, self._division, options or BuildOptions(), grace)
        self._asked: dict[str, Any] = {"columns": columns, "pad": pad, "fill": fill, "transform": transform}
        self._store: Store | None = None
        if launch.role == "preparer":  # goes on behind it, perhaps to another store
            self._parts.make_ahead(lambda: training_is_over(launch))

    def __len__(self) -> int:
        """How many samples there will be."""
        return self._division.samples

    def __getitem__(self, index: int) -> Sample:
        """One sample; negative numbers count from the end."""
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.__getitems__([row])[0]

    def __getitems__(self, ids: list[int]) -> list[Sample]:
        """Several samples, gathered at once."""
        return self._ready(np.asarray(ids, dtype=np.int64)).__getitems__(ids)

    @property
    def whole_batches(self) -> bool:
        """Whether `batch` gives what samples one by one would."""
        return self._asked["transform"] is None

    def batch(self, ids: Ids) -> Batch:
        """The batch of some samples; waits until their parts are made."""
        return self._ready(ids).batch(ids)

    @property
    def key_names(self) -> tuple[str, ...]:
        """None: a partition cannot ask for values that are not there yet."""
        return ()

    def keys(self, name: str) -> Any:
        """Refused: see `key_names`."""
        raise ConfigError(
            f"column '{name}' is not there before all parts are made; divide by columns= instead."
        )

    def _ready(self, ids: Ids) -> Store:
        part = int(ids.max()) // self._division.rows if len(ids) else 0
        if self._store is None or self._store.version <= part:
            self._parts.need(part)
            self._store = Store(self.url, **self._asked)
        return self._store

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_store": None}
