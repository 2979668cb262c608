"""Aggregates: what they compute, against slow definitions, and what a bad worker can do to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.aggregate import TABLE, make_aggregate
from shoal.aggregate.ranked import _STRETCH
from shoal.errors import ConfigError
from shoal.types import Promise

ROBUST = ["median", "trimmed(0.4)"]


def combined(text: str, parts: Any, counts: Any) -> np.ndarray:
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    before = [tensor.clone() for tensor in tensors]
    out = torch.full_like(tensors[0], torch.nan)
    make_aggregate(text).combine(tensors, counts, out)
    same = [
        torch.equal(now.view(torch.int64), then.view(torch.int64))
        for now, then in zip(tensors, before, strict=True)
    ]
    assert all(same), "parts are only read"
    return out.numpy()


def slow(text: str, parts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The definitions, an element at a time."""
    if text == "weighted":
        return parts.sum(axis=0)
    total, kept = counts.sum(), counts > 0
    means = parts[kept] / counts[kept][:, None]
    if not len(means):
        return np.zeros(parts.shape[1])
    if text == "mean":
        return means.mean(axis=0) * total
    if text == "median":
        return np.median(means, axis=0) * total
    drop = int(np.floor(float(text[8:-1]) * len(means) + 1e-9))
    return np.array([np.sort(column)[drop : len(means) - drop].mean() for column in means.T]) * total


@st.composite
def gradients(draw: st.DrawFn, most: int = 20) -> tuple[np.ndarray, np.ndarray]:
    parts, size = draw(st.integers(1, most)), draw(st.integers(1, 9))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32))).normal(size=(parts, size))
    counts = draw(st.lists(st.integers(0, 9), min_size=parts, max_size=parts))
    return numbers * (np.array(counts) > 0)[:, None], np.array(counts, dtype=float)


@pytest.mark.parametrize("text", ["weighted", "mean", "median", "trimmed(0.1)", "trimmed(0.3)", "trimmed(0)"])
@given(case=gradients())
def test_against_the_definition(text: str, case: tuple[np.ndarray, np.ndarray]) -> None:
    parts, counts = case
    assert combined(text, parts, counts.tolist()) == pytest.approx(
        slow(text, parts, counts), rel=1e-12, abs=1e-12
    )


@pytest.mark.parametrize("text", ROBUST)
@given(
    case=gradients(11),
    bad=st.lists(st.sampled_from([1e30, -1e30, np.inf, -np.inf, np.nan]), min_size=1),
    data=st.data(),
)
def test_a_minority_of_bad_parts_moves_nothing_out_of_range(
    text: str, case: Any, bad: list[float], data: Any
) -> None:
    parts, counts = case
    counts = counts + 1
    most = (len(parts) - 1) // 2 if text == "median" else int(0.4 * len(parts))
    chosen = data.draw(st.sets(st.integers(0, len(parts) - 1), max_size=most))
    good = np.array([index not in chosen for index in range(len(parts))])
    for at, index in enumerate(sorted(chosen)):
        parts[index] = bad[at % len(bad)]
    means = (parts / counts[:, None])[good]
    found = combined(text, parts, counts.tolist()) / counts.sum()
    assert (found >= means.min(axis=0) - 1e-12).all()
    assert (found <= means.max(axis=0) + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["mean", "median", "trimmed(0.2)"])
def test_long_vectors_and_other_types(text: str, dtype: torch.dtype) -> None:
    """Longer than a stretch, and more parts than the network sorts."""
    rng = np.random.default_rng(0)
    for count in (5, 17):
        parts = torch.tensor(rng.normal(size=(count, _STRETCH + 5))).to(dtype)
        counts = np.arange(1.0, count + 1)
        out = torch.empty(parts.shape[1], dtype=dtype)
        make_aggregate(text).combine(list(parts), counts.tolist(), out)
        wanted = slow(text, parts.double().numpy(), counts)
        assert out.double().numpy() == pytest.approx(
            wanted, rel=3e-2, abs=0.5 if dtype == torch.bfloat16 else 1e-3
        )


def test_weighted_is_the_sum_in_order() -> None:
    parts = torch.randn(7, 1000)
    out = torch.empty(1000)
    make_aggregate("weighted").combine(list(parts), [0.0] * 7, out)
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    assert torch.equal(out, total)


@pytest.mark.parametrize("text", [*TABLE])
def test_no_samples_at_all(text: str) -> None:
    assert combined(text, [[0.0, 0.0]] * 3, [0, 0, 0]).tolist() == [0.0, 0.0]


def test_facts() -> None:
    assert {name for name, made in TABLE.items() if made.promise is Promise.EXACT} == {"weighted"}
    assert {name for name, made in TABLE.items() if made.sums} == {"weighted"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trimmed(0.5)", "less than 0.5"),
        ("trimmed(-0.1)", "give 0 or more"),
        ("medain", "did you mean 'median'"),
        ("median(3)", "takes no options"),
        ("trimmed(rate=0.1)", "no option 'rate'"),
    ],
)
def test_refusals(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_aggregate(text)
