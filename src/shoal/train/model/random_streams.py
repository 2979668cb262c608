"""Random streams by module: what dropout draws depends on the step, the micro-batch and the module, not on who draws.

So a module draws the same numbers in one process, in any worker and in any stage of a pipeline. Every module that
is not inside a block begins a stream of its own when it is called; a block is one unit, whatever it has inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shoal import seeds
from shoal.world.world import World


class RandomStreams:
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
        self.drawn = False
        """Whether a forward pass or the loss has drawn, as far as this worker has seen or been told."""
        self._state: list[torch.Tensor] | None = None
        """Where generators stood a moment ago; None before the first step."""
        self.watching = True
        """True until the first step is over: before that `settle` and `decide` have something to do."""

    def begin(self, step: int, micro: int) -> None:
        """A forward pass of micro-batch `micro` of a step comes next."""
        seeds.set_step_stream(self.seed, step, micro)
        if self._hooks:
            self._at = (step, micro)
            self._calls = {}
        if self.watching:
            self._state = _generators()

    def settle(self) -> None:
        """A forward pass is over. A model that has drawn nothing in its first step needs no streams by module."""
        if self.watching:
            self._note()

    def decide(self, world: World) -> None:
        """The first step is over, and everybody is here: streams by module stay if anybody has drawn.

        Under a parameter server a worker may find that others have computed all of a step: it goes on watching.
        """
        seen = world.gather_numbers([float(self.drawn), float(self._state is not None)]).any(0)
        if seen[1]:
            self.go_on(bool(seen[0]))

    @property
    def by_module(self) -> bool | None:
        """Whether modules have streams of their own; None before the first step. Part of a checkpoint."""
        return None if self.watching else self._decided

    def go_on(self, by_module: bool) -> None:
        """As it was decided, here or in the run that goes on now."""
        if not by_module:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        self.watching = False
        self.drawn = self.drawn or by_module
        self._decided = by_module

    def _note(self) -> None:
        if not self.drawn and self._state is not None:
            self.drawn = any(not torch.equal(a, b) for a, b in zip(self._state, _generators(), strict=True))

    def _beginning(self, name: str) -> Callable[[nn.Module, object], None]:
        def begin(module: nn.Module, inputs: object) -> None:
            del inputs
            if not module.training or (self.watching and self._state is None):
                return  # before the first step somebody may use the model, with numbers of their own
            if self.watching:
                self._note()
            calls = self._calls[name] = self._calls.get(name, 0) + 1
            seeds.set_stream(self.seed, "step", *self._at, name, calls)
            if self.watching:
                self._state = _generators()

        return begin


def _generators() -> list[torch.Tensor]:
    """Where the generators stand that modules draw from."""
    cards = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cards]
