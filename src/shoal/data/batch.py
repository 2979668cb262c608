"""What a batch is made of: tensors, in tuples, lists and dicts, to any depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from shoal.errors import ConfigError

Batch = Any
"""A tensor, or tuples, lists and dicts of batches."""


def tensors_of(batch: Batch) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors_of(value)


def length(batch: Batch) -> int:
    """How many samples a batch has: the first dimension of its first tensor.

    >>> length((torch.zeros(4, 2), torch.zeros(4)))
    4
    """
    for tensor in tensors_of(batch):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise ConfigError(
        f"a batch of type {type(batch).__name__} holds no tensor with a sample dimension; "
        "let data[i] return tensors or numbers, or give collate=."
    )


def fits_as_it_is(device: torch.device, floats: torch.dtype | None) -> bool:
    """Whether `convert` has nothing to do."""
    return floats is None and device.type == "cpu"


def convert(batch: Batch, device: torch.device, floats: torch.dtype | None) -> Batch:
    """The batch on a device, its floating-point tensors in another dtype if one is given.

    Data sets give batches in host memory, so on the CPU there is nothing to move.
    """
    if fits_as_it_is(device, floats):
        return batch
    if isinstance(batch, torch.Tensor):
        dtype = floats if floats is not None and batch.is_floating_point() else None
        return batch.to(device=device, dtype=dtype, non_blocking=True)
    if isinstance(batch, dict):
        return {key: convert(value, device, floats) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple keeps its type
        return type(batch)(*(convert(value, device, floats) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(convert(value, device, floats) for value in batch)
    return batch


def default_inputs(batch: Batch) -> Any:
    """What goes into the model: `batch[0]` of a tuple or list, `batch["inputs"]` of a dict, else the batch."""
    if isinstance(batch, tuple | list):
        return batch[0]
    if isinstance(batch, dict):
        if "inputs" not in batch:
            raise ConfigError(
                f"the batch is a dict with {sorted(batch)}, without 'inputs'; say what goes into the model with "
                "inputs=, such as inputs=lambda batch: batch['x']."
            )
        return batch["inputs"]
    return batch


Inputs = Callable[[Batch], Any]
Collate = Callable[[list[Any]], Batch]
