"""Every sensible way to train one transformer on one cluster on paper, the fastest that fits first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.plan.paper.cluster import Cluster
from shoal.plan.paper.gpt import Gpt
from shoal.plan.paper.layout import Layout
from shoal.plan.paper.paper_memory import paper_memory
from shoal.plan.paper.step_time import PaperTime, paper_time, step_flops

SPARE = 0.05
"""Of a card's memory, which stays free."""
_MICRO = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class PaperPlan:
    """One way, with what it would take."""

    layout: Layout
    time: PaperTime
    memory: dict[str, float]
    fits: bool
    flops_per_card: float
    error: float
    """The mean relative error of such a prediction, as far as published runs tell."""

    @property
    def strategy(self) -> str:
        """As the grammar writes it.

        >>> strategy_of(Layout(64, data=2, tensor=8, stages=4, zero=1))
        'zero1 * tp8 * pp4(1f1b, microbatches=32)'
        """
        return strategy_of(self.layout)

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds of a step, between which it should be."""
        return self.time.seconds * (1 - self.error), self.time.seconds * (1 + self.error)


def strategy_of(layout: Layout) -> str:
    """A layout in the grammar of strategies."""
    exchange = f"zero{layout.zero}" if layout.zero else "ddp"
    tensor = f" * tp{layout.tensor}" if layout.tensor > 1 else ""
    schedule = "interleaved" if layout.virtual > 1 else "1f1b"
    stages = (
        f" * pp{layout.stages}({schedule}, microbatches={layout.microbatches})" if layout.stages > 1 else ""
    )
    return f"{exchange}{tensor}{stages}"


def paper_plan(gpt: Gpt, layout: Layout, cluster: Cluster) -> PaperPlan:
    """What one layout would take."""
    time, memory = paper_time(gpt, layout, cluster), paper_memory(gpt, layout)
    fits = sum(memory.values()) <= (1 - SPARE) * cluster.card.memory
    flops = step_flops(gpt, layout.global_batch) / time.seconds / layout.cards
    return PaperPlan(layout, time, memory, fits, flops, cluster.achieved.error)


def search_paper(gpt: Gpt, cluster: Cluster, global_batch: int, precision: str = "bf16") -> list[PaperPlan]:
    """All layouts, those that fit first and of them the fastest first.

    >>> from shoal.plan.paper.cards import CARDS
    >>> plans = search_paper(Gpt(32, 4096, 32, 2048), Cluster(CARDS["H100"], 2), global_batch=128)
    >>> plans[0].fits and plans[0].time.seconds <= plans[1].time.seconds
    True
    """
    found = [paper_plan(gpt, layout, cluster) for layout in _layouts(gpt, cluster, global_batch, precision)]
    if not found:
        raise ConfigError(
            f"no strategy divides a global batch of {global_batch} among {cluster.cards} cards; use a multiple of "
            f"{cluster.cards}, or fewer hosts."
        )
    return sorted(
        found, key=lambda plan: (not plan.fits, plan.time.seconds if plan.fits else sum(plan.memory.values()))
    )


def _layouts(gpt: Gpt, cluster: Cluster, batch: int, precision: str) -> Iterator[Layout]:
    cards = cluster.cards
    for tensor in _divisors(min(cluster.card.per_host, gpt.heads), gpt.heads):
        for stages in _divisors(gpt.layers, gpt.layers):
            data, rest = divmod(cards, tensor * stages)
            if rest or data == 0 or batch % data:
                continue
            for micro in _MICRO:
                if (batch // data) % micro or (stages > 1 and batch // data // micro < stages):
                    continue
                for recompute in ("none", "selective", "full"):
                    for zero in (0, 1, 2, 3) if stages == 1 and data > 1 else (0, 1) if data > 1 else (0,):
                        yield Layout(
                            batch, data, tensor, stages, 1, 1, micro, zero, recompute, tensor > 1, precision
                        )


def _divisors(most: int, of: int) -> list[int]:
    return [n for n in range(1, most + 1) if of % n == 0]
