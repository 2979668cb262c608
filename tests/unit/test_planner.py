"""Foresight: what is traced, predicted, searched, learned and remembered."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import pipeline
from shoal.errors import ConfigError
from shoal.pipeline.base import Costs
from shoal.plan import cache, residuals
from shoal.plan.automatic import automatic_options
from shoal.plan.cache import cache_file, keep, recall
from shoal.plan.check import check_text
from shoal.plan.explain import explain
from shoal.plan.interval import Interval
from shoal.plan.machine import Added, Machine
from shoal.plan.picture import draw_plans, draw_sweep
from shoal.plan.predict import Predictor, Setting
from shoal.plan.search import Wanted, search
from shoal.plan.simulate import Cores, simulate
from shoal.plan.sweep import enough_batch, parse_sweep, sweep
from shoal.plan.work import Pass, Work
from shoal.testing.toys import adamw
from shoal.train.model.make import make_model
from shoal.train.planning.divisions import divide_all
from shoal.train.planning.profile_work import Effort, profile_work, whole_profile
from shoal.train.planning.rehearsal import resident
from shoal.train.planning.settle_plan import fit_memory
from shoal.train.planning.trace import CannotTrace, trace
from shoal.train.planning.watch import COMPARED_AT, Foresight
from shoal.train.profile_run import cost_of
from shoal.train.run_config import RunConfig
from shoal.types import StepReport
from shoal.world.world import World

WORKERS, BATCH, WIDTH = 4, 32, 32


class Block(nn.Module):
    """A pair that tensor parallel cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Tower(nn.Module):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def squared(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(batch[0])


def config(**changes: Any) -> RunConfig:
    data = TensorDataset(torch.randn(64, WIDTH))
    made = RunConfig(model=Tower, loss=squared, optimizer=adamw, data=data, global_batch=BATCH)  # type: ignore[arg-type]
    return replace(made, **changes)


@pytest.fixture(scope="module")
def work() -> Work:
    order = config()
    whole = whole_profile(order)
    model, _ = make_model(order.model, 0, None, deferred=False)
    found = divide_all(order, model, whole, WORKERS)
    exact = Interval.exact
    passes = [Pass(4, exact(0.1), 10**6), Pass(16, exact(0.4), 4 * 10**6)]
    return Work("key", passes, exact(0.01), exact(1e-5), whole, found.found, found.refused, base=10**8)


MACHINE = Machine(
    WORKERS,
    2,
    {
        "ddp": [
            Added(10**4, 8, 10.0**4, Interval.exact(0.01)),
            Added(10**8, 8, 10.0**8, Interval.exact(0.1)),
        ],
        "zero3": [Added(10**4, 8, 10.0**4, Interval.exact(0.05))],
    },
    [(1024, 1e-5), (1 << 20, 1e-3)],
)


def predictor(work: Work, **changes: Any) -> Predictor:
    return Predictor(work, MACHINE, replace(Setting(WORKERS, BATCH), **changes), {})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_trace_counts_what_autograd_keeps() -> None:
    found = trace(config(), 8)
    # In each block the inputs of its two layers, of which relu keeps one too; the input of the head, and its output.
    each = 8 * WIDTH * 4
    assert found.kept == 4 * (each + 2 * each) + each + 8 * 4
    multiplied = 4 * 2 * (2 * 8 * WIDTH * 2 * WIDTH) + 2 * 8 * WIDTH
    assert found.forward_flops == multiplied
    assert [block.name for block in found.blocks] == [f"blocks.{n}" for n in range(4)]
    assert trace(config(), 16).kept == 2 * found.kept
    assert found.recomputed_peak < found.peak


def test_a_large_model_is_traced_without_its_memory() -> None:
    order = config(model=lambda: nn.Sequential(*(nn.Linear(1 << 15, 1 << 15, bias=False) for _ in range(8))))
    before = resident("VmHWM")
    order.data = TensorDataset(torch.randn(2, 1 << 15))  # type: ignore[assignment]
    found = trace(order, 2)
    assert found.forward_flops == 8 * 2 * 2 * 2**30  # 32 GB of parameters
    assert resident("VmHWM") - before < 10**9


class Peeking(nn.Linear):
    """Looks at its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


def test_what_cannot_be_traced_says_so_and_is_run() -> None:
    order = config(model=lambda: Peeking(WIDTH, 1))
    with pytest.raises(CannotTrace):
        trace(order, 4)
    found = profile_work(order, World.alone(), 1, Machine(1, 1), Effort(seconds=0.1))
    assert not found.traced
    assert all(one.seconds.middle > 0 for one in found.passes)


@pytest.mark.parametrize("name", pipeline.TABLE)
def test_simulated_pipelines_take_what_formulas_say(name: str) -> None:
    schedule = pipeline.TABLE[name]
    for ranks, micro in ((2, 4), (4, 8)):
        even = [Costs(1.0, 1.0, 1.0)] * (ranks * schedule.stages_per_rank)
        found = simulate(schedule, ranks, micro, even, Cores(10**9))
        assert found == pytest.approx(schedule.makespan(ranks, micro), rel=1e-9)
        alone = simulate(schedule, ranks, micro, even, Cores(1))
        assert alone == pytest.approx(ranks * schedule.stages_per_rank * micro * 3.0, rel=1e-9)


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "zero1 + int8", "zero2", "zero3", "shared", "local(16)", "diloco(16) + bf16", "ps"),
        *(
            "ddp * tp2",
            "zero1 * tp2",
            "ddp * pp2(1f1b, microbatches=4)",
            "zero1 * tp2 * pp2(gpipe, microbatches=8)",
        ),
        "ddp * pp2(interleaved, microbatches=4)",
    ],
)
def test_bytes_are_those_that_real_workers_are_held_to(work: Work, strategy: str) -> None:
    """tests/contracts/test_cost.py holds `cost_of` to what is measured."""
    plan = check_text(strategy, WORKERS)
    made = predictor(work)
    cells = len(made.work.divisions[_degrees(plan)].parts) if _degrees(plan) != (1, 1, 1) else 1
    found = made.predict(plan)
    held = {kind: n for kind, n in found.memory.items() if kind not in ("process", "passes", "building")}
    # Where a pipeline is cut follows from measured times, which a busy machine moves from block to block.
    cuts = [f", split=blocks.{block})" for block in (1, 2, 3)] if "microbatches=" in strategy else []
    said = []
    for text in [
        strategy,
        *(strategy.removesuffix(")") + cut for cut in cuts if "interleaved" not in strategy),
    ]:
        costs = [cost_of(config(strategy=text), WORKERS, rank) for rank in range(cells)]
        said.append(
            (max(cost.sent for cost in costs), dict(max(costs, key=lambda cost: cost.total).resident))
        )
    assert any(sent == pytest.approx(found.sent, abs=1e-9) and held == resident for sent, resident in said)


def _degrees(plan: Any) -> tuple[int, int, int]:
    from shoal.plan.predict import degrees_of

    return degrees_of(plan)


def test_a_search_is_fast_and_says_why_not(work: Work) -> None:
    search(predictor(work), Wanted())
    made = predictor(work)
    start = time.process_time()
    found = search(made, Wanted())
    assert len(found.plans) / (time.process_time() - start) > 1000
    assert "solo is one process alone" in found.refused["solo"]
    order = [(not one.measured, one.seconds.middle) for one in found.plans]
    assert order == sorted(order)
    exact = search(made, Wanted(exact=True))
    assert {one.promise.name for one in exact.plans} == {"EXACT"}
    limit = found.plans[0].most / 0.95
    fitting = search(made, Wanted(memory=limit))
    assert all(one.most <= 0.95 * limit for one in fitting.plans)
    assert all(one.most > 0.95 * limit for one in fitting.too_large)
    assert len(fitting.plans) + len(fitting.too_large) == len(found.plans)
    assert str(found.plans[0].plan) in explain(found.plans, made)


def test_what_was_not_measured_is_an_interval(work: Work) -> None:
    known = predictor(work).predict(check_text("ddp", WORKERS))
    unknown = predictor(work).predict(check_text("shared", WORKERS))
    assert known.measured
    assert not unknown.measured
    assert unknown.seconds.high / unknown.seconds.middle >= 1.5


def test_an_exchange_saves_no_more_than_the_update_that_others_do(work: Work) -> None:
    """On a machine with other work, an exchange may seem to make steps shorter than their own passes."""
    lucky = {name: [Added(10**4, 8, 10.0**4, Interval(-9.0, -5.0, 9.0))] for name in ("ddp", "zero1")}
    made = Predictor(work, replace(MACHINE, added=lucky), Setting(WORKERS, BATCH), {"zero1": 1.5})
    ddp, zero1 = (made.predict(check_text(name, WORKERS)) for name in ("ddp", "zero1"))
    passes = work.seconds(BATCH / WORKERS).middle
    assert ddp.seconds.middle >= passes + work.update.middle
    assert zero1.seconds.middle >= 1.5 * passes
    for one in (ddp, zero1):
        assert one.seconds.low > 0
        assert 0.99 <= (one.compute + one.communication) / one.seconds.middle <= 1.01


def test_divided_plans_are_held_to_what_workers_have_tried(work: Work) -> None:
    seen = replace(
        work.divisions[2, 1, 1],
        text="ddp * tp2",
        batch=BATCH,
        seconds=Interval(0.9, 1.0, 1.2),
        built=2 * 10**8,
        peak=3 * 10**8,
    )
    made = predictor(replace(work, divisions={**work.divisions, (2, 1, 1): seen}))
    found = made.predict(check_text("ddp * tp2", WORKERS))
    assert found.seconds.middle == pytest.approx(1.0)
    assert found.total == pytest.approx(seen.peak, abs=10)
    other = made.predict(check_text("zero1 * tp2", WORKERS))
    assert other.total < found.total
    untried = predictor(work).predict(check_text("ddp * tp2", WORKERS))
    assert other.seconds.middle / found.seconds.middle == pytest.approx(
        predictor(work).predict(check_text("zero1 * tp2", WORKERS)).seconds.middle / untried.seconds.middle
    )
    held = replace(work, divisions={**work.divisions, (2, 1, 1): replace(seen, built=10**9)})
    assert predictor(held).predict(found.plan).total == 10**9, "what building takes counts too"


def test_passes_outside_of_what_was_measured_stay_sensible(work: Work) -> None:
    """Noise may put the line through two sizes below zero, and make it fall."""
    steep = replace(work, passes=[Pass(8, Interval.exact(0.1), 0), Pass(16, Interval.exact(0.9), 0)])
    assert steep.seconds(4).middle == pytest.approx(0.05)
    falling = replace(work, passes=[Pass(8, Interval.exact(0.9), 0), Pass(16, Interval.exact(0.5), 0)])
    assert falling.seconds(64).middle == pytest.approx(0.5)


def test_a_slower_network_costs_more_and_a_larger_batch_hides_it(work: Work) -> None:
    plan = check_text("ddp", WORKERS)
    slow = predictor(work, hosts=2, net=1e5).predict(plan)
    fast = predictor(work, hosts=2, net=1e9).predict(plan)
    assert slow.seconds.middle > fast.seconds.middle
    made = predictor(work)
    batch = enough_batch(made, made.predict(plan))
    assert batch is not None
    assert batch >= BATCH


def test_sweeps_and_pictures(work: Work, tmp_path: Path) -> None:
    points = sweep(predictor(work), parse_sweep("workers=1..8"), Wanted())
    assert [point.workers for point in points] == [1, 2, 4, 8]
    assert points[0].efficiency == 1.0
    draw_sweep(points, tmp_path / "sweep.png")
    draw_plans(search(predictor(work), Wanted()).plans, tmp_path / "plans.png")
    for name in ("sweep.png", "plans.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"workers=1\.\.64"):
        parse_sweep("workers=0..4")


def test_residuals_halve_the_error() -> None:
    """A machine on which everything takes 1.4 times what is calculated, give or take."""
    draw = random.Random(1)
    errors = []
    for _ in range(6):
        said = 0.1 * residuals.residuals_of("here").get("ddp", 1.0)
        took = 0.14 * draw.uniform(0.97, 1.03)
        errors.append(abs(said / took - 1))
        residuals.learn("here", "ddp", took, said)
    assert max(errors[1:]) < errors[0] / 2
    assert residuals.learn("here", "ddp", 1e9, 0.1) is None  # something else was measured
    assert residuals.residuals_of("elsewhere") == {}


def test_a_damaged_cache_counts_as_empty() -> None:
    assert keep("machines", "key", {"machine": MACHINE.to_json()})
    assert Machine.from_json(recall("machines", "key")["machine"]) == Machine.from_json(MACHINE.to_json())
    for text in ("", "[1]", '{"format": 9}', '{"format": 1, "entries": {"key": 3}}', "\x00" * 10):
        cache_file("machines").write_text(text)
        assert recall("machines", "key") == {}
    for wrong in (
        {"workers": 2},
        {**MACHINE.to_json(), "flops": float("nan")},
        {**MACHINE.to_json(), "sums": [[0, 1]]},
    ):
        assert Machine.from_json(json.loads(json.dumps(wrong))) is None
    assert cache.cache_file("machines").parent.name == "shoal"


def report(number: int, seconds: float) -> StepReport:
    return StepReport(number, 0, 1.0, 8, 8.0, seconds, 0.0, seconds, 0.0, 0.0, 0, 10**8, 0.1)


def test_step_20_says_how_far_off_it_was() -> None:
    for took, said in ((0.1, False), (0.13, True)):
        watch = Foresight(check_text("ddp", 2), 0.1, 10**8)
        sentences = [watch.after(report(number, took)) for number in range(1, 30)]
        assert [bool(s) for s in sentences] == [said and n == COMPARED_AT for n in range(1, 30)]
    assert "+30%" in sentences[COMPARED_AT - 1]
    assert residuals.residuals_of(cache.machine_key())["ddp"] == pytest.approx(1.14, abs=0.01)


def test_nothing_is_learned_from_steps_that_vary() -> None:
    watch = Foresight(check_text("zero1", 2), 0.1, 10**8)
    said = [watch.after(report(number, 0.1 if number % 2 else 0.5)) for number in range(1, 30)]
    assert "vary too much" in said[COMPARED_AT - 1]
    assert residuals.residuals_of(cache.machine_key()) == {}


def test_memory_auto_picks_what_fits() -> None:
    wide = config(model=lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)), nn.Linear(1024, 1)))
    wide.data = TensorDataset(torch.randn(8192, 1024))  # type: ignore[assignment]
    wide.global_batch = 8192
    base, states = resident("VmRSS"), 16 * 8.4e6
    roomy = replace(wide, memory=f"{base + states + 1e9:.0f}")
    fit_memory(roomy, World.alone())
    assert (roomy.accumulate, roomy.recompute) == (1, None)
    tight = replace(wide, memory=f"{base + states + 160e6:.0f}")
    fit_memory(tight, World.alone())
    assert tight.accumulate > 1
    with pytest.raises(ConfigError, match=r"takes at least .* a worker"):
        fit_memory(replace(wide, memory=f"{base:.0f}"), World.alone())
    with pytest.raises(ConfigError, match="write it like 80GB"):
        fit_memory(replace(wide, memory="much"), World.alone())


def test_a_step_of_ones_own_is_planned_without_compressors_and_whole(work: Work) -> None:
    own = replace(
        work, compression="cannot be compressed", divisions={}, refused={(2, 1, 1): "needs whole models"}
    )
    found = search(predictor(own), Wanted())
    assert all(one.plan.compressor is None for one in found.plans)
    assert found.refused["ddp + int8"] == "cannot be compressed"
    assert found.refused["ddp * tp2"] == "needs whole models"


def test_options_of_auto() -> None:
    assert automatic_options("auto(tries=3, steps=5)") is not None
    for wrong, sentence in (
        ("auto * tp2", "write auto alone"),
        ("auto(steps=0)", "1 or more"),
        ("auto(x=1)", "no option"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            automatic_options(wrong)
