"""SparseEmbedding in real runs: under ps what it is in one process, and refused where nobody keeps its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.embedding import SparseEmbedding
from shoal.errors import ConfigError
from shoal.exchange import TABLE as EXCHANGES
from shoal.exchange.contract import Exchange
from shoal.exchange.embeddings.back_ends import InProcess
from shoal.exchange.embeddings.embedding_tables import Tables
from shoal.testing.parity import ParityTrace, largest_difference, take_step
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.train.step import run_step
from shoal.world.world import World

ROWS = 40


def first_tags() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """First values of some tags, in two pieces; the others begin as the seed says."""
    yield torch.tensor([5, 1]), torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 0.5]])
    yield torch.tensor([2]), torch.ones(1, 3)


class Words(nn.Module):
    """Two tables, one of them used twice and one with first values, and ids that come again within a sample."""

    def __init__(self, capacity: int = 0, ids: Callable[[Any], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.words = SparseEmbedding(ROWS, 4, std=0.5, capacity=capacity, ids=ids)
        self.inner = nn.ModuleDict({"tags": SparseEmbedding(7, 3, std=0.5, initial=first_tags)})
        self.head = nn.Linear(11, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first, second = self.words(ids[:, :3]).sum(1), self.words(ids[:, 3:]).mean(1)
        both = torch.cat([first, second, self.inner["tags"](ids[:, 0] % 7)], 1)
        out: torch.Tensor = self.head(torch.tanh(both))
        return out


def data(samples: int = 26) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    # Few ids come often, so that several workers touch them in one step; others seldom.
    ids = (torch.rand(samples, 6, generator=generator) ** 3 * ROWS).long()
    labels = torch.randint(0, 3, (samples,), generator=generator)
    labels[4] = -1
    return TensorDataset(ids, labels)


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    labels = batch[1]
    total = nn.functional.cross_entropy(output, labels, reduction="sum", ignore_index=-1)
    return total, int((labels >= 0).sum())


def poisoned(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    """In some batches the loss is no number; in others only its gradient is none."""
    total, count = loss(output, batch)
    if bool((batch[0] == 33).any()):
        return total * float("nan"), count
    if bool((batch[0] == 29).any()):
        total = total + (output.sum() * 0).sqrt()
    return total, count


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adagrad(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.1)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": params[:1], "lr": 0.02}, {"params": params[1:], "lr": 0.01}]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def order(strategy: str, model: Callable[[], nn.Module] = Words) -> RunConfig:
    return RunConfig(
        model=model,
        loss=loss,
        optimizer=adamw,
        data=data(),  # type: ignore[arg-type]
        global_batch=12,
        strategy=strategy,
        precision="fp64",
        seed=3,
    )


CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": sgd},
    "adagrad, clipped by norm": {"optimizer": adagrad, "clip": 0.1},
    "adamw, accumulated, clipped by norm": {"accumulate": 3, "clip": 0.1},
    "adamw, clipped by value": {"clip": "value(0.01)"},
    "steps are dropped": {"loss": poisoned, "on_nan": "skip"},
}


@dataclass(frozen=True)
class Result:
    trace: ParityTrace
    rows: dict[str, torch.Tensor]


def all_rows(exchange: Exchange) -> dict[str, torch.Tensor]:
    """Every column of every table, whole."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, columns in exchange.tables.pieces():
        for column, tensor in columns.items():
            found.setdefault(f"{name}/{column}", []).append(tensor)
    return {path: torch.cat(pieces) for path, pieces in found.items()}


def train(world: World, asked: RunConfig, steps: int = 8) -> Result:
    parts = build(asked, world, record="")[1]
    try:
        losses = [take_step(parts, number).loss for number in range(steps)]
        trace = ParityTrace(losses, parts.whole.parameters(), parts.whole.optimizer_state())
        return Result(trace, all_rows(parts.exchange))
    finally:
        parts.exchange.close()


def train_cases(world: World, strategy: str) -> dict[str, Result]:
    return {name: train(world, replace(order(strategy), **case)) for name, case in CASES.items()}


def _numbers(trace: ParityTrace) -> ParityTrace:
    """With a number for the loss of a step that was dropped."""
    return replace(trace, losses=[-1.0 if math.isnan(loss) else loss for loss in trace.losses])


def check_equal(wanted: Result, found: Result, where: str) -> None:
    gap, at = largest_difference(_numbers(wanted.trace), _numbers(found.trace))
    assert gap < 1e-12, f"{where}: {gap:.2e} at {at}"
    assert found.rows.keys() == wanted.rows.keys()
    for path, value in wanted.rows.items():
        torch.testing.assert_close(found.rows[path], value, rtol=1e-12, atol=1e-12, msg=f"{where}: {path}")


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (3, 2)])
def test_ps_equals_one_process(workers: int, servers: int) -> None:
    results = spawn(train_cases, workers, f"ps(servers={servers}, bucket_mb=0.002)")
    for name, case in CASES.items():
        accumulate = workers * case.get("accumulate", 1)
        wanted = train(World.alone(), replace(order("solo"), **{**case, "accumulate": accumulate}))
        assert len(wanted.rows["words/id"]) > 10
        assert (wanted.rows["words/id"].diff(dim=0) > 0).all()
        for rank, found in enumerate(results):
            check_equal(wanted, found[name], f"{name}, rank {rank} of {workers}")


def test_one_process_computes_what_an_embedding_does() -> None:
    """With plain SGD, a row without a gradient stays as it is in a dense table too."""

    def plain(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    asked = replace(order("solo"), optimizer=plain)
    parts = build(asked, World.alone(), record="")[1]
    dense = Words().double()
    dense.load_state_dict(parts.model.state_dict())
    for name, table in [("words", dense.words), ("inner.tags", dense.inner["tags"])]:
        sparse = parts.model.get_submodule(name)
        assert isinstance(sparse, SparseEmbedding)
        assert isinstance(table, SparseEmbedding)
        assert sparse.source is not None
        weight = sparse.source.fetch(name, torch.arange(table.rows))
        for ids, values in sparse.initial() if sparse.initial is not None else ():
            assert weight[ids].tolist() == values.tolist()
        embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        dense.set_submodule(name, embedding)
    wanted = build(replace(asked, model=dense), World.alone(), record="")[1]
    for number in range(8):
        assert abs(take_step(parts, number).loss - take_step(wanted, number).loss) < 1e-12


def some_ids(batch: Any) -> torch.Tensor:
    """Where a batch has most of its ids."""
    ids: torch.Tensor = batch[0][:, :4]
    return ids


def count_asked(exchange: Exchange) -> list[int]:
    """How many rows forward passes have to wait for, one number a table and pass."""
    tables = exchange.tables
    assert isinstance(tables, Tables)
    asked, fetch = list[int](), tables._ask

    def count(name: str, ids: torch.Tensor, applied: int | None) -> Any:
        asked.append(0 if applied is not None and applied > (tables.applied or 0) else len(ids))
        return fetch(name, ids, applied)

    tables._ask = count  # type: ignore[method-assign]
    return asked


def run_ahead(world: World, ahead: bool) -> tuple[Result, int]:
    """With claims as a run makes them: the end is known, so the next step is asked for ahead."""
    model = partial(Words, ids=some_ids if ahead else None)
    parts = build(replace(order("ps(bucket_mb=0.002)", model), accumulate=2), world, record="")[1]
    asked = count_asked(parts.exchange)
    try:
        losses = []
        while (view := parts.exchange.work.next(0, 8)) is not None:
            losses.append(run_step(parts, view).loss)
        trace = ParityTrace(losses, parts.whole.parameters(), parts.whole.optimizer_state())
        return Result(trace, all_rows(parts.exchange)), sum(asked)
    finally:
        parts.exchange.close()


def run_both(world: World) -> list[tuple[Result, int]]:
    return [run_ahead(world, ahead) for ahead in (False, True)]


def test_rows_fetched_ahead_are_the_same_bit_for_bit() -> None:
    for (plain, waited), (ahead, waited_less) in spawn(run_both, 2):
        assert waited_less < 0.7 * waited
        assert ahead.trace.losses == plain.trace.losses
        assert all(torch.equal(ahead.rows[path], value) for path, value in plain.rows.items())
        assert all(torch.equal(ahead.trace.parameters[n], v) for n, v in plain.trace.parameters.items())


class Alone:
    """The turn of a worker under asp."""

    together = False

    def may_prefetch(self, step: int) -> bool:
        return step > 0


def test_a_worker_sees_its_own_updates_whatever_was_fetched_before() -> None:
    model = Words(ids=some_ids)
    tables = Tables(model, adagrad(list(model.parameters())), seed=0, shards=2, first=0)
    tables.connect(InProcess(tables.shards), Alone())  # type: ignore[arg-type]
    tables.begin(0)
    now, coming = torch.tensor([[1, 2, 3, 3]]), torch.tensor([[2, 3, 4, 5]])
    tables.enter(0)
    model.words(now).sum().backward()  # it uses what `ids` names
    model.words(torch.tensor([4])).sum().backward()  # and something else
    assert tables.may_prefetch(1)
    tables.prefetch(1, [(now,)], [(coming,), None])
    tables.take(counts=True)
    tables.stage((0, 0))
    settings = [{"lr": 0.1}]
    tables.send("apply", 0, {"parts": [[0, 1]], "factor": 1.0, "limit": None, "settings": settings})
    tables.settle()
    tables.leave()
    tables.enter(1)
    known, ids = tables._known["words"], torch.tensor([1, 2, 3, 4, 5])
    assert known.request.ids[known.fresh].tolist() == [5]
    rows = tables.fetch("words", ids)
    tables.leave()
    assert torch.equal(rows, tables.fetch("words", ids))
    tables.enter(3)
    assert not tables._known


def losses_of(world: World, strategy: str) -> list[float]:
    """Two tables must learn to tell apart what the head alone cannot."""
    asked = order(strategy, partial(Words, ids=some_ids))
    parts = build(replace(asked, optimizer=adagrad, global_batch=26), world, record="")[1]
    exchange, losses = parts.exchange, []
    try:
        while (view := exchange.work.next(0, 60)) is not None:
            losses.append(run_step(parts, view).loss)
        return losses
    finally:
        exchange.close()


@pytest.mark.parametrize("clock", ["ssp=1", "asp"])
def test_other_clocks_learn(clock: str) -> None:
    both = spawn(losses_of, 2, f"ps({clock})")
    losses = [loss for losses in both for loss in losses]
    assert len(losses) == 120
    assert max(losses[0] for losses in both) > 0.9, "the other may begin after some updates of this one"
    for losses in both:
        assert sum(losses[-4:]) / 4 < 0.3


WRITTEN = {"local": "local(2)", "diloco": "diloco(2)"}


@pytest.mark.parametrize(
    "strategy", [WRITTEN.get(name, name) for name, kind in EXCHANGES.items() if not kind.keeps_rows]
)
def test_others_refuse_it(strategy: str) -> None:
    text = r"SparseEmbedding 'words' keeps its rows on servers; use ps or solo\."
    with pytest.raises(ConfigError, match=text):
        build(order(strategy), World.alone(), record="")


def test_what_rows_cannot_have_is_refused() -> None:
    def rprop(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Rprop(params)

    for strategy in ("solo", "ps"):
        with pytest.raises(
            ConfigError, match="Rprop has no rule for single rows, which SparseEmbedding 'words'"
        ):
            build(replace(order(strategy), optimizer=rprop), World.alone(), record="")
    with pytest.raises(ConfigError, match=r"aggregate=median .* use aggregate=weighted"):
        build(order("ps(aggregate=median)"), World.alone(), record="")
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build(order("ps", lambda: SparseEmbedding(3, 3)), World.alone(), record="")


def test_a_capacity_holds_and_one_server_gives_up_the_same_rows_as_one_process() -> None:
    small = partial(Words, capacity=9)
    wanted = train(World.alone(), order("solo", small))
    assert len(wanted.rows["words/id"]) == 9
    check_equal(wanted, train(World.alone(), order("ps(servers=1)", small)), "one server")
    shared = train(World.alone(), order("ps(servers=3)", small))
    assert len(shared.rows["words/id"]) <= 9
