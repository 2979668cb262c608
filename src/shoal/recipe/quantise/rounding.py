"""Rounding to a grid of few values in the forward pass, through which gradients pass as if nothing were rounded."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

_ACTIVATION_STEPS = 255


def round_weight(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Each output channel on a grid of its own, symmetric about zero and as wide as its largest value.

    >>> round_weight(torch.tensor([[1.0, -0.4, 0.2]]), bits=2)
    tensor([[1., 0., 0.]])
    """
    top = float(2 ** (bits - 1) - 1)
    rows = weight.detach().reshape(len(weight), -1)
    scale = (rows.abs().amax(1) / top).clamp(min=torch.finfo(weight.dtype).tiny)
    scale = scale.reshape(-1, *[1] * (weight.dim() - 1))
    rounded = (weight.detach() / scale).round().clamp(-top, top) * scale
    return weight + (rounded - weight.detach())  # the gradient is the weight's


def round_activation(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Eight bits from low to high, in which zero is exact; what lies outside is cut off, and so is its gradient."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / _ACTIVATION_STEPS
    if scale == 0.0:
        return value
    zero = round(-low / scale)
    cut = value.clamp(-zero * scale, (_ACTIVATION_STEPS - zero) * scale)
    rounded = ((cut.detach() / scale).round()) * scale
    return cut + (rounded - cut.detach())


class RoundingState:
    """What one layer knows: the range of its input, and what it has seen of it since ranges were agreed."""

    def __init__(self, bits: int, activations: bool) -> None:
        self.bits = bits
        self.activations = activations
        self.on = False
        self.range: tuple[float, float] | None = None
        """Agreed; None before the first step is over."""
        self.forget()

    def forget(self) -> None:
        """Nothing has been seen."""
        self.low: torch.Tensor | None = None
        self.high: torch.Tensor | None = None

    def seen(self) -> tuple[float, float]:
        """The lowest and highest value since; infinite the other way round where there was none."""
        if self.low is None or self.high is None:
            return math.inf, -math.inf
        return float(self.low), float(self.high)

    def watch(self, value: torch.Tensor) -> None:
        """Extremes do not depend on how samples were divided: no number of them is averaged."""
        if value.numel():
            low, high = value.detach().aminmax()
            self.low = low if self.low is None else torch.minimum(self.low, low)
            self.high = high if self.high is None else torch.maximum(self.high, high)


class RoundedLinear(nn.Linear):
    """A Linear whose weight and input are rounded in its forward pass; parameters and names stay."""

    rounding: RoundingState

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As the layer it was, on rounded numbers."""
        return F.linear(_rounded(self, self.rounding, input), _weight(self.rounding, self.weight), self.bias)


class RoundedConv2d(nn.Conv2d):
    """The same of a Conv2d."""

    rounding: RoundingState

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As the layer it was, on rounded numbers."""
        given = _rounded(self, self.rounding, input)
        weight = _weight(self.rounding, self.weight)
        return F.conv2d(given, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


ROUNDED = (RoundedLinear, RoundedConv2d)
_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: RoundedLinear, nn.Conv2d: RoundedConv2d}


def can_round(module: nn.Module) -> bool:
    """Whether it is a layer with a forward of its own kind, and not of an heir that computes otherwise."""
    padded = isinstance(module, nn.Conv2d) and module.padding_mode != "zeros"
    return type(module) in _KINDS and not padded


def begin_rounding(module: nn.Module, state: RoundingState) -> None:
    """Let a layer round: in its place, with its own parameters."""
    module.__class__ = _KINDS[type(module)]
    module.__dict__["rounding"] = state


def _rounded(module: nn.Module, state: RoundingState, value: torch.Tensor) -> torch.Tensor:
    if not state.activations:
        return value
    if module.training:
        state.watch(value)
    return value if state.range is None or not state.on else round_activation(value, *state.range)


def _weight(state: RoundingState, weight: torch.Tensor) -> torch.Tensor:
    return round_weight(weight, state.bits) if state.on else weight
