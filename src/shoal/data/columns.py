"""Columns: one value a sample, by which samples are divided."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from shoal.data.source import BatchSource
from shoal.errors import ConfigError
from shoal.partition.base import OWN, Keys, Partition
from shoal.table import did_you_mean

Columns = Mapping[str, object]
"""By name: an array, a tensor or a list with one number or text for each sample."""


def keys_for(
    partition: Partition, columns: Columns, samples: int, source: BatchSource | None = None
) -> Keys | None:
    """The column that a partition divides by, given or the data set's own; None if that is the sample's own number.

    >>> from shoal.partition import make_partition
    >>> keys_for(make_partition("hash(user)"), {"user": ["ann", "bob", "ann"]}, samples=3)
    array(['ann', 'bob', 'ann'], dtype=object)
    """
    if OWN in columns:
        raise ConfigError(
            f"columns= has '{OWN}', which means the number of the sample; give it another name."
        )
    name = partition.keyed_by
    if name == OWN:
        return None
    own = source.key_names if source is not None else ()
    if name not in columns and name not in own:
        raise ConfigError(
            f"the partition asks for column '{name}', which columns= does not have"
            f"{did_you_mean(name, (*columns, *own, OWN))}"
        )
    # A data set's own column stays where it is: what is needed of it is read when it is needed.
    values: Keys = _as_array(name, columns[name]) if name in columns or source is None else source.keys(name)
    if values.shape != (samples,):
        raise ConfigError(
            f"column '{name}' has shape {list(values.shape)} and the data set {samples} samples; give one value for "
            "each sample."
        )
    if partition.numbers and values.dtype.kind not in "biuf":
        raise ConfigError(f"column '{name}' holds text, and the partition sorts by numbers; give numbers.")
    return values


def _as_array(name: str, values: object) -> Keys:
    array = values if isinstance(values, np.ndarray) else _from(values)
    if array.dtype.kind in "biufUS":
        return array
    kinds = {type(value) for value in array.reshape(-1)} if array.dtype.kind == "O" else {array.dtype}
    if kinds in ({str}, {bytes}):
        return array
    shown = ", ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in kinds)) or "nothing"
    raise ConfigError(f"column '{name}' holds {shown}; give numbers only, or text only.")


def _from(values: object) -> Keys:
    if isinstance(values, torch.Tensor):
        array: Keys = values.detach().cpu().numpy()
        return array
    entries = list(values) if hasattr(values, "__iter__") else [values]
    if entries and isinstance(entries[0], int | float | np.number):
        try:
            return np.asarray(entries)
        except ValueError:  # lists between the numbers
            pass
    # Texts stay objects: an array of fixed width would give each the room of the longest.
    array = np.empty(len(entries), dtype=object)
    array[:] = entries
    return array
