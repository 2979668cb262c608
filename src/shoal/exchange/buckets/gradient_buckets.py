"""Gradients as they arrive: fills the buckets, counts what is missing, sends what is full."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from time import perf_counter, perf_counter_ns
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.errors import ConfigError
from shoal.exchange.local_tensor import local, local_gradient
from shoal.report.spans import SpanKind, Spans
from shoal.world.buckets import Bucket
from shoal.world.world import Handle

_BUCKET = int(SpanKind.BUCKET)


class Carrier(Protocol):
    """An exchange as `GradientBuckets` uses it."""

    waited: float
    spans: Spans

    def gradient_vector(self, bucket: Bucket) -> torch.Tensor: ...
    def send(self, bucket: Bucket, vector: torch.Tensor) -> Handle: ...
    def settle(self) -> None: ...


class GradientBuckets:
    """The gradients of one step. A hook on every parameter brings them in.

    Autograd makes a fresh gradient, the hook copies it into the bucket and lets go of it: one read and one write,
    where accumulating into a prepared view would also need zeroing and another read.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], carrier: Carrier
    ) -> None:
        self._parameters = parameters
        self._buckets = buckets
        self._carrier = carrier
        self.names = [place.name for bucket in buckets for place in bucket.places]
        self._index = {name: i for i, name in enumerate(self.names)}
        self.used = [False] * len(self.names)
        """Which parameters had a gradient in this step: on this rank, and after `finish` on any."""
        self._filled = list(self.used)
        self._arrived = list(self.used)
        self._missing = [len(b.places) for b in buckets]
        self._vectors: list[torch.Tensor | None] = [None] * len(buckets)
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._handles: list[Handle] = []
        self._sent: list[tuple[int, int]] = []
        """The number of each bucket under way, and when it was sent."""
        self._next = 0
        self._reduce = False
        self._counts = True
        self._open = False
        self._hooks = [
            self._watch(bucket, slot, place.name)
            for bucket in buckets
            for slot, place in enumerate(bucket.places)
        ]

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def abandon(self) -> None:
        """Forget the step: nobody waits any more for what was sent."""
        self.close()
        self._open = False
        self._handles = []
        self._sent = []
        for parameter in self._parameters.values():
            parameter.grad = None

    def used_name(self, name: str) -> bool:
        return self.used[self._index[name]]

    def use(self, name: str) -> None:
        """This parameter has a gradient, though no backward pass has brought one."""
        self.used[self._index[name]] = True

    def forget(self, names: Collection[str]) -> None:
        """These parameters have no gradient, though a backward pass has brought one."""
        self.used = [flag and name not in names for name, flag in zip(self.names, self.used, strict=True)]

    @property
    def bits(self) -> str:
        """`used` as a hexadecimal number, the first parameter its lowest bit."""
        return f"{sum(1 << index for index, flag in enumerate(self.used) if flag):x}"

    @bits.setter
    def bits(self, text: str) -> None:
        number = int(text, 16)
        self.used = [bool(number >> index & 1) for index in range(len(self.used))]

    def drop_strays(self) -> None:
        """Another run's loss, or the user, may have gone back through this model between two steps."""
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad = None

    def open_step(self) -> None:
        self.used = [False] * len(self.used)
        self._filled = [False] * len(self.used)

    def open_micro_batch(self, reduce: bool, counts: bool = True) -> None:
        """`counts`: whether what gets a gradient now has been used; a filler uses nothing."""
        if self._handles:  # the previous micro-batch was reduced too: its vectors must be free again
            begun = perf_counter()
            self.wait()
            self._carrier.waited += perf_counter() - begun
            self._filled = [False] * len(self.used)
        self._arrived = [False] * len(self.used)
        self._missing = [len(b.places) for b in self._buckets]
        self._next = 0
        self._reduce = reduce
        self._counts = counts
        self._open = True

    def close_micro_batch(self) -> None:
        """Send what backward left incomplete: parameters without a gradient here count as zero."""
        self._open = False
        # The rest in layout order too. A bucket for which this rank has nothing is sent as zeros: others wait for its
        # part.
        while self._reduce and self._next < len(self._buckets):
            self._send(self._buckets[self._next])

    def take_all(self) -> None:
        """Bring in the gradients that lie at the parameters already."""
        for bucket in self._buckets:
            for slot, place in enumerate(bucket.places):
                self._arrived_at(bucket, slot, place.name, self._parameters[place.name])

    def wait(self) -> None:
        """Until every bucket that was sent has been reduced."""
        spans = self._carrier.spans
        for handle, (bucket, sent) in zip(self._handles, self._sent, strict=True):
            handle.wait()
            spans.add(_BUCKET, sent, perf_counter_ns(), bucket)
        if self._handles:
            self._carrier.settle()
        self._handles = []
        self._sent = []

    def _watch(self, bucket: Bucket, slot: int, name: str) -> RemovableHandle:
        # A hook lives as long as its parameter. It must not keep us alive with it, and gradients that somebody
        # else's backward pass brings are not for us.
        watcher = weakref.ref(self)

        def arrived(parameter: torch.Tensor) -> None:
            owner = watcher()
            if owner is not None and owner._open:
                owner._arrived_at(bucket, slot, name, parameter)

        parameter = self._parameters[name]
        hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        return hook

    def _arrived_at(self, bucket: Bucket, slot: int, name: str, parameter: torch.Tensor) -> None:
        gradient = local_gradient(parameter)
        parameter.grad = None
        if gradient is None:
            return
        # The sum is under way: whether it still sees what is added here would be a matter of timing.
        if self._reduce and bucket.index < self._next:
            raise ConfigError(
                f"parameter '{name}' got a second gradient after its bucket had left; does the model use "
                "reentrant checkpointing? Use torch.utils.checkpoint with use_reentrant=False."
            )
        index = self._index[name]
        view = self._slots(bucket)[slot]
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if self._filled[index]:
            # Later micro-batches, and parameters used twice with retained graphs, add to what is there.
            view.add_(dense)
        else:
            view.copy_(dense)
        self._filled[index] = True
        self.used[index] = self.used[index] or self._counts
        if not self._arrived[index]:
            self._arrived[index] = True
            # Once for each parameter, however often it gets a gradient in this micro-batch.
            self._missing[bucket.index] -= 1
        # In the order of the layout, not of arrival: collectives of a group start in one order on all ranks.
        while self._reduce and self._next < len(self._buckets) and self._missing[self._next] == 0:
            self._send(self._buckets[self._next])

    def _slots(self, bucket: Bucket) -> list[torch.Tensor]:
        """Views of the bucket's current vector, one per parameter."""
        vector = self._vectors[bucket.index]
        if vector is None:
            vector = self._vectors[bucket.index] = self._carrier.gradient_vector(bucket)
        # zero2 hands out a few vectors in turn: making views anew for each would cost more than small copies.
        key = (bucket.index, vector.data_ptr())
        if key not in self._views:
            self._views[key] = [
                vector[p.start : p.start + p.numel].view(local(self._parameters[p.name]).shape)
                for p in bucket.places
            ]
        return self._views[key]

    def _send(self, bucket: Bucket) -> None:
        slots = self._slots(bucket)
        for slot, place in enumerate(bucket.places):
            # Vectors are not zeroed before backward, so what no gradient has overwritten is of an earlier step.
            if not self._filled[self._index[place.name]]:
                slots[slot].zero_()
        vector = self._vectors[bucket.index]
        assert vector is not None
        self._vectors[bucket.index] = None
        self._next = bucket.index + 1
        self._sent.append((bucket.index & 0xFFFF, perf_counter_ns()))
        self._handles.append(self._carrier.send(bucket, vector))
