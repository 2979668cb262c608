"""Values on their way from servers: asked for when a step begins, and waited for by the layer that needs them.

The values of first layers are asked for first. They come while this worker computes its forward pass, and each module
whose parameters are still missing waits when it is called. Where they would have to be read from outside of a forward
pass, somebody calls `complete` first.

The first forward pass is watched (first_use.py): until then, everything is waited for at once. What is not used there,
or is used outside of the model's own call, is waited for when the model is called, and whatever is left at its end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.exchange.ps_worker.bucket_shards import Shard
from shoal.exchange.ps_worker.first_use import FirstUse
from shoal.server.client.requests import Request
from shoal.torch_private import is_compiled

Receive = Callable[[Shard, Request, Mapping[str, object]], None]


class Incoming:
    """What one worker waits for. `receive` puts the values of a shard where they belong."""

    def __init__(
        self, model: nn.Module, trained: Mapping[str, nn.Parameter], shards: Sequence[Shard], receive: Receive
    ) -> None:
        self._model = model
        self._trained = trained
        self._receive = receive
        self.order = list(reversed(shards))
        """As the forward pass needs them; at first a guess, for buckets begin with the last layer."""
        self._coming: dict[int, tuple[Shard, Request, Mapping[str, object]]] = {}
        self._watch: FirstUse | None = None
        self._hooks: list[RemovableHandle] = []
        self.guarded = False
        """Whether modules wait for what they need: values may come while the model runs."""
        # Without hooks nobody could wait inside of the model.
        self._may_wait = not _is_compiled(model)
        self.came: Counter[str] = Counter()
        """How often a value of each parameter has come, which torch counts as a change in place."""

    def expect(self, requests: Mapping[int, Request], args: Mapping[str, object], later: bool) -> None:
        """Values that have been asked for, by the numbers of their shards; without `later`, they come now."""
        self._coming = {
            shard.number: (shard, requests[shard.number], args)
            for shard in self.order
            if shard.number in requests
        }
        if not (later and self.guarded):
            self.complete()
        if later and not self.guarded and self._watch is None and self._may_wait:
            self._begin_watching()

    def complete(self) -> bool:
        """Until all that was asked for is here; False if there was nothing."""
        found = bool(self._coming)
        self._take(list(self._coming))
        return found

    def _take(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in self._coming:
                shard, request, args = self._coming.pop(number)
                self._receive(shard, request, args)
                # If a value was used before it had come, after all, backward says so instead of being wrong.
                names = [piece.name for piece in shard.pieces]
                torch.autograd.graph.increment_version([self._trained[name] for name in names])
                self.came.update(names)

    # Hooks that wait.

    def _begin_watching(self) -> None:
        names = {parameter: name for name, parameter in self._trained.items()}
        self._watch = FirstUse(self._model, names)
        me = weakref.ref(self)

        def begin(module: nn.Module, inputs: object) -> None:
            del inputs
            owner = me()
            if owner is not None and owner._watch is not None and module.training:
                owner._watch.__enter__()

        def end(module: nn.Module, inputs: object, output: object) -> None:
            del inputs, output
            owner = me()
            if owner is not None and owner._watch is not None and module.training:
                owner._guard()

        self._hooks = [
            self._model.register_forward_pre_hook(begin, prepend=True),
            self._model.register_forward_hook(end, always_call=True),
        ]

    def _guard(self) -> None:
        """The pass is over: from now on, modules wait for what they need."""
        watch = self._watch
        self._watch = None
        assert watch is not None
        watch.stop()
        for hook in self._hooks:
            hook.remove()
        turns: dict[int, int] = {}
        self._hooks = []
        for turn, (name, parameters) in enumerate(watch.guards().items()):
            wanted = set(parameters)
            needed = [s.number for s in self.order if any(piece.name in wanted for piece in s.pieces)]
            for number in needed:
                turns.setdefault(number, turn)
            if needed:
                module = self._model.get_submodule(name)
                self._hooks.append(module.register_forward_pre_hook(self._waiting(needed), prepend=True))
        self._hooks.append(self._model.register_forward_hook(self._finishing(), always_call=True))
        # Ask in the order of first use. What no single module waits for is needed when the model is called: first of
        # all.
        self.order.sort(key=lambda shard: turns.get(shard.number, 0))
        self.guarded = True

    def _waiting(self, numbers: Sequence[int]) -> Callable[[nn.Module, object], None]:
        # A hook lives as long as its module, and must not keep us alive with it.
        me = weakref.ref(self)

        def wait(module: nn.Module, inputs: object) -> None:
            del module, inputs
            owner = me()
            if owner is not None and owner._coming:
                owner._take(numbers)

        return wait

    def _finishing(self) -> Callable[[nn.Module, object, object], None]:
        me = weakref.ref(self)

        def finish(module: nn.Module, _: object, __: object) -> None:
            del module
            owner = me()
            if owner is not None:
                owner.complete()

        return finish


def _is_compiled(model: nn.Module) -> bool:
    """Whether a compiler has taken modules over: it calls no hooks that it has not seen."""
    return any(
        is_compiled(module) or getattr(module.__dict__.get("forward"), "is_compiled", False)
        for module in model.modules()
    )
