"""What to add to an error of the user's own code: where it happened; and where memory ran out, what would take less."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from shoal.data.feed import Feed
from shoal.errors import ShoalError
from shoal.train.model.recompute import recomputes
from shoal.types import Plan
from shoal.world.failure import is_lost_peer
from shoal.world.free_memory import free_memory

_ASKED = re.compile(r"tried to allocate ([\d.]+ ?(?:bytes|[KMGT]i?B))", re.IGNORECASE)
_SHARD = "got mixed torch.Tensor and DTensor"
"""What torch says where a parameter is used while a shard is in its place."""
_WHOLE = ("ddp", "zero1", "zero2")
"""Exchanges under which every worker holds all parameters by itself."""


@dataclass(frozen=True)
class Shortage:
    """What is known when memory runs out in a step."""

    micro_batch: int
    """Samples of the largest micro-batch."""
    accumulate: int
    recomputes: bool
    exchange: str
    pipeline: bool
    replicas: int
    parameter_bytes: int

    @staticmethod
    def of(model: nn.Module, feed: Feed, plan: Plan) -> Shortage:
        """From the parts of a run."""
        return Shortage(
            micro_batch=-(-feed.global_batch // feed.parts),
            accumulate=feed.accumulate,
            recomputes=recomputes(model),
            exchange=plan.exchange.name,
            pipeline=plan.pipeline is not None,
            replicas=feed.size,
            parameter_bytes=sum(p.numel() * p.itemsize for p in model.parameters()),
        )

    def remedies(self) -> list[str]:
        """What would take less memory, as far as it is known.

        >>> print(*Shortage(8, 1, True, "ddp", False, 4, 2 * 10**6).remedies(), sep=", ")
        accumulate=2 (4 samples at a time instead of 8), zero3 (each worker keeps 1/4 of 2,000,000 bytes of parameters)
        """
        found = []
        if self.micro_batch > 1:
            half = -(-self.micro_batch // 2)
            more = "microbatches" if self.pipeline else "accumulate"
            found.append(
                f"{more}={2 * self.accumulate} ({half} samples at a time instead of {self.micro_batch})"
            )
        if not self.recomputes:
            found.append("recompute='blocks' (activations of one block at a time)")
        if self.exchange in _WHOLE and self.replicas > 1:
            found.append(
                f"zero3 (each worker keeps 1/{self.replicas} of {self.parameter_bytes:,} bytes of parameters)"
            )
        return found


def remedies_of_making(exchange: str, workers: int) -> list[str]:
    """What would take less memory while a run is made.

    >>> remedies_of_making("ddp", 4)
    ['zero3 (each worker keeps 1/4 of the parameters)']
    """
    return (
        [f"zero3 (each worker keeps 1/{workers} of the parameters)"]
        if exchange in _WHOLE and workers > 1
        else []
    )


def remedies_of_evaluation(samples: int, replicas: int) -> list[str]:
    """What would take less memory in an evaluation of so many samples at a time.

    >>> remedies_of_evaluation(64, 2)
    ['batch=32 (16 samples at a time on each worker instead of 32)']
    """
    each = -(-samples // replicas)
    if each < 2:
        return []
    half = -(-each // 2)
    return [f"batch={half * replicas} ({half} samples at a time on each worker instead of {each})"]


@contextmanager
def noting(rank: int, phase: str, remedies: Callable[[], list[str]]) -> Iterator[None]:
    """Add to an error that comes in here what `note_place` adds."""
    try:
        yield
    except Exception as error:
        note_place(error, rank, phase, remedies)
        raise


def note_place(error: BaseException, rank: int, phase: str, remedies: Callable[[], list[str]]) -> None:
    """Add to an error that is not ours on which rank it came, and when; its kind and its traceback stay.

    `phase`: as "in step 3". `remedies`: what would take less memory; asked where there was too little.
    """
    if isinstance(error, ShoalError) or not isinstance(error, Exception) or is_lost_peer(error):
        return
    if _SHARD in str(error):
        error.add_note(
            "shoal: zero3 has shards in the place of a layer's parameters except while that layer runs, and this uses "
            "one outside of it; let the layer itself use it, or use zero2 or ddp."
        )
    if not _is_memory(error):
        error.add_note(f"shoal: this was {phase}, on rank {rank}.")
        return
    asked = _ASKED.search(str(error))
    wanted = f"; {asked[1]} were asked for" if asked else ""
    free = f"{free_memory() / 1e9:.1f} GB are free on this host"
    error.add_note(
        f"shoal: memory ran out {phase}, on rank {rank}{wanted}, and {free}. Less is taken by "
        f"{', or by '.join([*remedies(), 'a smaller model'])}. memory='auto' picks what fits before the first step."
    )


def _is_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
