"""Steps of the user's own model on one worker alone, to see what they take: time by phase, and memory at its peak.

The model is built as a run builds it, by `ddp` of one worker: the same loader, precision, loss and hooks, with nobody
to talk to. Nothing is saved, and the model of the run itself is not touched.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.plan.interval import Interval
from shoal.plan.work import Pass
from shoal.train.build import build, make_feed, open_data
from shoal.train.own_step.build import build_own_step
from shoal.train.own_step.run_own_step import run_own_step
from shoal.train.run_config import RunConfig
from shoal.train.step import run_step
from shoal.train.step_context import StepContext
from shoal.types import Plan, StepReport
from shoal.world.world import World

WARM = 2
"""Steps that do not count; one if it takes as long as all should."""
LEAST, MOST = 3, 40
"""Steps of each size that do, but for models whose every step takes longer than all should: then one."""


@dataclass
class Rehearsed:
    """What was seen."""

    passes: list[Pass] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    data: list[float] = field(default_factory=list)
    """Seconds for each sample."""


class Rehearsal:
    """A model that trains alone for a while."""

    def __init__(self, config: RunConfig, largest: int) -> None:
        """`largest`: samples of the largest pass there will be."""
        settle()
        model = config.model
        if isinstance(model, nn.Module):  # the run's own stays as it is
            model = copy.deepcopy(model)
        alone = replace(
            config,
            model=model,
            strategy="ddp",
            global_batch=largest,
            accumulate=1,
            balance="even",
            partition="block",
            columns={},
            loader_workers=0,
            checkpoint=None,
            checkpoint_every=None,
            copies="",
            batchnorm="own",
        )
        make = build if config.step is None else build_own_step
        self._config = alone
        self._take = run_step if config.step is None else run_own_step
        self.plan: Plan
        self.context: StepContext
        try:
            self.plan, self.context = make(alone, World.alone(), "")
        except ConfigError:  # such as rows of a SparseEmbedding, which one process keeps itself
            alone = replace(alone, strategy="solo")
            self.plan, self.context = make(alone, World.alone(), "")
            self._config = alone
        self._done = 0

    def run(self, samples: int, seconds: float, world: World | None = None) -> Iterator[StepReport]:
        """Steps of so many samples for so long; the first do not count and are not given."""
        config = replace(self._config, global_batch=samples)
        feed = make_feed(config, self.plan, self.context.mesh)
        self.context.loader = open_data(
            replace(feed, fill=self._config.step is not None), self.plan, self.context.mesh
        )
        if world is not None:
            world.barrier()
        end = time.perf_counter() + seconds
        for _ in range(WARM):
            if time.perf_counter() < end:
                self._step()
        least = LEAST if time.perf_counter() < end + seconds else 1
        for number in range(MOST):
            if number >= least and time.perf_counter() > end:
                return
            yield self._step()

    def _step(self) -> StepReport:
        view = self.context.exchange.work.next(self._done, 10**9)
        assert view is not None
        report = self._take(self.context, view)
        self._done += 1
        return report

    def close(self) -> None:
        """Let go of everything."""
        self.context.exchange.close()
        del self.context
        settle()


def rehearse(config: RunConfig, sizes: Sequence[int], seconds: float, states: int, world: World) -> Rehearsed:
    """Passes of these sizes, the smallest first, on every worker of `world` at the same time. Collective.

    `states`: bytes that a worker holds all the time, those of its process too; what is held above them belongs to the
    pass, and so does the code that is loaded when a model is built and trained for the first time.
    """
    with unheard():
        rehearsal = Rehearsal(config, max(sizes))
        found = Rehearsed()
        for samples in sorted(set(sizes)):
            settle()
            forget_peak()
            reports = list(rehearsal.run(samples, seconds / len(sizes), world))
            held = max(0, resident("VmHWM") - states)
            passes = [r.compute_seconds + r.exposed_seconds for r in reports]
            found.passes.append(Pass(samples, Interval.measured(passes), held))
            known = [r.data_seconds + r.compute_seconds + r.exposed_seconds for r in reports]
            found.update += [r.seconds - k for r, k in zip(reports, known, strict=True)]
            found.data += [r.data_seconds / samples for r in reports]
        rehearsal.close()
        world.barrier()
    return found


def pass_alone(config: RunConfig, samples: int, seconds: float) -> float:
    """Seconds of a pass with nobody beside it."""
    with unheard():
        rehearsal = Rehearsal(config, samples)
        found = [r.compute_seconds + r.exposed_seconds for r in rehearsal.run(samples, seconds)]
        rehearsal.close()
    return Interval.measured(found).middle


@contextmanager
def unheard() -> Iterator[None]:
    """The random numbers of the run itself stay what they are."""
    import random

    state, python = torch.get_rng_state(), random.getstate()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        torch.use_deterministic_algorithms(deterministic)


def resident(what: str) -> int:
    """Bytes of this process as the kernel counts them: now (VmRSS), at most (VmHWM); 0 where it does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:")), 0)


def allocated() -> int:
    """Bytes of this process that are no pages of files, such as code."""
    return resident("VmRSS") - resident("RssFile")


def forget_peak() -> None:
    """From now on the peak is counted anew."""
    with suppress(
        OSError
    ):  # then the peak is that of the process so far, which is more and errs on the safe side
        Path("/proc/self/clear_refs").write_text("5")


def settle() -> None:
    """Give back what is free: garbage to the allocator, and the allocator's own slack to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
