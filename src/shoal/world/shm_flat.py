"""From the tensors of a caller to the flat ones that rounds work on, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shoal.world.shm_ops import Rounds


class Batch:
    """The rounds of one call, which may cover several tensors, and what to do after them."""

    def __init__(self) -> None:
        self.after: list[Callable[[], Any]] = []
        self.count = 0
        self.most = 0
        self._rounds: list[Rounds] = []

    def add(self, rounds: Rounds, nbytes: int) -> None:
        self._rounds.append(rounds)
        self.count += 1
        self.most = max(self.most, nbytes)

    def rounds(self) -> Rounds:
        return self._rounds[0] if self.count == 1 else _chain(self._rounds)

    def numbers(self, tensor: Tensor) -> Tensor:
        """A flat tensor to reduce into; if `tensor` has strides it is copied back at the end."""
        flat, after = numbers_and_back(tensor)
        self.after += after
        return flat

    def bytes(self, tensor: Tensor) -> Tensor:
        """The same as flat bytes, to move into."""
        return self.numbers(tensor).view(torch.uint8)


def _chain(all_rounds: Sequence[Rounds]) -> Rounds:
    for rounds in all_rounds:
        yield from rounds


def numbers(tensor: Tensor) -> Tensor:
    """Flat, contiguous, outside of autograd, complex numbers as pairs."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().view(-1)


def numbers_and_back(tensor: Tensor) -> tuple[Tensor, list[Callable[[], object]]]:
    """The same to work on, and how to bring it back if `tensor` has strides."""
    flat = numbers(tensor)
    if tensor.is_contiguous():
        return flat, []
    target = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return flat, [lambda: target.copy_(flat.view(target.shape))]


def as_bytes(tensor: Tensor) -> Tensor:
    return numbers(tensor).view(torch.uint8)


def cut(flat: Tensor, tensor: Tensor, splits: list[int], size: int) -> Sequence[Tensor]:
    """The bytes of `tensor` cut along its first dimension."""
    if not splits:
        splits = [tensor.shape[0] // size] * size
    row = tensor.nbytes // tensor.shape[0] if tensor.numel() else 0
    ends = [row * end for end in accumulate(splits)]
    return [flat[end - row * count : end] for count, end in zip(splits, ends, strict=True)]
