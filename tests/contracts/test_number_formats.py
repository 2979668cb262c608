"""Every compressor takes every floating type, and every exchange every `precision=`: tested over the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch

from cells import covering
from shoal.compress import TABLE as COMPRESSORS
from shoal.compress import make_compressor
from shoal.compress.base import Layout
from shoal.compress.feedback import Feedback
from shoal.config import parse_choice, parse_strategy
from shoal.errors import ConfigError
from shoal.exchange import TABLE as EXCHANGES
from shoal.plan.check import check_text, promise_of
from shoal.testing.parity import ParityTrace, largest_difference, run_toy
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.train.technique.precision import TABLE as PRECISIONS
from shoal.types import Promise
from shoal.world.world import World

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SIZES = [0, 1, 257, 40_003]
"""Empty, one element, one more than a block, and more than `topk` ranks as a whole; none a multiple of another."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As in a program that says so at its beginning, to compute in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def turns(name: str, vector: torch.Tensor, default: torch.dtype) -> list[torch.Tensor]:
    """Three turns of one worker with feedback: each payload's last round, what it says, and what is left over."""
    with default_dtype(default):
        layout = Layout(
            vector.numel(), vector.dtype, vector.device, ((0, 16, 16),) if len(vector) > 256 else ()
        )
        code = make_compressor(parse_choice(name, "compressor")).code(layout)
        keeper, found = Feedback(code, layout), []
        for turn in range(3):
            sent, payload = vector.clone(), code.payload()
            keeper.before(sent)
            code.encode(sent, payload, turn)
            if code.rounds == 2:
                payload = code.second(sent, payload)
            out = torch.full_like(vector, torch.nan)
            code.decode(payload, out, add=False)
            code.decode(payload, torch.zeros_like(vector), add=True)
            keeper.after(payload, 1)
            found += [payload.clone(), out, keeper.residual.clone(), sent]
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_compressor_takes_every_floating_type(name: str, dtype: torch.dtype, size: int) -> None:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    vector = drawn.to(dtype)
    found = turns(name, vector, torch.float32)
    for payload, out, residual, sent in zip(*(found[at::4] for at in range(4)), strict=True):
        assert payload.isfinite().all() or payload.dtype == torch.uint8
        assert out.dtype == residual.dtype == dtype
        assert out.isfinite().all()
        # Nothing is lost: what was said and what is left over are what was to be sent, as exactly as the type says.
        largest = float(sent.abs().max()) if size else 0.0
        wide = max(torch.finfo(dtype).eps, 1e-6 if name == "powersgd" else 0.0)
        gap = (out.double() + residual.double() - sent.double()).abs()
        assert float(gap.max() if size else 0.0) <= 4 * wide * max(largest, 1.0)
    for mine, theirs in zip(found, turns(name, vector, torch.float64), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), (
            "torch's default type is the program's, and changes no number of ours"
        )


# Exchanges.

WITHIN = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""Of an EXACT strategy, relative to one process in the same format."""
NEAR = {Promise.CLOSE: 0.1, Promise.CONVERGES: 0.3}
"""Of other strategies: how far the mean loss of a few steps may be from one process'."""
STEPS = 4
WRITTEN = {"local": "local(2)", "diloco": "diloco(2, lr=0.7, momentum=0)", "ps": "ps(servers=1)"}
Cell = tuple[str, str, str]
"""An exchange, a compressor, a precision."""


def strategy_of(exchange: str, compressor: str) -> str:
    text = WRITTEN.get(exchange, exchange)
    return text if compressor == "none" else f"{text} + {compressor}"


def allowed(strategy: str) -> bool:
    try:
        check_text(strategy, 2)
    except ConfigError:
        return False
    return True


CELLS: list[Cell] = [
    cell
    for cell in product((name for name in EXCHANGES if name != "solo"), COMPRESSORS, PRECISIONS)
    if allowed(strategy_of(cell[0], cell[1]))
]


def with_a_precision(cell: tuple[Any, ...]) -> set[Any]:
    """Every exchange and every compressor meets every precision; which compressor an exchange has, others test."""
    return {(i, cell[i], j, cell[j]) for i, j in combinations(range(3), 2) if j == 2}


DEFAULT = covering(CELLS, with_a_precision)


def run_cells(world: World, cells: list[Cell]) -> dict[Cell, ParityTrace]:
    return {
        cell: run_toy(world, TOYS["odd"], strategy_of(cell[0], cell[1]), STEPS, precision=cell[2])
        for cell in cells
    }


@cache
def traces(everything: bool) -> list[dict[Cell, ParityTrace]]:
    cells = CELLS if everything else DEFAULT
    return spawn(run_cells, 2, cells, timeout=600 if everything else 120)


@cache
def reference(precision: str) -> ParityTrace:
    return run_toy(World.alone(), TOYS["odd"], "solo", STEPS, accumulate=2, precision=precision)


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "cell",
    [cell if cell in DEFAULT else pytest.param(cell, marks=pytest.mark.all_only) for cell in CELLS],
    ids=str,
)
def test_an_exchange_takes_every_precision(cell: Cell, everything: bool) -> None:
    wanted, precision = reference(cell[2]), cell[2]
    promise = promise_of(parse_strategy(strategy_of(cell[0], cell[1])))
    for mine in traces(everything):
        found = mine[cell]
        dtype = torch.float64 if precision == "fp64" else torch.float32
        assert all(value.dtype == dtype and value.isfinite().all() for value in found.parameters.values())
        assert all(map(math.isfinite, found.losses))
        if promise is Promise.EXACT:
            gap, where = largest_difference(wanted, found)
            assert gap <= WITHIN[precision], f"{gap:.2e} at {where}"
        else:
            means = sum(found.losses) / len(found.losses), sum(wanted.losses) / len(wanted.losses)
            assert abs(means[0] - means[1]) <= NEAR[promise] * abs(means[1]), means


def run_with_wide_default(world: World) -> ParityTrace:
    """A program that computes in float64 because it has said so to torch."""
    with default_dtype(torch.float64):
        for compressor in COMPRESSORS:
            found = run_toy(world, TOYS["odd"], strategy_of("ddp", compressor), 2)
        return run_toy(world, TOYS["odd"], "diloco(4) + int8", STEPS) if found.losses else found


def test_gradients_in_float64_by_default_are_compressed() -> None:
    for found in spawn(run_with_wide_default, 2):
        assert all(map(math.isfinite, found.losses))
