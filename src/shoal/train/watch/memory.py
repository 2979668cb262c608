"""What a worker's memory goes into, by kind, in the log of its run: as it is, beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from shoal.exchange.local_tensor import local
from shoal.train.step_context import StepContext
from shoal.train.technique.journal import Journal
from shoal.types import StepReport

AFTER = 5
"""Steps of a start: by then the optimizer has its state, and passes have been at their peak."""


@dataclass
class MemoryNote:
    """Notes once in each start what the first rank holds."""

    context: StepContext
    predicted: Mapping[str, int] = field(default_factory=dict)
    """By kind, of the worker that holds the most; empty where nobody has planned."""
    _steps: int = 0

    def after(self, report: StepReport, journal: Journal) -> None:
        """A step is done."""
        self._steps += 1
        if self._steps != AFTER or self.context.world.rank:
            return
        measured = memory_by_kind(self.context)
        facts = {"measured": {**measured, "peak": max(report.peak_memory, sum(measured.values()))}}
        if self.predicted:
            facts["predicted"] = {**self.predicted, "peak": sum(self.predicted.values())}
        journal.note("memory", facts)


def memory_by_kind(context: StepContext) -> dict[str, int]:
    """Bytes of this worker's tensors between two steps; gradients only where they outlive the step."""
    made = context.exchange
    states = [value for state in made.optimizer.state.values() for value in state.values()]
    found = {
        "parameters": bytes_under(context.model.parameters()),
        "buffers": bytes_under(context.model.buffers()),
        "gradients": bytes_under(p.grad for p in made.module.parameters() if p.grad is not None),
        "optimizer": bytes_under(value for value in states if isinstance(value, torch.Tensor)),
    }
    if made.one_copy:  # of all workers of this host: each has its share of it
        hosts = context.world.hosts
        found["parameters"] //= max(1, hosts.count(hosts[context.world.rank]))
    return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def bytes_under(tensors: Iterable[torch.Tensor]) -> int:
    """Of the memory under these tensors, each once.

    >>> bytes_under([(one := torch.zeros(4)), one[1:]])
    16
    """
    found = [local(tensor).untyped_storage() for tensor in tensors if not tensor.is_meta]
    return sum({one.data_ptr(): one.nbytes() for one in found}.values())
