"""A penalty on the weights, `penalty=`: what one process would add to its mean loss, once per step.

The loss is a sum over samples, and so is its count. A penalty times the count of each worker is a sum over samples too:
added to the sums, divided by the true count with them, it is there exactly once, whatever the shares are. That needs
all parameters in one place; where workers hold parts of them, `train/model/gathered_penalty.py` brings them together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shoal.errors import ConfigError

Penalty = Callable[[nn.Module], torch.Tensor]
"""Module -> a scalar tensor, added to the mean loss of each step."""


def penalty_of(given: Penalty, module: nn.Module) -> torch.Tensor:
    """What a user's penalty says of a module, or why it cannot be used.

    >>> float(penalty_of(lambda module: module.weight.square().sum(), nn.Linear(2, 1))) > 0
    True
    """
    found = given(module)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        what = (
            f"Tensor of shape {list(found.shape)}"
            if isinstance(found, torch.Tensor)
            else type(found).__name__
        )
        raise ConfigError(
            f"penalty= returned {what}; return a scalar tensor, such as the sum of squared weights."
        )
    if not found.requires_grad:
        raise ConfigError(
            "the penalty does not depend on any trainable parameter; compute it from the parameters of the module "
            "that penalty= is given, without .item(), .detach() or no_grad."
        )
    return found.reshape(())


def add_penalty(given: Penalty, module: nn.Module, total: torch.Tensor, count: float) -> torch.Tensor:
    """A sum of losses over `count`, and the penalty as often.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> total = add_penalty(lambda module: module.weight.sum(), layer, torch.tensor(4.0), 2.0)
    >>> bool(total == 4.0 + 2.0 * layer.weight.sum())
    True
    """
    return total + penalty_of(given, module) * count
