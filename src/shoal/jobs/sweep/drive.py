"""The rounds of a sweep: hand trials over, wait for them, keep the best, and give those more steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.errors import ConfigError
from shoal.jobs.engine import ENDS, ArrayEngine, Engine
from shoal.jobs.job import JobSpec
from shoal.jobs.sweep.grid import Trial
from shoal.jobs.sweep.results import Reached, ranked, read_reached
from shoal.jobs.sweep.state import SweepState

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Sweep:
    """What is asked for."""

    spec: JobSpec
    """Of each trial, without its settings; the script is in it."""
    trials: Sequence[Trial]
    folder: Path
    run_settings: frozenset[str]
    """Keys that `shoal.Run` has; others go to the script."""
    at_once: int = 1
    metric: str = "loss"
    mode: str = "min"
    steps: int = 0
    """Of a whole run; 0: as the script says."""
    halving: int = 0
    """After each round one of so many goes on; 0: all run to their end."""

    def rounds(self) -> list[int]:
        """The steps at the end of each round.

        >>> Sweep(JobSpec(("a",)), [Trial(())] * 9, Path("."), frozenset(), steps=90, halving=3).rounds()
        [10, 30, 90]
        """
        if not self.halving:
            return [self.steps]
        count = max(1, math.ceil(math.log(len(self.trials), self.halving) - 1e-9))
        rounds = [max(1, round(self.steps / self.halving**left)) for left in range(count, -1, -1)]
        return list(dict.fromkeys(rounds))

    def spec_of(self, trial: Trial, steps: int) -> JobSpec:
        """The job of a trial, up to so many steps. What it has done before is in its checkpoints."""
        own = self.folder / trial.name
        settings = [("log", str(own / "log")), ("checkpoint", str(own / "checkpoints"))]
        settings += [(key, value) for key, value in trial.settings if key in self.run_settings]
        words = [word for key, value in settings for word in ("--set", f"{key}={value}")]
        words += ["--steps", str(steps)] if steps else []
        extra = [w for k, v in trial.settings if k not in self.run_settings for w in (f"--{k}", v)]
        return replace(self.spec, command=(*words, *self.spec.command, *extra), name=_short(trial.name))


def _short(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "._+=,-" else "-" for sign in name)[:64]


@dataclass
class Outcome:
    """What came of a sweep."""

    reached: dict[str, Reached] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    """How many rounds each trial was given."""

    def best(self, mode: str) -> list[str]:
        """Names of the trials: those of the last round first, the best of them first."""
        values = {name: each.value for name, each in self.reached.items()}
        order = ranked(values, mode)
        return sorted(order, key=lambda name: -self.rounds[name])


def run_sweep(sweep: Sweep, engine: Engine, state: SweepState, say: Callable[[str], None]) -> Outcome:
    """All rounds; what an earlier call has handed over or seen end is not handed over again."""
    outcome = Outcome()
    left = list(sweep.trials)
    rounds = sweep.rounds()
    for number, steps in enumerate(rounds):
        _run_round(sweep, engine, state, left, number, steps, say)
        for trial in left:
            outcome.states[trial.name] = state.ended[state.jobs[trial.name][number]]
            outcome.reached[trial.name] = read_reached(sweep.folder / trial.name / "log", sweep.metric)
            outcome.rounds[trial.name] = number + 1
        if number + 1 < len(rounds):
            left = _keep(sweep, outcome, left)
            names = ", ".join(trial.name for trial in left)
            say(f"after {steps} steps {len(left)} of {len(sweep.trials)} go on: {names}.")
    return outcome


def _keep(sweep: Sweep, outcome: Outcome, left: Sequence[Trial]) -> list[Trial]:
    """The best of those that have come to the end of the round."""
    good = {t.name: outcome.reached[t.name].value for t in left if outcome.states[t.name] == "done"}
    if not good or all(math.isnan(value) for value in good.values()):
        raise ConfigError(
            f"no trial has a value of {sweep.metric!r} after the round; see what one prints, or name another --metric."
        )
    count = math.ceil(len(left) / sweep.halving)
    names = set(ranked(good, sweep.mode)[:count])
    return [trial for trial in left if trial.name in names]


def _run_round(
    sweep: Sweep,
    engine: Engine,
    state: SweepState,
    trials: Sequence[Trial],
    number: int,
    steps: int,
    say: Callable[[str], None],
) -> None:
    """Until all have ended."""
    new = [trial for trial in trials if len(state.jobs.get(trial.name, [])) <= number]
    if isinstance(engine, ArrayEngine) and new:
        jobs = engine.submit_all([sweep.spec_of(trial, steps) for trial in new], sweep.at_once)
        for trial, job in zip(new, jobs, strict=True):
            state.jobs.setdefault(trial.name, []).append(job)
        state.save(sweep.folder)
        new = []
    while True:
        handed = {state.jobs[t.name][number]: t for t in trials if len(state.jobs.get(t.name, [])) > number}
        _see_ends(engine, state, handed, sweep, say)
        running = [job for job in handed if job not in state.ended]
        if not running and not new:
            return
        while new and len(running) < sweep.at_once:
            trial = new.pop(0)
            job = engine.submit(sweep.spec_of(trial, steps))
            state.jobs.setdefault(trial.name, []).append(job)
            state.save(sweep.folder)
            running.append(job)
        time.sleep(POLL_SECONDS)


def _see_ends(
    engine: Engine, state: SweepState, handed: Mapping[str, Trial], sweep: Sweep, say: Callable[[str], None]
) -> None:
    """Note which jobs have ended since the last look. One that its engine has forgotten ended long ago."""
    if all(job in state.ended for job in handed):
        return
    known = {job.id: job for job in engine.jobs()}
    for job, trial in handed.items():
        found = known.get(job)
        if job in state.ended or (found is not None and found.state not in ENDS):
            continue
        state.ended[job] = found.state if found is not None else "done"
        state.save(sweep.folder)
        reached = read_reached(sweep.folder / trial.name / "log", sweep.metric)
        why = f" ({found.why})" if found is not None and found.why else ""
        say(
            f"{trial.name}: {state.ended[job]}{why}, {sweep.metric} {reached.value:.6g} after {reached.steps} steps."
        )
