"""What a batch is made of: tensors, in tuples, lists and dicts, to any depth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from shoal.call import Call, Signature
from shoal.errors import ConfigError

Batch = Any
"""A tensor, or tuples, lists and dicts of batches."""
Inputs = Callable[[Batch], object]
Collate = Callable[[list[Any]], Batch]


def tensors_of(batch: Batch) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
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
    """The batch on a device, its floating-point tensors in another dtype if one is given, complex ones in its complex.

    Data sets give batches in host memory, so on the CPU there is nothing to move.
    """
    if fits_as_it_is(device, floats):
        return batch
    if isinstance(batch, torch.Tensor):
        dtype = floats if floats is not None and batch.is_floating_point() else None
        if floats is not None and batch.is_complex():
            dtype = floats.to_complex()
        return batch.to(device=device, dtype=dtype, non_blocking=True)
    if isinstance(batch, dict):
        return {key: convert(value, device, floats) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):  # such as a tokenizer's, which keeps its type
        other = copy.copy(batch)
        other.update({key: convert(value, device, floats) for key, value in batch.items()})
        return other
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple keeps its type
        return type(batch)(*(convert(value, device, floats) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(convert(value, device, floats) for value in batch)
    return batch


def default_inputs(batch: Batch) -> object:
    """What goes into the model: `batch[0]` of a tuple or list, `batch["inputs"]` of a dict, else the batch."""
    if isinstance(batch, tuple | list):
        return batch[0]
    if isinstance(batch, Mapping):
        if "inputs" not in batch:
            raise ConfigError(
                f"the batch is a dict with {sorted(batch)}, without 'inputs'; say what goes into the model with "
                "inputs=, such as inputs=lambda batch: batch['x']."
            )
        return batch["inputs"]
    return batch


class ModelInputs:
    """From a batch to how the model is called with it: what `inputs=` says, or the default."""

    def __init__(self, model: nn.Module, inputs: Inputs | None, own_loss: bool = False) -> None:
        """`own_loss`: the model computes its loss itself, and a dict is its keywords."""
        self._name = type(model).__name__
        self._signature = Signature(model)
        self._inputs = inputs
        self._own_loss = own_loss

    def __call__(self, batch: Batch) -> object:
        if self._inputs is not None:
            return self._signature.arrange(self._inputs(batch))
        if isinstance(batch, Mapping) and self._keywords(batch):
            return Call(**batch)
        return self._signature.arrange(default_inputs(batch))

    def _keywords(self, batch: Mapping[str, object]) -> bool:
        """Whether a batch without `inputs=` is the keywords of forward."""
        if self._signature.named(batch):
            return self._own_loss or "inputs" not in batch
        if self._own_loss:
            raise ConfigError(
                f"the batch has {', '.join(self._signature.unnamed(batch))}, which {self._name}.forward does not name; "
                "leave them out in collate=, or say what goes into the model with inputs=."
            )
        return False
