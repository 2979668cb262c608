"""The kinds of check that workers make together: what each looks at, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.selftest import checkpoints, collectives, memory, strategies
from shoal.selftest.row import Answer
from shoal.world.world import World


@dataclass(frozen=True)
class Check:
    """A kind of check. Every worker calls `run` with each of its subjects."""

    subjects: list[str]
    run: Callable[[World, str], Answer]


def checks(folder: Path) -> dict[str, Check]:
    """By name, in the order in which they are made; `folder` is for checkpoints.

    >>> list(checks(Path("/tmp")))
    ['collectives', 'strategies', 'memory', 'checkpoints']
    """
    return {
        "collectives": Check(collectives.subjects(), collectives.measure),
        "strategies": Check(strategies.subjects(), strategies.compare),
        "memory": Check(memory.subjects(), memory.compare),
        "checkpoints": Check(checkpoints.subjects(), partial(checkpoints.hand_over, folder / "checkpoints")),
    }
