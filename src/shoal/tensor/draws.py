"""Dropout on data of which each rank has a part: every rank draws for the whole, and uses what falls on its part.

So the random stream goes on alike on all ranks, and the mask is the one that a single process draws.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.seeds import Args, Kwargs, Operation
from shoal.tensor.layout import TensorCut, whole_like
from shoal.tensor.moves import Ring
from shoal.torch_private import TorchDispatchMode


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this is entered and `inside`, dropout masks are parts of masks for the whole.

    Data is cut along `axis`; `size` is its whole length there, or None if the parts are even.
    """

    def __init__(self, ring: Ring, axis: int, size: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ring = ring
        self.axis = axis
        self.size = size
        self.inside = False

    def __torch_dispatch__(
        self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if self.inside and func is torch.ops.aten.bernoulli_.float:
            mask, *settings = args
            assert isinstance(mask, Tensor)
            return self.fill(mask, lambda whole: func(whole, *settings, **(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def fill(self, mask: Tensor, draw: Callable[[Tensor], object]) -> Tensor:
        """Fill this rank's part of a mask with what `draw` gives the whole mask there."""
        local = mask.shape[self.axis]
        size = local * self.ring.degree if self.size is None else self.size
        start, length = TensorCut(0, (size,)).spans(self.ring.degree, self.ring.rank)[0]
        assert length == local, f"a mask of {local} where the part has {length}"
        whole = whole_like(mask, self.axis, size)
        # Costs a mask of the whole and `degree` times the random numbers; what it buys is the mask of one process.
        draw(whole)
        return mask.copy_(whole.narrow(self.axis, start, length))
