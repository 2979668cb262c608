"""Every exchange × tensor × pipeline, on every toy and on two Hugging Face models: equal to one process, or refused.

There are five ways to divide a model: among two workers by tp or by pp, in two replicas of each, and in two replicas of
both. By default each exchange meets each model in one of them, and each model meets each of the five under one
exchange: every pair of values. `--all` runs every triple.

All cells of one size run one after the other in the same workers; only one test pays for starting them.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from hub import HUB, load_for_workers

from shoal.config import degree_of
from shoal.errors import ConfigError
from shoal.exchange import TABLE as EXCHANGES
from shoal.plan.check import check_text, pipeline_options
from shoal.testing.parity import ParityTrace, largest_difference, run_toy
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.testing.toys import Toy
from shoal.types import Promise
from shoal.world.world import World

MODELS: dict[str, Toy] = {**TOYS, **HUB}
SHARED = [
    name
    for name, kind in EXCHANGES.items()
    if name != "solo" and kind.promise is Promise.EXACT and not kind.whole_models
]
STEPS = 3
"""An epoch of the toys whose last batch is too small."""
LIMIT = 1e-10
REFUSED = {
    ("unused", "tp2"): "finds nothing to cut",
    ("unused", "pp2"): "places to split the model at|carries data around",
    ("dropout", "tp2 * pp2"): "places to split the model at",
}
"""Two layers side by side make neither a pair nor two stages; two layers in a row make one of the two."""


SCHEDULES = ["gpipe", "zerobubble", "interleaved"]


def scheduled() -> list[tuple[str, str]]:
    """Every exchange with every schedule: on one of two models in turn, and under zero3 on both."""
    found = []
    for (i, exchange), (j, schedule) in itertools.product(enumerate(SHARED), enumerate(SCHEDULES)):
        if (exchange, schedule) != ("zero3", "interleaved"):
            both = ["chain", "drawing"] if exchange == "zero3" else [["chain", "drawing"][(i + j) % 2]]
            found += [(f"{exchange} * pp2({schedule}, microbatches=3)", model) for model in both]
    return found


def test_every_schedule_under_every_exchange() -> None:
    found = spawn(run_pairs, 4, scheduled(), timeout=150)[0]
    assert len(found) == 16
    for (strategy, model), trace in found.items():
        assert isinstance(trace, ParityTrace), f"{strategy}, {model}: {trace}"
        gap, where = largest_difference(alone(model, 6), trace)
        assert gap <= LIMIT, f"{strategy}, {model}: {gap:.2e} at {where}"


WAYS = [
    (2, "tp2"),
    (2, "pp2(microbatches=2)"),
    (4, "tp2"),
    (4, "pp2(microbatches=2)"),
    (8, "tp2 * pp2(microbatches=2)"),
]
"""How a model is divided, and among how many workers: two replicas, but for two workers, who are one together."""


def cells(workers: int) -> list[str]:
    return [f"{exchange} * {how}" for exchange in SHARED for n, how in WAYS if n == workers]


def models_of(workers: int, strategy: str, everything: bool) -> list[str]:
    """The models of a cell: every fifth, beginning with another one in each row and column of the grid."""
    exchange, _, inner = strategy.partition(" * ")
    if everything:
        return list(MODELS)
    column = WAYS.index((workers, inner))
    return [model for i, model in enumerate(MODELS) if (i + SHARED.index(exchange)) % len(WAYS) == column]


def run_pairs(world: World, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], ParityTrace | str]:
    found: dict[tuple[str, str], ParityTrace | str] = {}
    for strategy, model in pairs:
        try:
            found[strategy, model] = run_toy(world, MODELS[model], strategy, STEPS)
        except ConfigError as error:
            found[strategy, model] = str(error)
    return found if world.rank == 0 else {}


@cache
def alone(model: str, parts: int) -> ParityTrace:
    """What one process computes, from as many micro-batches."""
    return run_toy(World.alone(), MODELS[model], "solo", STEPS, accumulate=parts)


@pytest.fixture(autouse=True, scope="module")
def _models_are_loaded() -> None:
    load_for_workers()


@cache
def results(workers: int, everything: bool) -> dict[tuple[str, str], ParityTrace | str]:
    pairs = [(text, model) for text in cells(workers) for model in models_of(workers, text, everything)]
    found: dict[tuple[str, str], ParityTrace | str] = spawn(run_pairs, workers, pairs, timeout=900)[0]
    return found


@pytest.mark.timeout(920)
@pytest.mark.parametrize(
    ("workers", "strategy"), [(workers, strategy) for workers in (2, 4, 8) for strategy in cells(workers)]
)
def test_a_cell_equals_one_process(workers: int, strategy: str, everything: bool) -> None:
    plan = check_text(strategy, workers)
    replicas = workers // (degree_of(plan.tensor) * degree_of(plan.pipeline))
    for model in models_of(workers, strategy, everything):
        toy, trace = MODELS[model], results(workers, everything)[strategy, model]
        allowed = "|".join(text for (name, how), text in REFUSED.items() if name == model and how in strategy)
        if isinstance(trace, str):
            assert allowed, f"{strategy} refuses {model}: {trace}"
            assert any(text in trace for text in allowed.split("|")), trace
            continue
        parts = replicas * pipeline_options(plan).microbatches * toy.accumulate
        gap, where = largest_difference(alone(model, parts), trace)
        assert gap <= LIMIT, f"{strategy}, {model}: {gap:.2e} at {where}"
        state, whole = trace.state, alone(model, parts).state
        assert state.keys() == whole.keys(), f"{strategy}, {model}: the state of other parameters"
        for name, entries in whole.items():
            for key, value in entries.items():
                close = (state[name][key] - value).abs().max() <= LIMIT * max(1.0, float(value.abs().max()))
                assert bool(close), f"{strategy}, {model}: {key} of {name}"
