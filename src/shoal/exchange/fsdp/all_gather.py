"""All-gathers of parameters, in one order on every worker.

FSDP2 gathers a unit when its forward begins. On a CPU it then waits, with nothing else under way; and a worker whose
samples skip a module does not gather it, while the others wait for it. Here every worker gathers every unit in each
pass, in an order that all agree on, one unit ahead of the computation. A unit that does not run here is gathered
when a later one begins, or at the end of the pass, for the others' sake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import torch
from torch import nn
from torch.distributed import ProcessGroup, Work

from shoal.errors import ConfigError
from shoal.exchange.fsdp.units import OwnParameters, Unit
from shoal.torch_private import collect_grad_tensors
from shoal.world.world import Handle, World

AHEAD = 1
"""Units that are fetched before the computation gets to them."""


def merge_orders(guess: Sequence[str], seen: Sequence[Sequence[str]]) -> list[str]:
    """One order that agrees with all that were seen, each of which may leave some out; else as guessed.

    >>> merge_orders("abcd", ["ca", "cd"])
    ['b', 'c', 'a', 'd']
    >>> merge_orders("ab", ["ab", "ba"])
    ['a', 'b']
    """
    before: dict[str, set[str]] = {name: set() for name in guess}
    for names in seen:
        for first, second in pairwise(names):
            before[second].add(first)
    order: list[str] = []
    while len(order) < len(guess):
        free = [name for name in guess if name not in order and before[name] <= set(order)]
        if not free:
            return list(guess)
        # A topological sort that takes the earliest of `guess` each time: every worker, given the same, gets the same.
        order.append(free[0])
    return order


@dataclass
class _Pass:
    """One forward pass, and the backward pass that belongs to it."""

    ran: set[str] = field(default_factory=set)
    """Units that ran here."""
    turned: bool = False
    """Whether its backward pass has begun."""


class Gathers:
    """The order of the units, and how far a pass has got in it."""

    def __init__(self, units: Sequence[Unit], world: World, again: bool) -> None:
        *inner, self._root = units
        self.order = list(inner)
        """Units other than the root in the order of the forward pass; at first a guess: as the model holds them."""
        self.seen: list[str] = []
        """The order in which they ran in the first pass."""
        self._again = again
        """True if units are gathered for the backward pass once more."""
        self._first_pass = True
        self._next = 0
        self._pass = _Pass()
        self._back = -1
        self._inside = False
        """Whether a forward pass is under way."""
        self._own = {unit.name: OwnParameters(unit) for unit in inner}
        for unit in units:
            unit.module.set_custom_all_gather(_Gather(world))  # type: ignore[arg-type]
        for unit in inner:
            module = _module(unit)
            # Before FSDP2's own hook, which would start and wait for the gather by itself; after ours it finds it done.
            module.register_forward_pre_hook(self._before(unit), prepend=True)
            module.register_forward_hook(self._after(unit), prepend=True)
        _module(self._root).register_forward_pre_hook(self._begin)
        _module(self._root).register_forward_hook(self._end, prepend=True)

    def reopen(self, world: World) -> None:
        """Gather among other members from now on, beginning with a new pass."""
        for unit in (*self.order, self._root):
            unit.module.set_custom_all_gather(_Gather(world))  # type: ignore[arg-type]
        self._next = 0
        self._pass = _Pass()
        self._back = -1

    def take_order(self, seen: Sequence[Sequence[str]]) -> None:
        """Follow the order that the workers have seen. Every worker calls it with the same."""
        # Different samples may take different ways through the model; one order must do for all workers.
        turns = merge_orders([unit.name for unit in self.order], seen)
        self.order.sort(key=lambda unit: turns.index(unit.name))

    def reach_back(self, name: str) -> None:
        """Fetch what another worker needs for the backward of this unit and of all after it."""
        places = {unit.name: place for place, unit in enumerate(self.order)}
        self._fetch_back(places.get(name, 0) - AHEAD)

    def close_backward(self) -> None:
        """Gather what others may have waited for, and let go of all that was not needed here."""
        self._fetch_back(0)
        self._back = -1
        # Nobody here computes with these, but a gather that is not waited for would stay under way, with its memory.
        for unit in self.order if self._again else ():
            _wait(unit)
            unit.reshard()

    # The forward pass

    def _begin(self, module: nn.Module, inputs: object) -> None:
        del module, inputs
        self._next = 0
        self._pass = _Pass()
        self._inside = True
        self._fetch(AHEAD)

    def _before(self, unit: Unit) -> Callable[[nn.Module, object], None]:
        def hook(module: nn.Module, inputs: object) -> None:
            del module, inputs
            self._own[unit.name].check()
            self._pass.ran.add(unit.name)
            if self._first_pass and unit.name not in self.seen:
                self.seen.append(unit.name)
            place = self.order.index(unit)
            self._fetch(place + 1)
            _wait(unit)  # before the next one is fetched, so that its memory is free again
            self._fetch(place + 1 + AHEAD)

        return hook

    def _after(self, unit: Unit) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            del module, inputs
            self._turn_at(output, self.order.index(unit))

        return hook

    def _end(self, module: nn.Module, inputs: object, output: object) -> None:
        del module, inputs
        # A gather is a collective: units that this worker skipped must be gathered too, or the others wait for it.
        self._fetch(len(self.order))
        for unit in self._missed(self._pass):
            _wait(unit)
            if self._again:
                unit.reshard()
        self._first_pass = self._inside = False
        self._turn_at(output, len(self.order))

    def _missed(self, here: _Pass) -> list[Unit]:
        return [unit for unit in self.order if unit.name not in here.ran]

    def _fetch(self, stop: int) -> None:
        for unit in self.order[self._next : stop]:
            _start(unit)
        # Never backwards: when a unit is called a second time, those after it are not fetched again.
        self._next = max(self._next, min(stop, len(self.order)))

    # The backward pass

    def _turn_at(self, output: object, place: int) -> None:
        """When the gradient of an output of the unit at `place` comes, fetch that unit and those ahead of it."""
        here = self._pass
        name = f"'{self.order[place].name}'" if place < len(self.order) else "the model"

        def arrived(gradient: torch.Tensor) -> torch.Tensor:
            if self._inside or torch.is_grad_enabled():
                raise ConfigError(
                    f"zero3 frees parameters between forward and backward, and {name} is differentiated inside of the "
                    "forward pass, or twice (create_graph=True); use zero2, or ddp."
                )
            # The output of the root is often that of its last unit, whose turn then comes first.
            if not here.turned:
                here.turned = True
                # Units that have not run here have no backward hook, and the others wait for their part of the sum.
                self._back = len(self.order)
                for unit in self._missed(here):
                    _give_zeros(unit)
            self._fetch_back(place)
            for unit in self.order[place : place + 1]:
                _wait(unit)
            self._fetch_back(place - AHEAD)
            return gradient

        for tensor in collect_grad_tensors(output):
            tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _fetch_back(self, stop: int) -> None:
        """Fetch down to place `stop`; nothing where units have stayed gathered since the forward pass."""
        stop = max(stop, 0)
        if self._again and stop < self._back:
            # Backward visits units from last to first. `_back` only falls, so each unit is fetched once a backward
            # pass.
            for unit in reversed(self.order[stop : self._back]):
                _start(unit)
            self._back = stop


class _Gather:
    """What FSDP2 calls to gather a unit."""

    def __init__(self, world: World) -> None:
        self._world = world

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        del group
        handle = self._world.all_gather(output_tensor, input_tensor)
        if not async_op:
            handle.wait()
            return None
        return handle if isinstance(handle, Work) else _Waiting(handle)


class _Waiting(Work):
    """A handle in the form that FSDP2 waits for."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        del timeout  # the group has its own
        self._handle.wait()
        return True


def _module(unit: Unit) -> nn.Module:
    assert isinstance(unit.module, nn.Module)
    return unit.module


def _start(unit: Unit) -> None:
    for group in unit.groups:
        group.unshard(async_op=True)  # nothing happens if it is gathered, or under way


def _wait(unit: Unit) -> None:
    for group in unit.groups:
        group.wait_for_unshard()


def _give_zeros(unit: Unit) -> None:
    """A unit that has not run here: its gradients are zero, and others wait for them."""
    for group in unit.groups:
        group.post_backward()
