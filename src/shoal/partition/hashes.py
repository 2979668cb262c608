"""Hashes of keys: the same on every machine, in every process and every version."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shoal.partition.cuts import Weights

Hashes = npt.NDArray[np.uint64]

# Part of the division: changing one of these moves samples between workers.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix(words: Hashes) -> Hashes:
    """splitmix64's finaliser: every bit of the result depends on every bit of the word."""
    words = words + _STEP
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def hash_keys(keys: npt.NDArray[Any]) -> Hashes:
    """One hash a key. Equal keys have equal hashes; 3 and 3.0 are not the same key.

    >>> hash_keys(np.array([1, 2, 1])).tolist()
    [10451216379200822465, 10905525725756348110, 10451216379200822465]
    >>> hash_keys(np.array(["one", "two"])).tolist()
    [10457265594366419360, 7783733899253356939]
    """
    if keys.dtype.kind in "biu":
        return mix(keys.astype(np.uint64))
    if keys.dtype.kind == "f":
        values = keys.astype(np.float64)
        values = np.where(np.isnan(values), np.nan, values + 0.0)  # one NaN, and no zero below zero
        return mix(values.view(np.uint64))
    words = [key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key for key in keys.tolist()]
    return np.array([xxhash.xxh3_64_intdigest(word) for word in words], dtype=np.uint64)


def to_unit(hashes: Hashes) -> Weights:
    """Each hash as a number above 0 and below 1, evenly spread.

    >>> float(to_unit(np.array([2**64 - 1], dtype=np.uint64))[0]) < 1.0
    True
    """
    units = ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    return np.minimum(units, 1.0 - 2.0**-53)  # the half is lost on the largest, which would be 1
