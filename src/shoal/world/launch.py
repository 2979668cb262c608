"""How this process was started. The only place in Shoal that reads environment variables about ranks.

A launcher tells a worker about itself through the variables below; `torchrun` sets the first group, and
`shoal run` sets all of them.

    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT     as torchrun defines them
    TORCHELASTIC_RESTART_COUNT   how often torchrun has started the workers anew; its store outlives them
    SHOAL_RENDEZVOUS   file:///path (one host) or tcp://address:port        where the workers meet
    SHOAL_OVERRIDES    {"strategy": "zero1", "steps": 20}                   what --strategy, --steps, --set say
    SHOAL_HOST         a name                                               which host this worker counts as
    SHOAL_RECORD       a folder                                             where `shoal verify` wants each step
    SHOAL_STANDS_FOR   a number                                             one process cuts steps as so many would
    SHOAL_STILL        1                                                    train the model in evaluation mode
    SHOAL_LAUNCHER     a path                                               where the launcher listens to its workers
    SHOAL_FINISHING    a path                                               what to create if a signal is obeyed later
    SHOAL_PROGRESS     a path                                               the page in which to write how far it is
    SHOAL_KEPT         1                                                    a launcher holds the store; nobody else does
    SHOAL_MEMORY       a path                                               where snapshots in memory are kept
    SHOAL_AGAIN        {"times": 1, "failed": 12.5, "said": "…"}            why the workers were started anew
    SHOAL_ROLE         preparer 0, evaluator 1                              this process is no worker
    SHOAL_STAGES       {"preparers": 2, "evaluators": 1, "over": "/path"}   who works beside the workers; what appears
                                                                            when the workers are done
    SHOAL_DRY_RUN      tensor 2, pipeline 4, check, plan {...}               what to find out instead of training
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.errors import ConfigError
from shoal.types import Value


@dataclass(frozen=True)
class Again:
    """The workers were started anew by `shoal run`, because one of them was lost.

    >>> Again.of('{"times": 1, "failed": 12.5, "said": "worker 2 was killed", "step": 7}').step
    7
    """

    times: int = 0
    """How often until now; 0: this is the first start."""
    failed: float = 0.0
    """When it was lost, on the clock that all processes of a host share (CLOCK_MONOTONIC)."""
    said: str = ""
    """Who, how and where."""
    rank: int = -1
    step: int = 0
    """The step that was under way when it was lost."""
    grown: bool = False
    """Whether nothing was lost, and there are more workers now."""

    @staticmethod
    def of(text: str) -> Again:
        """From the launcher's own words; ConfigError for anybody else's."""
        try:
            found = json.loads(text) if text else {}
            again = Again(**found)
            numbers = (int(again.times), float(again.failed), int(again.rank), int(again.step))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(f"SHOAL_AGAIN={text[:80]!r} is not what `shoal run` says; unset it.") from error
        return Again(numbers[0], numbers[1], str(again.said), numbers[2], numbers[3], bool(again.grown))


@dataclass(frozen=True)
class Stages:
    """Processes of other stages of the job, which run the same script beside the workers.

    >>> Stages.of('{"preparers": 2}').preparers
    2
    """

    preparers: int = 0
    evaluators: int = 0
    over: str = ""
    """A file that is there when the workers are done; empty: nobody tells."""

    @staticmethod
    def of(text: str) -> Stages:
        """From the launcher's own words; ConfigError for anybody else's."""
        try:
            found = Stages(**json.loads(text)) if text else Stages()
            return Stages(int(found.preparers), int(found.evaluators), str(found.over))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"SHOAL_STAGES={text[:80]!r} is not what `shoal run` says; unset it."
            ) from error


@dataclass(frozen=True)
class Launch:
    """What the launcher said about this worker."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    rendezvous: str = ""
    """`file:///path`, `tcp://address:port`, `env://` under torchrun, or empty when alone."""
    host: str = ""
    """The host this worker counts as; empty means: find out."""
    overrides: Mapping[str, Value] = field(default_factory=dict)
    record: str = ""
    """Folder in which to write down every step; empty means: do not."""
    stands_for: int = 1
    """How many workers' micro-batches this one process computes, one after the other."""
    still: bool = False
    """Whether the model trains in evaluation mode, so that no layer draws or follows statistics."""
    launcher: str = ""
    """The socket at which our launcher listens to its workers; empty if another has started them."""
    finishing: str = ""
    """The file to create on a signal, where this worker ends a little later by itself; empty: no launcher waits."""
    progress: str = ""
    """The page by which our launcher sees how far this worker is (see progress_page.py); empty: nobody looks."""
    attempt: int = 0
    """How often torchrun has started the workers of this job anew."""
    kept: bool = False
    """Whether a launcher holds the store where workers of several hosts meet, so that it outlives them."""
    memory: str = ""
    """The folder in the memory of this host for snapshots that outlive the workers; empty: take none."""
    again: Again = field(default_factory=Again)
    """Why the workers were started anew, if they were."""
    role: str = ""
    """"preparer" or "evaluator"; empty: a worker."""
    number: int = 0
    """Which of them."""
    stages: Stages = field(default_factory=Stages)
    """Who works beside the workers."""
    dry_run: str = ""
    """What to find out about the model instead of training it; empty means: train."""
    export: str = ""
    """What to make of the trained model instead of training it; empty means: train."""


def from_environment(environment: Mapping[str, str] | None = None) -> Launch:
    """Read the launch variables; a process started without any of them runs alone.

    >>> from_environment({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}).rank
    1
    """
    env = os.environ if environment is None else environment

    def number(name: str, default: int) -> int:
        text = env.get(name, "")
        if not text:
            return default
        if not text.isdigit():
            raise ConfigError(f"{name}={text!r} is not a whole number; unset it or start with `shoal run`.")
        return int(text)

    size = number("WORLD_SIZE", 1)
    rank = number("RANK", 0)
    if rank >= size:
        raise ConfigError(f"RANK={rank} needs WORLD_SIZE > {rank}, but WORLD_SIZE={size}.")
    role, _, which = env.get("SHOAL_ROLE", "").partition(" ")
    if role not in ("", "preparer", "evaluator") or not (which or "0").isdigit():
        raise ConfigError(f"SHOAL_ROLE={role[:40]!r} is not what `shoal run` says; unset it.")
    return Launch(
        rank=rank,
        size=size,
        local_rank=number("LOCAL_RANK", rank),
        local_size=number("LOCAL_WORLD_SIZE", size),
        rendezvous=env.get("SHOAL_RENDEZVOUS", "env://" if size > 1 else ""),
        host=env.get("SHOAL_HOST", ""),
        overrides=json.loads(env.get("SHOAL_OVERRIDES", "{}")),
        record=env.get("SHOAL_RECORD", ""),
        stands_for=number("SHOAL_STANDS_FOR", 1),
        still=bool(env.get("SHOAL_STILL", "")),
        launcher=env.get("SHOAL_LAUNCHER", ""),
        finishing=env.get("SHOAL_FINISHING", ""),
        progress=env.get("SHOAL_PROGRESS", ""),
        attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
        kept=bool(env.get("SHOAL_KEPT", "")),
        memory=env.get("SHOAL_MEMORY", ""),
        again=Again.of(env.get("SHOAL_AGAIN", "")),
        role=role,
        number=int(which or 0),
        stages=Stages.of(env.get("SHOAL_STAGES", "")),
        dry_run=env.get("SHOAL_DRY_RUN", ""),
        export=env.get("SHOAL_EXPORT", ""),
    )


def training_is_over(launch: Launch) -> bool:
    """Whether the workers beside which this process works are done."""
    return bool(launch.stages.over) and os.path.exists(launch.stages.over)
