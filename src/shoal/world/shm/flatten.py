"""From the tensors of a caller to the flat ones that rounds work on, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor

from shoal.world.shm.calls import Refused
from shoal.world.shm.collectives import Rounds

_STRIDED = torch.strided


class Batch:
    """The rounds of one call, which may cover several tensors, and what to do after them."""

    def __init__(self) -> None:
        self.after: list[Callable[[], object]] = []
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
        flat = numbers(tensor)
        if not tensor.is_contiguous():
            self.after += _back(flat, tensor)
        return flat

    def bytes(self, tensor: Tensor) -> Tensor:
        """A flat tensor of bytes to move into; copied back at the end if `tensor` has strides."""
        _check_bytes(tensor)
        return self.numbers(tensor).view(torch.uint8)


def _chain(all_rounds: Sequence[Rounds]) -> Rounds:
    for rounds in all_rounds:
        yield from rounds


def numbers(tensor: Tensor) -> Tensor:
    """Flat, contiguous, outside of autograd, complex numbers as pairs."""
    if tensor.layout is not _STRIDED or not tensor.is_cpu or tensor.is_neg() or tensor.is_conj():
        _refuse(tensor)
    if tensor.is_inference():
        tensor = writable(tensor)
    # The usual case first: for a small collective these checks are a good part of its time.
    if tensor.dim() == 1 and not (tensor.requires_grad or tensor.is_complex()) and tensor.is_contiguous():
        return tensor
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().view(-1)


def writable(tensor: Tensor) -> Tensor:
    """The same memory for a tensor that was made in inference mode: torch lets nobody write that outside of it."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(mode=False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _refuse(tensor: Tensor) -> NoReturn:
    if not tensor.is_cpu:
        raise Refused(
            f"a collective of the shoal backend got a tensor on {tensor.device}; it moves memory of the host. Use "
            "nccl for cards, or tensor.cpu()."
        )
    if tensor.layout is not torch.strided:
        raise Refused(
            f"a collective of the shoal backend got a {str(tensor.layout).removeprefix('torch.')} tensor; only "
            "all_reduce takes sparse_coo tensors. Pass tensor.to_dense()."
        )
    raise Refused(
        "a collective of the shoal backend got a view whose numbers are not what lies in memory (of conj() or imag); "
        "pass tensor.resolve_conj().resolve_neg()."
    )


def numbers_and_back(tensor: Tensor) -> tuple[Tensor, list[Callable[[], object]]]:
    """The flat numbers to work on, and steps that copy them back if `tensor` has strides."""
    flat = numbers(tensor)
    return flat, [] if tensor.is_contiguous() else _back(flat, tensor)


def _back(flat: Tensor, tensor: Tensor) -> list[Callable[[], object]]:
    target = writable(tensor).detach()
    if target.is_complex():
        target = torch.view_as_real(target)
    return [lambda: target.copy_(flat.view(target.shape))]


def _check_bytes(tensor: Tensor) -> None:
    if tensor.is_quantized:
        raise Refused(
            f"a collective of the shoal backend got a tensor of {tensor.dtype}, whose scale is not in its memory; pass "
            "tensor.dequantize(), or tensor.int_repr() and the scale."
        )


def as_bytes(tensor: Tensor) -> Tensor:
    _check_bytes(tensor)
    return numbers(tensor).view(torch.uint8)


def cut(flat: Tensor, tensor: Tensor, splits: list[int], size: int) -> Sequence[Tensor]:
    """The bytes of `tensor` cut along its first dimension."""
    if not splits:
        if tensor.shape[0] % size:
            raise Refused(
                f"all_to_all got {tensor.shape[0]} rows for {size} ranks; they must divide evenly, or give split sizes."
            )
        splits = [tensor.shape[0] // size] * size
    elif len(splits) != size or sum(splits) != tensor.shape[0]:
        raise Refused(
            f"all_to_all got split sizes {splits} for {tensor.shape[0]} rows and {size} ranks; give {size} sizes "
            "whose sum is the number of rows."
        )
    row = tensor.nbytes // tensor.shape[0] if tensor.numel() else 0
    ends = [row * end for end in accumulate(splits)]
    return [flat[end - row * count : end] for count, end in zip(splits, ends, strict=True)]


def check_parts(what: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Refuse one tensor for the parts of all ranks that is not `size` times one of them."""
    if whole.dtype != part.dtype or whole.numel() != size * part.numel():
        raise Refused(
            f"{what} of {size} ranks got a whole of {whole.numel()} {whole.dtype} for parts of {part.numel()} "
            f"{part.dtype}; the whole must have {size} times as many elements of the same type."
        )


def check_list(what: str, parts: Sequence[Tensor], like: Tensor, size: int, mine: int | None = None) -> None:
    """Refuse a list that does not have one tensor for each rank, of one type and size; `mine`: only that one's size."""
    checked = parts if mine is None else parts[mine : mine + 1]
    if len(parts) != size or any(part.dtype != like.dtype for part in parts):
        kinds = ", ".join(sorted({str(part.dtype) for part in parts}))
        raise Refused(
            f"{what} of {size} ranks got a list of {len(parts)} tensors of {kinds}; it needs {size} of {like.dtype}."
        )
    if any(part.numel() != like.numel() for part in checked):
        sizes = [part.numel() for part in parts]
        raise Refused(
            f"{what} got tensors of {sizes} elements in its list, and one of {like.numel()} beside it."
        )
