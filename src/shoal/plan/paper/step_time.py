"""Seconds of a step of a transformer on a cluster on paper: the work of its layers, messages, who waits for whom."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.plan.paper.achieved import Achieved
from shoal.plan.paper.cluster import Cluster
from shoal.plan.paper.gpt import Gpt
from shoal.plan.paper.layout import Layout


@dataclass(frozen=True)
class PaperTime:
    """Where the seconds of a step go, on the stage that is latest."""

    compute: float
    tensor: float
    """Sums over the tensor axis, which nothing hides."""
    bubble: float
    data: float
    """Gradients and parameters over the data axis, as far as nothing hides them."""
    update: float

    @property
    def seconds(self) -> float:
        return self.compute + self.tensor + self.bubble + self.data + self.update


def step_flops(gpt: Gpt, samples: float) -> float:
    """What the published counts are of: 6 × parameters for each token, and attention, without what runs again.

    >>> f"{step_flops(Gpt(96, 12288, 96, 2048), 1) / 2048 / 6:.3g}"
    '1.79e+11'
    """
    tokens = samples * gpt.seq
    return tokens * (
        6 * (gpt.layers * gpt.block_parameters + gpt.head_parameters) + 12 * gpt.layers * gpt.hidden * gpt.seq
    )


def paper_time(gpt: Gpt, layout: Layout, cluster: Cluster) -> PaperTime:
    """Seconds of one step."""
    card, reached = cluster.card, cluster.achieved
    layers = math.ceil(gpt.layers / layout.stages)
    forward, again, backward = _layer(gpt, layout, cluster)
    head = _matrix(gpt.head_parameters, gpt, layout, cluster)
    heads = (
        head / layout.stages if layout.virtual > 1 else head
    )  # interleaving evens out what the last stage has more
    micro = layers * (forward + again + backward) + 3 * heads
    sums = layers * _tensor_sums(gpt, layout, cluster)
    hop = _hop(gpt, layout, cluster)
    count = layout.microbatches
    compute, tensor = count * micro, count * (sums + hop)
    data, update = _data(gpt, layout, cluster, layers, (forward + again, backward))
    hosts = max(1.0, layout.cards / card.per_host)
    update += reached.fixed * math.log2(1 + hosts)
    return PaperTime(compute, tensor, (compute + tensor) * layout.bubble, data, update)


def _layer(gpt: Gpt, layout: Layout, cluster: Cluster) -> tuple[float, float, float]:
    """Seconds of a layer, for one micro-batch: forward, what is computed again, and backward."""
    card, reached = cluster.card, cluster.achieved
    tokens = layout.micro_batch * gpt.seq / layout.context
    odd = reached.odd_heads if gpt.head_width % 8 else 1.0
    matrices = _matrix(gpt.block_parameters, gpt, layout, cluster)
    flops = 4 * tokens * gpt.seq * gpt.hidden / layout.tensor
    attention = flops / (card.peak["bf16"] * reached.attention) * odd
    stream = (
        reached.stream
        * tokens
        * gpt.hidden
        * 2
        / card.memory_bandwidth
        / (layout.tensor if layout.sequence else 1)
    )
    forward = matrices + attention + stream / 3 + reached.launch
    again = forward if layout.recompute == "full" else attention if layout.recompute == "selective" else 0.0
    return forward, again, 2 * (matrices + attention) + stream * 2 / 3 + 2 * reached.launch


def _matrix(parameters: float, gpt: Gpt, layout: Layout, cluster: Cluster) -> float:
    """Seconds of products with so many numbers, forward."""
    tokens = layout.micro_batch * gpt.seq / layout.context
    peak = cluster.card.peak_of(layout.precision) * cluster.achieved.matrix
    return 2 * parameters * tokens / layout.tensor / peak


def _tensor_sums(gpt: Gpt, layout: Layout, cluster: Cluster) -> float:
    """Seconds of a layer's sums over the tensor axis: two forward, two backward, two where layers run again."""
    if layout.tensor == 1:
        return 0.0
    passes = 6 if layout.recompute == "full" else 4
    nbytes = 2 * layout.micro_batch * gpt.seq / layout.context * gpt.hidden
    return passes * 2 * (layout.tensor - 1) / layout.tensor * nbytes / _bandwidth(layout.tensor, cluster)


def _hop(gpt: Gpt, layout: Layout, cluster: Cluster) -> float:
    """Seconds of passing on a micro-batch to the next stage and back."""
    if layout.stages == 1:
        return 0.0
    nbytes = 2 * layout.micro_batch * gpt.seq / layout.context * gpt.hidden / layout.tensor
    return 2 * layout.virtual * nbytes / _bandwidth(layout.cards, cluster)


def _data(
    gpt: Gpt, layout: Layout, cluster: Cluster, layers: int, times: tuple[float, float]
) -> tuple[float, float]:
    """Seconds of the data axis that nothing hides, and of the update."""
    mine = (layers * gpt.block_parameters + gpt.head_parameters) / layout.tensor
    replicas = layout.data * layout.context
    cut = replicas if layout.zero >= 1 else 1
    update = (layout.moments * 2 + 4) * mine / cut / cluster.card.memory_bandwidth
    if replicas == 1:
        return 0.0, update
    share = 2 * mine * (replicas - 1) / replicas / _data_bandwidth(layout, cluster)
    if layout.zero < 3:
        last = times[1] * layers  # the backward pass of the last micro-batch hides what it can
        return max(share * 2 - last, share * 2 / max(layers, 1)), update
    first = share / max(layers, 1)
    hidden = (max(0.0, share - times[0] * layers), max(0.0, 2 * share - times[1] * layers))
    return layout.microbatches * (first + sum(hidden)), update


def _bandwidth(cards: int, cluster: Cluster) -> float:
    """Bytes a second of a group of so many neighbouring cards."""
    card, reached = cluster.card, cluster.achieved
    if cards <= card.per_host:
        return card.inside * reached.inside
    return card.between * reached.between


def _data_bandwidth(layout: Layout, cluster: Cluster) -> float:
    """Of replicas, which are as far apart as the cards that share one model; rings leave a host once."""
    card, reached = cluster.card, cluster.achieved
    model = layout.tensor * layout.stages
    if layout.cards <= card.per_host:
        return card.inside * reached.inside
    here = max(1, card.per_host // model)
    return min(card.between * reached.between * here, card.inside * reached.inside)


__all__ = ["Achieved", "PaperTime", "paper_time", "step_flops"]
