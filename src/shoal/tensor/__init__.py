"""Inside a layer: `tpN` cuts layers over N workers so that the model computes what it computed whole.

Shoeybi et al., Megatron-LM (2019); Korthikanti et al., Reducing Activation Recomputation (2022) for `sequence`.

When to use: a layer, or its activations, is too large for one worker; or the batch is too small to be shared.
Between workers of one host: each layer waits for its neighbours.
"""

from __future__ import annotations

from shoal.tensor.apply import apply_cuts, check_options, loss_context
from shoal.tensor.cuts import Cut, Cuts, TensorOptions, describe_cuts
from shoal.tensor.find import find_cuts
from shoal.tensor.layout import Piece, TensorLayout, cut, join

__all__ = [
    "Cut",
    "Cuts",
    "Piece",
    "TensorLayout",
    "TensorOptions",
    "apply_cuts",
    "check_options",
    "cut",
    "describe_cuts",
    "find_cuts",
    "join",
    "loss_context",
]
