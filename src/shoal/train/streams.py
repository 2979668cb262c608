"""Random streams by module: what dropout draws depends on the step, the micro-batch and the module, not on who draws.

So a module draws the same numbers in one process, in any worker and in any stage of a pipeline. Every module that
is not inside a block begins a stream of its own when it is called; a block is one unit, whatever it has inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shoal import seeds


class Streams:
    """Seeds torch's generators for every module call of a micro-batch."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], seed: int) -> None:
        self.seed = seed
        self._at: tuple[int, int] = (0, 0)
        self._calls: dict[str, int] = {}
        inside = tuple(f"{name}." for name in blocks)
        self._hooks = [
            module.register_forward_pre_hook(self._beginning(name), prepend=True)
            for name, module in model.named_modules()
            if name and not name.startswith(inside)
        ]
        self._drawn = self._passed = False
        self.watching = True
        """True until the first step is over: before that `settle` and `close_if_unused` have something to do."""

    def begin(self, step: int, micro: int) -> None:
        """A forward pass of micro-batch `micro` of a step comes next."""
        seeds.set_step_stream(self.seed, step, micro)
        if self._hooks:
            self._at, self._calls = (step, micro), {}
        if self.watching:
            self._state = torch.get_rng_state()

    def settle(self) -> None:
        """A forward pass is over. A model that has drawn nothing in its first step needs no streams by module."""
        if self.watching:
            self._passed = True
            self._note()

    def close_if_unused(self) -> None:
        """A step is over: the first, if this worker had samples in it."""
        if not self._passed:
            return
        if self.watching and not self._drawn:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        self.watching = False

    def _note(self) -> None:
        self._drawn = self._drawn or not torch.equal(self._state, torch.get_rng_state())

    def _beginning(self, name: str) -> Callable[[nn.Module, Any], None]:
        def begin(module: nn.Module, inputs: Any) -> None:
            del inputs
            if not module.training:
                return
            if self.watching:
                self._note()
            calls = self._calls[name] = self._calls.get(name, 0) + 1
            seeds.set_stream(self.seed, "step", *self._at, name, calls)
            if self.watching:
                self._state = torch.get_rng_state()

        return begin
