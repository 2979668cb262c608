"""Values that need no memory: row `id` of a table is normally distributed and follows from (seed, name, id) alone.

Bits come from splitmix64 by counter. The way from bits to a normal number uses nothing but integers, + - × ÷ and √,
which are exact everywhere: a logarithm of the library's would differ between processors in its last bit. That
way is Acklam's rational approximation of the inverse of the normal distribution (relative error 1e-9), and for its
tails a logarithm from a series.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import numpy.typing as npt
import torch

from shoal.partition.hashes import mix
from shoal.seeds import derive

# Part of every table's initial values: changing one of these changes them.
_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_TAIL = 0.02425
_CENTRE_ABOVE = (
    -39.69683028665376,
    220.9460984245205,
    -275.9285104469687,
    138.3577518672690,
    -30.66479806614716,
)
_CENTRE_BELOW = (
    -54.47609879822406,
    161.5858368580409,
    -155.6989798598866,
    66.80131188771972,
    -13.28068155288572,
)
_TAIL_ABOVE = (
    -0.007784894002430293,
    -0.3223964580411365,
    -2.400758277161838,
    -2.549732539343734,
    4.374664141464968,
)
_TAIL_BELOW = (0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416)
_CENTRE_LAST = 2.506628277459239
_TAIL_LAST = 2.938163982698783
_LOG_2 = 0.6931471805599453
_ROOT_HALF = 0.7071067811865476
_CHUNK = 1 << 15
"""Numbers at a time: what stays in the cache."""

Numbers = npt.NDArray[np.float64]


def keyed_rows(
    seed: int, name: str, ids: npt.NDArray[np.int64], dim: int, std: float, dtype: torch.dtype
) -> torch.Tensor:
    """The initial rows of a table for these ids, [n, dim].

    >>> rows = keyed_rows(0, "words", np.array([7, 9]), 3, 1.0, torch.float32)
    >>> torch.equal(rows[1:], keyed_rows(0, "words", np.array([9]), 3, 1.0, torch.float32))
    True
    """
    made = torch.empty(ids.size, dim, dtype=dtype)
    if std == 0:
        return made.zero_()
    key = np.uint64(derive(seed, "rows", name))
    starts = mix(ids.astype(np.uint64) ^ key)
    pairs = -(-dim // 2)
    counter = np.arange(pairs, dtype=np.uint64) * _STRIDE
    each = max(1, _CHUNK // (2 * pairs))
    for start in range(0, ids.size, each):
        words = mix(starts[start : start + each, None] + counter)
        halves = words.astype("<u8", copy=False).view("<u4")[:, :dim]  # two numbers a word
        # An odd number over 2³³ is exact, and neither 0 nor 1.
        normal = inverse_normal((halves.astype(np.float64) + 0.5) * 2.0**-32)
        made[start : start + each] = torch.from_numpy(normal * std)
    return made


def inverse_normal(share: Numbers) -> Numbers:
    """The number that a standard normal variable is below with this probability; 0 < share < 1.

    >>> inverse_normal(np.array([0.5, 0.975, 0.001])).round(6).tolist()
    [0.0, 1.959964, -3.090232]
    """
    centred = share - 0.5
    square = centred * centred
    above = _polynomial(_CENTRE_ABOVE, square) * square + _CENTRE_LAST
    made: Numbers = above * centred / (_polynomial(_CENTRE_BELOW, square) * square + 1.0)
    tail = np.abs(centred) > 0.5 - _TAIL
    side = centred[tail]
    root = np.sqrt(-2.0 * _logarithm(0.5 - np.abs(side)))
    far = (_polynomial(_TAIL_ABOVE, root) * root + _TAIL_LAST) / (_polynomial(_TAIL_BELOW, root) * root + 1.0)
    made[tail] = np.copysign(far, side)
    return made


def _polynomial(factors: tuple[float, ...], at: Numbers) -> Numbers:
    return reduce(lambda so_far, factor: so_far * at + factor, factors[1:], np.full_like(at, factors[0]))


def _logarithm(numbers: Numbers) -> Numbers:
    """ln x = e·ln 2 + 2·artanh((m - 1) / (m + 1)) with x = m·2^e and m near 1."""
    mantissa, exponent = np.frexp(numbers)
    small = mantissa < _ROOT_HALF
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(tuple(1.0 / odd for odd in range(21, 0, -2)), ratio * ratio)
    made: Numbers = (exponent - small) * _LOG_2 + 2.0 * ratio * series
    return made
