"""Modules that multiply by a matrix: `nn.Linear`, and the transposed one that GPT-2 is made of."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def is_projection(module: nn.Module) -> bool:
    """Is this a matrix product that we may compute in parts? A subclass with a forward of its own is not.

    >>> is_projection(nn.Linear(2, 3)), is_projection(nn.LayerNorm(2))
    (True, False)
    """
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return _is_transposed(module)


def out_dim(module: nn.Module) -> int:
    """The dimension of the weight along which the outputs lie; the inputs lie along the other one."""
    return 1 if _is_transposed(module) else 0


def weight_of(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def bias_of(module: nn.Module) -> Tensor | None:
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias


def outputs(module: nn.Module) -> int:
    """How many values come out.

    >>> outputs(nn.Linear(2, 3)), inputs(nn.Linear(2, 3))
    (3, 2)
    """
    return weight_of(module).shape[out_dim(module)]


def inputs(module: nn.Module) -> int:
    """How many values go in."""
    return weight_of(module).shape[1 - out_dim(module)]


def project(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `module` computes, with this part of its weight."""
    return F.linear(x, weight.t() if _is_transposed(module) else weight, bias)


def _is_transposed(module: nn.Module) -> bool:
    # Known by name, so that the library it comes from is not needed: transformers.pytorch_utils.Conv1D.
    # Of its own class or one derived from it: FSDP2 derives classes.
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
