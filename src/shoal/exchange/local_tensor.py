"""What this worker holds of a parameter. A parameter that tensor parallel has cut is a DTensor around its part.

Exchanges lay out, send and update plain tensors only: an optimizer kernel takes no mixture, and each operation on
a DTensor costs a dispatch in Python.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.torch_private import local_part, put_local_part


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is here: of a plain one, all of it."""
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


def put(parameter: nn.Parameter, part: torch.Tensor) -> None:
    """Let a parameter live in other memory."""
    if isinstance(parameter, DTensor):
        put_local_part(parameter, part)
    else:
        parameter.data = part


def is_replaced(parameter: nn.Parameter, home: torch.Tensor) -> bool:
    """Whether the user has given a parameter other memory than what it lives in, as `p.data = value` does."""
    return local(parameter).data_ptr() != home.data_ptr()


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of the part that is here."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements).to_local()
    return gradient


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether only a part of a parameter is here."""
    return isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements)
