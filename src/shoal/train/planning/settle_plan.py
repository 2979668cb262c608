"""`strategy="auto"` and `memory="auto"` become what they stand for, before anything of a run is made."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from torch import nn

from shoal.config import degree_of, parse_strategy
from shoal.errors import ConfigError
from shoal.plan.check import check_text
from shoal.plan.cost import plan_cost
from shoal.plan.paper.cluster import parse_amount
from shoal.plan.search import SPARE
from shoal.plan.show import size
from shoal.train.model.make import make_model
from shoal.train.model.profile import profile_model
from shoal.train.model.sync_batchnorm import has_batchnorm
from shoal.train.planning.choose import choose_strategy
from shoal.train.planning.rehearsal import Rehearsal, forget_peak, resident, settle, unheard
from shoal.train.planning.trace import CannotTrace, Traced, trace
from shoal.train.run_config import RunConfig
from shoal.train.technique import precision
from shoal.world.free_memory import free_memory
from shoal.world.mesh import Mesh
from shoal.world.world import World


def settle_plan(config: RunConfig, world: World) -> None:
    """Change `config` in place, on every rank alike. Collective."""
    choose_strategy(config, world)
    if config.memory is not None:
        fit_memory(config, world)


@dataclass(frozen=True)
class Way:
    """One way to make a step smaller."""

    accumulate: int
    recompute: str | None

    def __str__(self) -> str:
        again = f", recompute='{self.recompute}'" if self.recompute else ""
        return f"accumulate={self.accumulate}{again}"


def fit_memory(config: RunConfig, world: World) -> None:
    """Pick the fastest way that fits: micro-batches first, then blocks that are computed again. Collective."""
    if config.step is not None:
        raise ConfigError(
            "memory= does not go with step=, which computes a worker's samples at once; leave it out."
        )
    found: tuple[Way, int] | str = ""
    if world.rank == 0:
        try:
            found = _find(config, world)
        except ConfigError as error:
            found = str(error)
    told = world.gather_values(_plain(found))[0]
    if isinstance(told, str):
        raise ConfigError(told)
    way = Way(int(told[0]), told[1])
    if world.rank == 0 and (way.accumulate, way.recompute) != (config.accumulate, config.recompute):
        print(f"shoal: memory={config.memory}: {way}; {size(told[2])} a worker.", file=sys.stderr, flush=True)
    config.accumulate = way.accumulate
    config.recompute = way.recompute


def _plain(found: tuple[Way, int] | str) -> str | list[int | str | None]:
    return found if isinstance(found, str) else [found[0].accumulate, found[0].recompute, found[1]]


def _find(config: RunConfig, world: World) -> tuple[Way, int]:
    here = sum(host == world.hosts[world.rank] for host in world.hosts)
    base = resident("VmRSS")
    given = config.memory or ""
    limit = base + free_memory() / here if given == "auto" else parse_amount(given, "memory=")
    plan = check_text(config.strategy, world.size)
    cells = degree_of(plan.tensor) * degree_of(plan.pipeline)
    samples = -(-config.global_batch * cells // world.size)
    chosen = precision.TABLE.look_up(config.precision)
    model, _ = make_model(config.model, config.seed, chosen.model, deferred=True)
    whole = profile_model(model, config.optimizer)
    least = 0
    passes = _Passes(config)
    # What tpN and ppN leave of the model on a worker is taken as an even share.
    for way in _ways(config, model, samples):
        mesh = Mesh.imagine(World.alone(), max(world.size // cells, 1))
        cost = plan_cost(
            replace(plan, tensor=None, pipeline=None), replace(whole, accumulate=way.accumulate), mesh
        )
        needed = base + (cost.total + passes.peak(-(-samples // way.accumulate), way.recompute)) // cells
        if needed <= (1 - SPARE) * limit:
            return way, needed
        least = min(least or needed, needed)
    raise ConfigError(
        f"memory={given}: a step of {parse_strategy(config.strategy)} takes at least {size(least)} a worker, and "
        f"{size((1 - SPARE) * limit)} may be used; use zero3, more workers, or a smaller model."
    )


def _ways(config: RunConfig, model: nn.Module, samples: int) -> list[Way]:
    """From the fastest to the slowest; what the user has asked for is kept."""
    # Batch normalisation would see fewer samples at a time, which is another computation.
    most = config.accumulate if has_batchnorm(model) else samples
    cuts, cut = [], config.accumulate
    while cut <= most:
        cuts.append(cut)
        cut *= 2
    again = [config.recompute] if config.recompute else [None, "blocks"]
    return [Way(cut, recompute) for recompute in again for cut in (cuts or [config.accumulate])]


class _Passes:
    """Bytes at the peak of a pass by its samples: traced, or of two small ones that were run."""

    def __init__(self, config: RunConfig) -> None:
        self._config = replace(config, recompute=None, strategy="ddp", memory=None)
        self._run: tuple[int, int] | None = None

    def peak(self, samples: int, recompute: str | None) -> int:
        """Of so many samples."""
        try:
            found: Traced = trace(self._config, samples)
        except CannotTrace:
            first, second = self._measured()
            return first + (second - first) * max(0, samples - 1)
        return found.recomputed_peak if recompute else found.peak

    def _measured(self) -> tuple[int, int]:
        """Of one sample and of two, above what the states take: the line through them errs on the safe side."""
        if self._run is None:
            seen = []
            with unheard():
                for samples in (1, 2):
                    rehearsal = Rehearsal(self._config, samples)
                    for _ in rehearsal.run(samples, 0.1):
                        pass
                    settle()
                    before = resident("VmRSS")
                    forget_peak()
                    for _ in rehearsal.run(samples, 0.1):
                        pass
                    seen.append(max(0, resident("VmHWM") - before))
                    rehearsal.close()
            self._run = seen[0], max(seen[1], seen[0])
        return self._run
