"""Any traced model on a cluster on paper: data parallel in its kinds, from counted operations and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal import exchange
from shoal.cost import ModelProfile
from shoal.errors import ConfigError
from shoal.plan.check import check_text
from shoal.plan.cost import plan_cost
from shoal.plan.interval import Interval
from shoal.plan.paper.cluster import Cluster
from shoal.plan.search import SPARE
from shoal.types import Promise
from shoal.world.mesh import Mesh
from shoal.world.world import World


@dataclass(frozen=True)
class Shapes:
    """What a trace of one pass over so many samples tells."""

    samples: int
    forward_flops: float
    flops: float
    kept: float
    """Bytes at the peak of a pass."""
    recomputed: float
    """The same where blocks are computed again."""
    blocks: int
    whole: ModelProfile


@dataclass(frozen=True)
class AnyPlan:
    """One way to train it there."""

    strategy: str
    accumulate: int
    recompute: bool
    seconds: Interval
    communication: float
    """Seconds of messages, hidden ones too."""
    memory: dict[str, int]
    fits: bool

    @property
    def total(self) -> int:
        """Bytes of a card."""
        return sum(self.memory.values())


_CUTS = (1, 2, 4, 8, 16, 32, 64)


def search_any(shapes: Shapes, cluster: Cluster, global_batch: int, precision: str) -> list[AnyPlan]:
    """Every kind of data parallel over all cards: those that fit first, of them the fastest first."""
    found = list(_plans(shapes, cluster, global_batch, precision))
    if not found:
        raise ConfigError(
            f"a global batch of {global_batch} has fewer samples than the cluster's {cluster.cards} cards; use "
            f"{cluster.cards} or more, or fewer hosts."
        )
    return sorted(found, key=lambda one: (not one.fits, one.seconds.middle))


def _plans(shapes: Shapes, cluster: Cluster, batch: int, precision: str) -> Iterator[AnyPlan]:
    for name, kind in exchange.TABLE.items():
        usable = kind.promise is Promise.EXACT and not kind.uses_servers and not kind.in_host_memory
        if (
            not usable
            or (kind.takes_own_step and not kind.compresses)
            or (cluster.cards > 1 and not _shares(name))
        ):
            continue
        for accumulate in _CUTS:
            samples = batch / cluster.cards / accumulate
            if samples >= 1:
                for recompute in (False, True):
                    yield _plan(name, shapes, cluster, samples, accumulate, recompute, precision)


def _shares(name: str) -> bool:
    try:
        check_text(name, 2)
    except ConfigError:
        return False
    return True


def _plan(
    name: str,
    shapes: Shapes,
    cluster: Cluster,
    samples: float,
    accumulate: int,
    recompute: bool,
    precision: str,
) -> AnyPlan:
    card, reached = cluster.card, cluster.achieved
    scale = samples / shapes.samples
    flops = (shapes.flops + (shapes.forward_flops if recompute else 0.0)) * scale
    launches = (4 if recompute else 3) * max(shapes.blocks, 1) * reached.launch
    # What a pass keeps is written once and read once, and as large gradients come back.
    moved = 3 * shapes.kept * scale / card.memory_bandwidth
    passes = accumulate * (flops / (card.peak_of(precision) * reached.matrix) + launches + moved)
    plan = check_text(name, cluster.cards)
    profile = replace(shapes.whole, accumulate=accumulate)
    cost = plan_cost(plan, profile, Mesh.imagine(World.alone(), cluster.cards))
    far = cluster.hosts > 1
    bandwidth = card.between * reached.between if far else card.inside * reached.inside
    if far:  # a ring over all cards leaves each host once, over the links of all its cards
        bandwidth = min(bandwidth * card.per_host, card.inside * reached.inside)
    sent = cost.wire.get("data", 0.0) / bandwidth if cluster.cards > 1 else 0.0
    hidden = min(sent, passes * 2 / 3 / accumulate) * (1 - 1 / max(shapes.blocks, 2))
    update = 3 * cost.resident.get("optimizer", 0) / card.memory_bandwidth
    hosts = reached.fixed * math.log2(1 + cluster.hosts)
    middle = passes + sent - hidden + update + hosts
    memory = {**cost.resident, "passes": round((shapes.recomputed if recompute else shapes.kept) * scale)}
    fits = sum(memory.values()) <= (1 - SPARE) * card.memory
    seconds = Interval(middle - hidden / 2, middle, middle + hidden / 2).widened(max(reached.error, _SHAPES))
    return AnyPlan(name, accumulate, recompute, seconds, sent, memory, fits)


_SHAPES = 0.25
"""How uncertain a time is at least that follows from shapes alone: fractions of peaks were fitted to transformers."""
