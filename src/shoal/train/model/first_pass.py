"""What the first step shows of a program besides its buffers: parameters that forward passes change, what they count,
and numbers that they draw from elsewhere than torch.

One process makes one forward pass a step, over all samples. Here there is one for each micro-batch of each worker, so
what a pass changes by itself is changed more often, or by each worker in its own way. That is said, or refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import nn

from shoal.data.feed import Feed
from shoal.errors import ConfigError
from shoal.functions import numbers_kept
from shoal.report.words import Words
from shoal.torch_private import version_of
from shoal.train.model.divide import OTHER_DRAWS
from shoal.train.technique.split_check import standing
from shoal.world.mesh import Mesh


class FirstPass:
    """Looks at the first step of a run, and then no more."""

    def __init__(
        self, model: nn.Module, loss: Any, mesh: Mesh, here: int, words: Words, meets: bool, one_copy: bool
    ) -> None:
        """`here`: micro-batches of one worker in a step. `meets`: whether workers compute each step together.
        `one_copy`: whether those of one host have one copy of the parameters."""
        self._one_copy = one_copy
        self._model = model
        self._loss = loss
        self._mesh = mesh
        self._here = here
        self._words = words
        self._meets = meets
        self._versions: list[int] = []
        self._numbers: Mapping[str, float] = {}
        self._standing: tuple[object, ...] = ()
        self._changed: list[str] = []

    @staticmethod
    def of(
        model: nn.Module, loss: Any, mesh: Mesh, feed: Feed, words: Words, meets: bool, one_copy: bool
    ) -> FirstPass | None:
        """None where one process computes each batch at once."""
        parts = feed.parts * mesh.model.size
        made = FirstPass(model, loss, mesh, feed.accumulate, words, meets, one_copy)
        return made if parts > 1 else None

    def before(self) -> None:
        """The first step's passes begin."""
        self._versions = [version_of(p) for p in self._model.parameters()]
        self._numbers = self._counted()
        self._standing = standing()[1:]

    def after(self) -> None:
        """They are over, and nothing is updated yet. Nothing is sent."""
        if self._mesh.tensor.size > 1 and self._standing != standing()[1:]:
            raise ConfigError(OTHER_DRAWS)
        named = [name for name, _ in self._model.named_parameters()]
        now = [version_of(p) for p in self._model.parameters()]
        if self._meets:
            self._changed = [n for n, a, b in zip(named, self._versions, now, strict=True) if a != b]
        if self._here == 1:
            return
        times = f"once for each of a worker's {self._here} micro-batches, and one process does so once a step"
        if self._changed:
            self._words.say(
                f"shoal: forward passes change parameter '{self._changed[0]}', {times}; change it between steps."
            )
        counted = self._counted()
        moved = [
            name for name, was in self._numbers.items() if _counts(counted.get(name, was) - was, self._here)
        ]
        if moved:
            self._words.say(
                f"shoal: the model or its loss counts in '{moved[0]}' ({self._numbers[moved[0]]:g} before the first "
                f"step, {counted[moved[0]]:g} after it), {times}. Count steps in your loop over run.steps, or keep the "
                'number in a buffer with buffers="first".'
            )

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Say what is wrong where a whole tensor has met a parameter that is cut, or that has been freed."""
        try:
            yield
        except RuntimeError as error:
            if "out of bounds for storage of size 0" in str(error):
                raise ConfigError(
                    "the backward pass wants parameters that zero3 has freed, as where the output of a block is "
                    "changed in place; write x = x + y in place of x += y, or use zero2."
                ) from None
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise ConfigError(
                "the loss, or a layer, uses a parameter of another layer, and under this strategy each worker holds a "
                "part of it; give a term on the weights as penalty=, or use ddp, zero1, zero2 or shared."
            ) from None

    def compare(self) -> None:
        """Workers that have changed a parameter in a forward pass must have changed it alike. Collective."""
        self._words.meet()
        if not self._meets or self._mesh.data.size == 1:
            return
        if self._changed and self._one_copy:
            raise ConfigError(
                f"forward passes change parameter '{self._changed[0]}', and under shared the workers of a host have "
                "one copy, which each of them would change; change it between steps, or use ddp."
            )
        held = dict(self._model.named_parameters())
        mine = [float(xxhash.xxh32_intdigest(repr([_sum_of(held[name]) for name in self._changed]).encode()))]
        if len(set(self._mesh.data.gather_numbers(mine)[:, 0].tolist())) > 1:
            name = f" '{self._changed[0]}'" if self._changed else ""
            raise ConfigError(
                f"forward passes change parameter{name} by the samples that they see, and each worker sees others: "
                "its copies would drift apart. Change it between steps, or make it a buffer and say buffers=."
            )

    def _counted(self) -> dict[str, float]:
        """Numbers that layers and the loss keep."""
        found = {
            f"{name}.{key}" if name else key: value
            for name, module in self._model.named_modules()
            for key, value in vars(module).items()
            if type(value) in (int, float)
        }
        return found | numbers_kept(self._loss)


def _counts(change: float, times: int) -> bool:
    """Whether a number looks as if it was changed so many times: lengths that a layer remembers are set once."""
    return change != 0 and (isinstance(change, float) or change % times == 0)


def _sum_of(parameter: torch.Tensor) -> int:
    local = parameter.detach()
    flat = (local.to_local() if hasattr(local, "to_local") else local).cpu().contiguous().reshape(-1)
    return xxhash.xxh32_intdigest(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
