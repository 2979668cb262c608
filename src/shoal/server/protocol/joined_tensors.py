"""Several flat tensors as one run of bytes, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shoal.world.shm.memory import copy

_ALIGNMENT = 64
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
}


def name_of(dtype: torch.dtype) -> str:
    """A type as a plain value.

    >>> name_of(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def join(tensors: Sequence[torch.Tensor]) -> tuple[list[list[int | str]], torch.Tensor]:
    """The type and length of each, and all of their bytes."""
    layout: list[list[int | str]] = [[name_of(t.dtype), t.numel()] for t in tensors]
    places = list(_places(layout))
    joined = torch.empty(places[-1][1] if places else 0, dtype=torch.uint8)
    for tensor, (start, stop, _) in zip(tensors, places, strict=True):
        joined[start + tensor.nbytes : stop].zero_()
        if tensor.numel():
            copy(joined[start:stop], tensor.contiguous())
    return layout, joined


def separate(layout: Sequence[Sequence[int | str]], joined: torch.Tensor) -> list[torch.Tensor]:
    """The tensors as views of the bytes."""
    if (
        joined.data_ptr() % _ALIGNMENT or joined.storage_offset() % _ALIGNMENT
    ):  # memory that came from elsewhere may begin anywhere
        joined = joined.clone()
    found = []
    for (name, count), (start, _, dtype) in zip(layout, _places(layout), strict=True):
        found.append(joined[start : start + int(count) * dtype.itemsize].view(dtype))
        assert name_of(dtype) == name
    return found


def _places(layout: Sequence[Sequence[int | str]]) -> Iterator[tuple[int, int, torch.dtype]]:
    start = 0
    for name, count in layout:
        dtype = DTYPES[str(name)]
        stop = start + -(-int(count) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        yield start, stop, dtype
        start = stop
