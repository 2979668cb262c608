"""Reduce-scatters of gradients, in one order on every worker, while backward goes on.

FSDP2 hands a unit's gradients over when its backward is done, and on a CPU waits for their sum. Nobody needs it
before the update, so here it gets back memory in which the sum will be. Units leave in a fixed order, the last of
the forward pass first and the root at the end, even where their gradients become ready in another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from shoal.exchange.fsdp.all_gather import Gathers
from shoal.exchange.fsdp.units import Unit
from shoal.world.world import Handle, World


class Scatters:
    """The gradients of one step: which have come, which are under way, and their sums over the micro-batches."""

    def __init__(self, units: Sequence[Unit], gathers: Gathers, world: World, at_once: bool) -> None:
        self._gathers = gathers
        self._world = world
        self._root = units[-1]
        self._learning = {unit.name for unit in units if unit.learns}
        self._at_once = at_once
        """True if the sum must be there when FSDP2 gets it back, and stay where FSDP2 puts it."""
        self.sums: dict[str, torch.Tensor] = {}
        """After `settle`, this worker's rows of the summed gradients, by unit."""
        self._came: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._more: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._next = 0
        self._later: list[tuple[str, torch.Tensor]] = []
        self._busy: tuple[str, Handle, torch.Tensor] | None = None
        """The one unit under way: when backward is faster than the wire, it waits."""
        for unit in units:
            unit.module.set_custom_reduce_scatter(_Scatter(self, unit.name))  # type: ignore[arg-type]

    def came(self, name: str, out: torch.Tensor, whole: torch.Tensor) -> None:
        """A unit's gradients are complete; the sum of this worker's rows is to appear in `out`."""
        if self._at_once:
            self._world.reduce_scatter(out, whole).wait()
        elif name in self._came:
            self._more.append((name, out, whole))  # a module that ran twice gives its gradients twice
        else:
            self._came[name] = (out, whole)
            self._send_in_turn()

    def abandon(self) -> None:
        """Forget what has come and what is under way."""
        self._busy = None
        self._came = {}
        self._more = []
        self._later = []
        self._next = 0
        self.sums.clear()

    def reopen(self, world: World) -> None:
        """Sum among other members from now on."""
        self._world = world

    def make_room(self) -> None:
        """Wait for the unit under way, so that the next one's memory is the only one of its kind."""
        if self._busy is not None:
            self._gathers.reach_back(self._busy[0])  # or those we wait for might wait for us
            self._wait()

    def settle(self) -> None:
        """Wait for everything that a backward pass has brought, and add it to what earlier ones did."""
        if self._came:
            self._send_in_turn()
            # By name, because these too are collectives that every worker must start in one order.
            for name, out, whole in sorted(self._more, key=lambda entry: entry[0]):
                self._send(name, out, whole)
        self._wait()
        for name, out in self._later:
            self.sums[name].add_(out)
        self._came = {}
        self._more = []
        self._later = []
        self._next = 0

    def _send_in_turn(self) -> None:
        # Last unit first, since its gradients are ready first; the root at the end, whose parameters (such as tied
        # embeddings) may get gradients until then.
        everyone = [unit.name for unit in (*reversed(self._gathers.order), self._root)]
        turns = [name for name in everyone if name in self._learning]
        while self._next < len(turns) and turns[self._next] in self._came:
            name = turns[self._next]
            self._next += 1
            self._send(name, *self._came[name])
            # The name stays, to tell a second gradient; the first one must not stay in memory until `settle`.
            self._came[name] = (self._came[name][0], self._came[name][0].new_empty(0))

    def _send(self, name: str, out: torch.Tensor, whole: torch.Tensor) -> None:
        self.make_room()
        # `whole` is kept here: the collective reads it until its handle has been waited for.
        self._busy = (name, self._world.reduce_scatter(out, whole), whole)
        if name in self.sums:
            # Its sum is not in `out` before the handle has been waited for.
            self._later.append((name, out))
        else:
            self.sums[name] = out

    def _wait(self) -> None:
        if self._busy is not None:
            self._busy[1].wait()
        self._busy = None


class _Scatter:
    """What FSDP2 calls to reduce a unit."""

    def __init__(self, scatters: Scatters, name: str) -> None:
        self._scatters = scatters
        self._name = name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._scatters.make_room()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        del group, op, async_op
        self._scatters.came(self._name, output_tensor, input_tensor)
