"""An evaluator: the script's model, which takes each checkpoint as it is committed and measures it on `validation=`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shoal.checkpoint.folder import open_folder
from shoal.checkpoint.load import Reader
from shoal.checkpoint.verify import verify
from shoal.data.source import BatchSource
from shoal.errors import ConfigError
from shoal.report.events import EventLog, read_events
from shoal.report.folder import events_path, roles_in
from shoal.train.evaluate import evaluate
from shoal.train.run_config import RunConfig, log_folder
from shoal.train.state.run_state import restore, restore_rows
from shoal.train.step_context import StepContext
from shoal.train.validation.taken import LOOK_SECONDS, TakenCheckpoints, sign_of
from shoal.types import Evaluation, Value
from shoal.world.launch import Launch, training_is_over


@dataclass(frozen=True)
class Watched:
    """What an evaluator looks at."""

    checkpoints: Path
    log: Path


def check_stages(config: RunConfig, launch: Launch) -> None:
    """Refuse stages that would have nothing to do."""
    stages = launch.stages
    if launch.role:  # checked before it became what it is
        return
    if stages.preparers and not (isinstance(config.data, BatchSource) and config.data.arrives):
        raise ConfigError(
            f"--preparers {stages.preparers}: data= is a {type(config.data).__name__}, and preparers make the parts of "
            "a shoal.data.PreparedStore; give one, or leave --preparers out."
        )
    if stages.evaluators and (
        config.validation is None or config.checkpoint is None or config.checkpoint_every is None
    ):
        raise ConfigError(
            f"--evaluators {stages.evaluators}: evaluators measure checkpoints on validation=; give Run validation=, "
            "checkpoint= and checkpoint_every=, or leave --evaluators out."
        )
    if stages.evaluators and log_folder(config) is None:
        raise ConfigError(
            f"--evaluators {stages.evaluators}: they write what they find into the log, and log=None."
        )
    if config.validation is not None and config.step is not None:
        raise ConfigError("validation= with step= of your own: call run.evaluate where you want it.")


def become_evaluator(run: RunConfig, launch: Launch) -> Watched | None:
    """In a preparer: end, as all parts are made. In an evaluator: what it looks at; it keeps nothing of its own."""
    if launch.role == "preparer":
        leave()
    if launch.role != "evaluator":
        return None
    if run.validation is None or run.checkpoint is None or run.log is None:
        leave()  # the workers say why
    log = log_folder(run)
    assert log is not None
    watched = Watched(Path(run.checkpoint), log)
    run.checkpoint = run.checkpoint_every = None
    run.accumulate = 1
    nothing: dict[str, object] = {"log": None, "progress": False, "trackers": "", "profile": "", "copies": ""}
    nothing |= {"ema": None, "early_stop": None, "memory": None, "recompute": None, "balance": "even"}
    run.__dict__ |= nothing
    return watched


def evaluate_checkpoints(
    context: StepContext, config: RunConfig, watched: Watched, launch: Launch
) -> NoReturn:
    """Until training is over and nothing waits."""
    who = f"evaluator-{launch.number}"
    header = {"role": who, "strategy": "solo"}

    def known() -> set[str]:
        return set(_evaluated(watched.log))

    with (
        EventLog.open(events_path(watched.log, who), header) as log,
        TakenCheckpoints(watched.checkpoints, known) as taken,
    ):
        while True:
            over = training_is_over(launch)  # before the last look: what came until then counts
            taken.take()
            with taken.next() as folder:
                if folder is not None:
                    _measure(context, config, folder, log)
                    continue
            if over and not taken.waiting():
                break
            time.sleep(LOOK_SECONDS)
        log.note("end", {"why": "done"})
    leave()


def values_of(found: Evaluation) -> dict[str, Value]:
    """What goes into the log of an evaluation.

    >>> values_of(Evaluation(0.5, 10.0, {"accuracy": 0.75}))
    {'val_loss': 0.5, 'val_accuracy': 0.75}
    """
    return {"val_loss": found.loss, **{f"val_{name}": value for name, value in found.metrics.items()}}


def leave() -> NoReturn:
    """The rest of the script is for workers."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(0)


def _measure(context: StepContext, config: RunConfig, folder: Path, log: EventLog) -> None:
    found = open_folder(folder)
    problem = next(verify(found), "")
    if problem or found.manifest is None:
        log.note("note", {"text": f"{folder.name} was not evaluated: {problem}"})
        return
    reader = Reader.of(found)
    try:
        restore(context.whole, reader)
        restore_rows(context.whole, reader)
    finally:
        reader.close()
    assert config.validation is not None
    began = time.perf_counter()
    values = values_of(evaluate(context, config.validation, config.metrics, None))
    plain = {
        name: value if isinstance(value, str) or value == value else None for name, value in values.items()
    }
    facts: dict[str, object] = {
        "after": found.manifest.step,
        "values": plain,
        "seconds": time.perf_counter() - began,
    }
    log.note("log", {**facts, "written": found.manifest.written})


def _evaluated(log: Path) -> Iterator[str]:
    """Those checkpoints that evaluators have measured."""
    for role in roles_in(log):
        if role.startswith("evaluator-"):
            with suppress(OSError, ConfigError):
                for event in read_events(events_path(log, role)):
                    if isinstance(event.get("written"), str):
                        yield sign_of(event.get("after"), event["written"])
