"""Seconds and bytes of one plan, from the profile of a model and the tables of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from shoal import pipeline
from shoal.config import degree_of, parse_strategy
from shoal.cost import Cost, ModelProfile
from shoal.pipeline.base import Costs, PipelineOptions
from shoal.plan.check import pipeline_options, promise_of
from shoal.plan.cost import plan_cost
from shoal.plan.interval import ZERO, Interval
from shoal.plan.machine import Machine
from shoal.plan.simulate import Cores, simulate
from shoal.plan.work import Degrees, Division, Work
from shoal.types import Plan, Promise
from shoal.world.mesh import Mesh
from shoal.world.world import World


@dataclass(frozen=True)
class Setting:
    """What is planned for."""

    workers: int
    """On all hosts."""
    global_batch: int
    accumulate: int = 1
    hosts: int = 1
    net: float = 0.0
    """Bytes a second between hosts; 0: not known, or one host."""


@dataclass(frozen=True)
class Prediction:
    """What one plan would take."""

    plan: Plan
    workers: int
    accumulate: int
    seconds: Interval
    compute: float
    """Seconds of passes and of the update, within `seconds`."""
    waiting: float
    """Seconds in which stages of a pipeline have nothing to do."""
    communication: float
    memory: Mapping[str, int]
    """Bytes of the worker that holds the most, by kind."""
    sent: float
    """Bytes that a worker sends in a step: the most of all."""
    promise: Promise
    margin: float = 0.0
    """Share by which the memory may be more."""
    measured: bool = True
    """Whether all that the time follows from was measured on this machine."""

    @property
    def total(self) -> int:
        """Bytes of the worker that holds the most."""
        return sum(self.memory.values())

    @property
    def most(self) -> int:
        """Bytes that it may come to, as far as such predictions were wrong."""
        return round(self.total * (1 + self.margin))

    @property
    def limits(self) -> str:
        """What most of the step goes into."""
        parts = {"compute": self.compute, "communication": self.communication, "waiting": self.waiting}
        return max(parts, key=lambda name: parts[name])


def family_of(plan: Plan) -> str:
    """Plans that err alike: the exchange, and whether layers or the model are divided, and what is on the wire.

    >>> from shoal.config import parse_strategy
    >>> family_of(parse_strategy("zero1(bucket_mb=4) * pp2(1f1b, microbatches=8) + int8"))
    'zero1 * pp + int8'
    """
    tensor = " * tp" if degree_of(plan.tensor) > 1 else ""
    stages = " * pp" if degree_of(plan.pipeline) > 1 else ""
    compressor = f" + {plan.compressor.name}" if plan.compressor is not None else ""
    return f"{plan.exchange.name}{tensor}{stages}{compressor}"


@lru_cache(maxsize=4096)
def _options(plan: Plan) -> PipelineOptions:
    return pipeline_options(plan)


@lru_cache(maxsize=4096)
def degrees_of(plan: Plan) -> Degrees:
    """How a plan divides a model.

    >>> from shoal.config import parse_strategy
    >>> degrees_of(parse_strategy("ddp * tp2 * pp4(interleaved, microbatches=8)")), degrees_of(parse_strategy("ddp"))
    ((2, 4, 2), (1, 1, 1))
    """
    stages = degree_of(plan.pipeline)
    schedule = pipeline.TABLE.look_up(_options(plan).schedule)
    return degree_of(plan.tensor), stages, schedule.stages_per_rank if stages > 1 else 1


@dataclass(frozen=True)
class _Parts:
    """A step, as it follows from its parts."""

    seconds: Interval
    compute: float
    waiting: float
    communication: float
    known: bool
    """Whether what the exchange adds was measured."""


class Predictor:
    """Predicts plans of one model on one machine."""

    def __init__(
        self, work: Work, machine: Machine, setting: Setting, residuals: Mapping[str, float]
    ) -> None:
        """`residuals`: by family, how many times longer than predicted steps were."""
        self.work = work
        self.machine = machine
        self.setting = setting
        self.residuals = residuals
        self._alone = World.alone()
        self._costs: dict[str, tuple[Cost, Cost]] = {}
        self._ratios: dict[Degrees, float] = {}
        self._stretches: dict[Degrees, float] = {}

    def predict(self, plan: Plan, accumulate: int | None = None) -> Prediction:
        """Of one plan that `check_text` has let pass, and that the model can be divided for."""
        more = self.setting.accumulate if accumulate is None else accumulate
        parts = self._parts(plan, more)
        factor = self.residuals.get(family_of(plan), 1.0) * self._tried(plan)
        seconds = parts.seconds * factor
        return Prediction(
            plan,
            self.setting.workers,
            more,
            seconds if parts.known else seconds.widened(_UNKNOWN),
            parts.compute * factor,
            parts.waiting * factor,
            parts.communication * factor,
            self._memory(plan, more),
            self._held(plan, more)[1].sent,
            promise_of(plan),
            self._margin(plan),
            parts.known,
        )

    def _parts(self, plan: Plan, accumulate: int) -> _Parts:
        """What a step consists of, before anything that was learned of such steps."""
        tensor, stages = degree_of(plan.tensor), degree_of(plan.pipeline)
        division = self.work.divisions.get(degrees_of(plan))
        data = self.setting.workers // (tensor * stages)
        micro, samples = self._micro(plan, accumulate)
        held, sent = self._held(plan, accumulate)
        passes, waiting, sums = self._passes(plan, division, micro, samples, data)
        fetched = self.work.data * (self.setting.global_batch / data)
        once = self.work.update * (1 / (tensor * stages))
        added, known = self._added(plan, sent, division)
        # What was measured on a busy machine may be less than an exchange can save: the update that others do.
        kept = held.resident.get("optimizer", 0) / (max(1, self._optimizer(plan, accumulate)))
        added = added.at_least(-once.middle * (1 - min(1.0, kept)))
        seconds = fetched + passes + once + added + Interval.exact(sums)
        return _Parts(
            seconds.at_least(1e-9),
            passes.middle - waiting + once.middle + fetched.middle + min(0.0, added.middle),
            waiting,
            max(0.0, added.middle) + sums,
            known,
        )

    def _micro(self, plan: Plan, accumulate: int) -> tuple[int, float]:
        """How many micro-batches a replica has in a step, and the samples of each."""
        data = self.setting.workers // (degree_of(plan.tensor) * degree_of(plan.pipeline))
        micro = _options(plan).microbatches * accumulate
        return micro, self.setting.global_batch / (data * micro)

    def _held(self, plan: Plan, accumulate: int) -> tuple[Cost, Cost]:
        division = self.work.divisions.get(degrees_of(plan))
        return self._cost(plan, division, accumulate, self._micro(plan, accumulate)[1])

    def _optimizer(self, plan: Plan, accumulate: int) -> int:
        """Bytes of the optimizer where every replica keeps all of it."""
        return self._held(replace(plan, exchange=_DDP, compressor=None), accumulate)[0].resident.get(
            "optimizer", 0
        )

    def _tried(self, plan: Plan) -> float:
        """How many times longer real workers took than was foreseen, where they have tried such a division."""
        degree = degrees_of(plan)
        division = self.work.divisions.get(degree)
        if division is None or division.seconds is None or self.setting.workers != self.machine.workers:
            return 1.0
        if degree not in self._ratios:
            there = self._as_tried(division)
            foreseen = there._parts(parse_strategy(division.text), division.accumulate)
            ratio = division.seconds.middle / foreseen.seconds.middle
            self._ratios[degree] = min(max(ratio, 1 / _MOST), _MOST)
        return self._ratios[degree]

    def _as_tried(self, division: Division) -> Predictor:
        setting = replace(self.setting, global_batch=division.batch, accumulate=division.accumulate)
        return Predictor(self.work, self.machine, setting, {})

    def _cost(
        self, plan: Plan, division: Division | None, accumulate: int, samples: float
    ) -> tuple[Cost, Cost]:
        """Of the workers of a replica: of the one that holds the most, and of the one that sends the most."""
        key = f"{plan} {accumulate}"
        if key not in self._costs:
            tensor, stages = degree_of(plan.tensor), degree_of(plan.pipeline)
            parts = division.parts if division is not None else [self.work.whole]
            found = []
            for rank, part in enumerate(parts):
                mesh = _imagine(self.setting.workers, tensor, stages, rank)
                fitted = _for_micro_batches(
                    part, plan, accumulate, samples / division.samples if division else 1.0
                )
                found.append(plan_cost(plan, fitted, mesh))
            self._costs[key] = max(found, key=lambda c: c.total), max(found, key=lambda c: c.sent)
        return self._costs[key]

    def _passes(
        self, plan: Plan, division: Division | None, micro: int, samples: float, data: int
    ) -> tuple[Interval, float, float]:
        """Seconds of all passes of a step; of them those of waiting; and of sums over the tensor axis."""
        one = self.work.seconds(samples) * self._crowd()
        if division is None:
            return one * micro, 0.0, 0.0
        tensor, stages = degree_of(plan.tensor), degree_of(plan.pipeline)
        part = 1 - division.cut + division.cut / tensor
        cut = division.parts[0].cut
        sums = 0.0
        if tensor > 1:
            scale = samples / division.samples
            moved = [*cut.summed, *(nbytes / 2 for nbytes in cut.gathered)]
            sums = micro * sum(self.machine.sum_seconds(nbytes * scale) for nbytes in moved)
        if stages == 1:
            found = one * (micro * part)
            return (found.widened(_DIVIDED), 0.0, sums)
        options = _options(plan)
        alone = one.middle * self.work.alone * part
        slowed = max(
            1.0, 1 / max(self.work.alone, 1e-6) * min(1.0, self.machine.cores / self.machine.workers)
        )
        cores = Cores(self.machine.cores, slowed)
        times = tuple(round(alone * share, 9) for share in division.stages)
        span = _span(options.schedule, stages, micro, times, cores, data * tensor)
        span += micro * self.machine.microbatch
        busy = alone * micro / stages / cores.rate(min(self.setting.workers, self.machine.workers))
        spread = one * (span / one.middle)
        return spread.widened(_DIVIDED), max(0.0, span - busy), sums

    def _added(self, plan: Plan, cost: Cost, division: Division | None) -> tuple[Interval, bool]:
        """Seconds that the exchange adds, and whether that is known."""
        if self.setting.workers == 1:
            return ZERO, True
        part = division.parts[0] if division is not None else self.work.whole
        nbytes = sum(p.nbytes for p in part.trained)
        tensors = len(part.trained)
        name = plan.exchange.name
        sent = cost.wire.get("data", 0.0) + cost.wire.get("server", 0.0)
        if self.machine.workers == 1:
            return ZERO, False
        family = f"{name} + {plan.compressor.name}" if plan.compressor is not None else name
        if degree_of(plan.tensor) * degree_of(plan.pipeline) == self.setting.workers:
            return ZERO, True  # one replica alone
        known = self.machine.knows(family)
        nearest = next((other for other in (family, name, "ddp") if self.machine.knows(other)), "")
        found = self.machine.adds(nearest, nbytes, tensors, sent)
        if self.setting.hosts > 1 and self.setting.net:
            # No core serves the wire between hosts; how much of its time passes hide is not known.
            wire = sent * _leaves(self.setting) / self.setting.net
            hidden = min(wire, self.work.passes[-1].seconds.middle / 2)
            found = found + Interval(wire - hidden, wire - hidden / 2, wire)
        return found, known

    def _margin(self, plan: Plan) -> float:
        division = self.work.divisions.get(degrees_of(plan))
        if self.work.traced:
            return _COUNTED
        return _PARTS if division is not None or plan.compressor is not None else 0.0

    def _crowd(self) -> float:
        """How much longer a pass takes with as many neighbours as there will be, than with those of the profile."""
        here = -(-self.setting.workers // self.setting.hosts)
        cores = max(self.machine.cores, 1)
        return max(1.0, here / cores) / max(1.0, self.work.neighbours / cores)

    def _memory(self, plan: Plan, accumulate: int) -> dict[str, int]:
        held = self._held(plan, accumulate)[0]
        division = self.work.divisions.get(degrees_of(plan))
        process = self.work.base + self._code(plan, division)
        passing = self._passing(plan, accumulate)
        if division is not None and division.peak:
            degree = degrees_of(plan)
            if degree not in self._stretches:
                self._stretches[degree] = self._stretch(division)
            passing *= self._stretches[degree]
        found = {"process": process, **held.resident, "passes": round(passing)}
        if division is not None and division.peak:
            found["building"] = max(0, division.built - sum(found.values()))
        elif division is not None:
            # The whole model is there until its part has been found, and what that leaves, stays.
            samples = self._micro(plan, accumulate)[1]
            whole = sum(p.nbytes for p in self.work.whole.parameters)
            finding = whole + round(division.building * max(1.0, samples / division.samples))
            found["building"] = max(0, process + finding - sum(found.values()))
        return found

    def _passing(self, plan: Plan, accumulate: int) -> float:
        """Bytes at the peak of the passes of the worker that holds the most."""
        tensor, stages = degree_of(plan.tensor), degree_of(plan.pipeline)
        division = self.work.divisions.get(degrees_of(plan))
        samples = self._micro(plan, accumulate)[1]
        passing = float(self.work.held(samples))
        if division is None:
            return passing
        # Inputs of layers that are cut are whole on every tensor rank, and what is gathered is there besides.
        passing += sum(division.parts[0].cut.gathered) * samples / division.samples if tensor > 1 else 0.0
        if stages > 1:
            options = _options(plan)
            chosen = pipeline.TABLE.look_up(options.schedule)
            most = max(
                chosen.peak(rank, stages, options.microbatches)
                * max(s for n, s in enumerate(division.stages) if chosen.rank_of(n, stages) == rank)
                for rank in range(stages)
            )
            passing *= min(most, 1.0 * options.microbatches)
        return passing

    def _stretch(self, division: Division) -> float:
        """How many times more passes took than was foreseen, where real workers have tried such a division."""
        there, plan = self._as_tried(division), parse_strategy(division.text)
        states = there._held(plan, division.accumulate)[0].total
        foreseen = there._passing(plan, division.accumulate)
        return max(0.0, division.peak - self.work.base - states) / max(1.0, foreseen)

    def _code(self, plan: Plan, division: Division | None) -> int:
        """Bytes by which a process grows when it first works so."""
        if self.setting.workers == 1:
            return 0
        code = self.machine.code
        name = plan.exchange.name
        named = f"{name} + {plan.compressor.name}" if plan.compressor is not None else name
        more = max(code.get(named, 0), code.get(name, 0))
        if division is not None and division.peak:  # what was seen of it has the code of ddp in it
            return max(0, more - code.get("ddp", 0))
        more += code.get("tp", 0) if degree_of(plan.tensor) > 1 else 0
        return more + (code.get("pp", 0) if degree_of(plan.pipeline) > 1 else 0)


_DDP = parse_strategy("ddp").exchange
_MOST = 8.0
"""Times longer or shorter than foreseen, beyond which a try says nothing."""
_PARTS, _COUNTED = 0.06, 0.2
"""By how much more memory a divided model or a compressor took in `scripts/bench plan`, and a pass that was counted."""
_UNKNOWN = 0.5
"""How uncertain a time is whose exchange was not measured here."""
_DIVIDED = 0.15
"""How uncertain passes of a divided model are at least: layers of half the width are not twice as fast."""


def _for_micro_batches(part: ModelProfile, plan: Plan, accumulate: int, scale: float) -> ModelProfile:
    """A part as it is for micro-batches of another size."""
    stages = part.stages
    if stages is not None:
        count = _options(plan).microbatches * accumulate
        passed = tuple(round(nbytes * scale) for nbytes in stages.passed)
        stages = replace(stages, microbatches=count, passed=passed)
    cut = replace(
        part.cut,
        summed=tuple(round(n * scale) for n in part.cut.summed),
        gathered=tuple(round(n * scale) for n in part.cut.gathered),
    )
    return replace(part, accumulate=accumulate, stages=stages, cut=cut)


@lru_cache(maxsize=4096)
def _span(
    schedule: str, ranks: int, micro: int, stages: tuple[float, ...], cores: Cores, replicas: int
) -> float:
    chosen = pipeline.TABLE.look_up(schedule)
    thirds = [Costs(t / 3, t / 3, t / 3) for t in stages]
    return simulate(chosen, ranks, micro, thirds, cores, replicas)


@lru_cache(maxsize=4096)
def _imagine(workers: int, tensor: int, stages: int, rank: int) -> Mesh:
    return Mesh.imagine(World.alone(), workers, tensor, stages, rank)


def _leaves(setting: Setting) -> float:
    """Share of what a ring sends that leaves a host, for each of its workers, which share the wire.

    >>> _leaves(Setting(8, 64, hosts=4))
    1.0
    """
    return float(min(1, setting.hosts - 1))
