"""Dropout on data of which each rank has a part: every rank draws for the whole, and uses what falls on its part.

So the random stream goes on alike on all ranks, and the mask is the one that a single process draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.tensor.layout import Piece, whole_like
from shoal.tensor.moves import Ring


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this is entered and `inside`, dropout masks are parts of masks for the whole.

    Data is cut along `axis`; `size` is its whole length there, or None if the parts are even.
    """

    def __init__(self, ring: Ring, axis: int, size: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ring, self.axis, self.size = ring, axis, size
        self.inside = False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.inside and func is torch.ops.aten.bernoulli_.float:
            return self.fill(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def fill(self, mask: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
        local = mask.shape[self.axis]
        size = local * self.ring.degree if self.size is None else self.size
        start, length = Piece(0, (size,)).spans(self.ring.degree, self.ring.rank)[0]
        assert length == local, f"a mask of {local} where the part has {length}"
        whole = whole_like(mask, self.axis, size).bernoulli_(p, generator=generator)
        return mask.copy_(whole.narrow(self.axis, start, length))
