"""Inside a layer: `tpN` cuts layers over N workers so that the model computes what it computed whole.

Shoeybi et al., Megatron-LM (2019); Korthikanti et al., Reducing Activation Recomputation (2022) for `sequence`.

When to use: a layer, or its activations, is too large for one worker; or the batch is too small to be shared.
Between workers of one host: each layer waits for its neighbours.
"""

from __future__ import annotations

from shoal.tensor.apply import apply_cuts, check_options, loss_context
from shoal.tensor.cut import Cut, Cuts, TensorOptions, describe_cuts
from shoal.tensor.cut_cost import profile_pass, tensor_cost
from shoal.tensor.layout import TensorCut, TensorLayout, cut, join
from shoal.tensor.search.find_cuts import find_cuts

__all__ = [
    "Cut",
    "Cuts",
    "TensorCut",
    "TensorLayout",
    "TensorOptions",
    "apply_cuts",
    "check_options",
    "cut",
    "describe_cuts",
    "find_cuts",
    "join",
    "loss_context",
    "profile_pass",
    "tensor_cost",
]
