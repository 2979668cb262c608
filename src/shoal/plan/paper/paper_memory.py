"""Bytes of a card that trains its part of a transformer: states, and activations of all micro-batches in flight.

Activations are those of "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al., 2022),
equations 1 to 6, of 16-bit numbers with one byte for each mask of dropout.
"""

from __future__ import annotations

import math

from shoal.plan.paper.gpt import Gpt
from shoal.plan.paper.layout import Layout

WEIGHTS, GRADIENTS = 2, 4
"""Bytes for each number: 16-bit weights, and gradients that are summed in 32 bits."""


def paper_memory(gpt: Gpt, layout: Layout) -> dict[str, float]:
    """Bytes by kind, on the first stage, which holds the most.

    >>> megatron = Gpt(48, 6144, 64, 2048)
    >>> found = paper_memory(megatron, Layout(4, tensor=8, micro_batch=4))
    >>> {kind: round(nbytes / 2**30, 1) for kind, nbytes in found.items()}
    {'parameters': 5.1, 'gradients': 10.3, 'optimizer': 30.8, 'activations': 59.2, 'working': 0.0}
    """
    layers = math.ceil(gpt.layers / layout.stages)
    inside = layers * gpt.block_parameters / layout.tensor
    mine = inside + gpt.head_parameters / layout.tensor
    replicas = layout.data * layout.context
    cut = [replicas if layout.zero >= level else 1 for level in (3, 2, 1)]
    unit = (
        2 * (WEIGHTS + GRADIENTS) * gpt.block_parameters / layout.tensor
        if layout.zero == 3 and replicas > 1
        else 0.0
    )
    return {
        "parameters": WEIGHTS * mine / cut[0],
        "gradients": GRADIENTS * mine / cut[1],
        "optimizer": layout.moments * mine / cut[2],
        "activations": _activations(gpt, layout),
        "working": unit,
    }


def _activations(gpt: Gpt, layout: Layout) -> float:
    positions = gpt.seq / layout.context
    plane = positions * layout.micro_batch * gpt.hidden
    degree = layout.tensor
    scores = 5 * gpt.heads * positions / gpt.hidden
    if layout.recompute == "full":
        layer = 2 * plane / (degree if layout.sequence else 1)
    else:
        kept = 0.0 if layout.recompute == "selective" else scores / degree
        layer = plane * ((34 / degree if layout.sequence else 10 + 24 / degree) + kept)
    return layer * gpt.layers * _in_flight(layout)


def _in_flight(layout: Layout) -> float:
    """How many micro-batches the first stage keeps, as a share of the whole model's layers; of 1f1b."""
    stages = layout.stages
    if stages == 1:
        return 1.0
    waiting = min(layout.microbatches, stages) / stages
    return waiting * (1 + (stages - 1) / (stages * layout.virtual)) if layout.virtual > 1 else waiting
