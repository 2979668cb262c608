"""The loss is a sum and a count: right for any split of the batch.

A user's loss returns (sum, count), or a mean over the batch, which we turn into one. Gradients are taken of
the sum, added up over micro-batches and workers, and divided once by the true total count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.data.batch import Batch, length
from shoal.errors import ConfigError

Loss = Callable[[Any, Batch], Any]


def as_sum_and_count(returned: object, batch: Batch, what: str = "loss=") -> tuple[torch.Tensor, float]:
    """What a loss function returned, as the sum tensor and the count it is over.

    >>> as_sum_and_count(torch.tensor(0.5), (torch.zeros(8, 2), torch.zeros(8)))
    (tensor(4.), 8.0)
    """
    if isinstance(returned, torch.Tensor):
        if returned.numel() != 1:
            raise ConfigError(
                f"{what} returned a tensor of shape {list(returned.shape)}; return (sum, count) or one mean."
            )
        count = length(batch)
        return _wide(returned) * count, float(count)
    if isinstance(returned, tuple) and len(returned) == 2:
        total, count = returned
        if isinstance(total, torch.Tensor) and total.numel() == 1:
            if isinstance(count, torch.Tensor) and count.numel() == 1:
                return _wide(total), float(count.detach())
            if isinstance(count, int | float) and not isinstance(count, bool):
                return _wide(total), float(count)
    raise ConfigError(
        f"{what} returned {_describe(returned)}; return (sum, count), where sum is a scalar tensor and count a "
        "number, or a scalar tensor that is the mean."
    )


def check_gradient(total: torch.Tensor) -> None:
    """A loss cut off from the parameters would train nothing, silently."""
    if not total.requires_grad:
        raise ConfigError(
            "the loss does not depend on any trainable parameter; did loss= use .item(), .detach() or no_grad?"
        )


def _wide(total: torch.Tensor) -> torch.Tensor:
    """A scalar with room for a large sum, and for weights that half precision would round."""
    if total.dim():
        total = total.reshape(())
    return total.float() if total.dtype is torch.bfloat16 or total.dtype is torch.float16 else total


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(_describe(v) for v in value)})"
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"Tensor of shape {list(value.shape)}"
    return type(value).__name__
