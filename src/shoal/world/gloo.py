"""What gloo does for us: whole groups that span hosts, and messages between two ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work


def gloo_backend(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Gloo as it is. A group written in Python around it would call it with the interpreter lock held, and gloo's
    threads take that lock when they drop a finished collective while holding gloo's own: the two would meet.
    """
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """A group of its own, outside of torch's list: it may be made on any thread, when and where it is needed.

    Gloo is wrapped as torch does it: the wrapper's methods run without the interpreter lock.
    """
    group = ProcessGroup(store, rank, size)
    group._register_backend(
        torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo_backend(store, rank, size, timeout)
    )
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


_SUM, _GATHER, _TRADE = 1, 2, 3
"""Tags: of each kind, the messages of a pair arrive in the order in which they were sent."""


def trade(
    group: ProcessGroup, rank: int, gets: Sequence[Tensor], gives: Sequence[Tensor], tag: int
) -> list[Work]:
    """Every rank gives one tensor to each other, and gets one.

    Receiving comes first. A receiver tells gloo's sender that it is ready on the same connection, behind all that is
    being sent there; told later, the two directions take turns, and everything takes twice as long. Gloo's own
    all-to-all, all-gather and broadcasts do that as chance will have it.
    """
    size = len(gets)
    others = [(rank + step) % size for step in range(1, size)]  # not all to the same one at once
    got = [group.recv([gets[other]], other, tag) for other in reversed(others)]
    return got + [group.send([gives[other]], other, tag) for other in others]


class Traded:
    """An all-to-all: slice r of `whole` goes to rank r."""

    def __init__(self, group: ProcessGroup, out: Tensor, whole: Tensor, rank: int, size: int) -> None:
        gets, self._gives = out.chunk(size), whole.chunk(size)
        gets[rank].copy_(self._gives[rank])
        self._works = trade(group, rank, gets, self._gives, _TRADE) if out.numel() else []

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class ScatteredSum:
    """A reduce-scatter by all-to-all and a sum in rank order: gloo's own sends twice the bytes, and its order of
    summing depends on where an element lies.
    """

    def __init__(self, group: ProcessGroup, out: Tensor, whole: Tensor, rank: int, size: int) -> None:
        self._out = out
        self._whole = whole  # must live until it is sent
        gives, self._parts = whole.chunk(size), torch.empty_like(whole).chunk(size)
        self._parts[rank].copy_(gives[rank])  # where it lies may be where the sum is to be
        self._works = trade(group, rank, self._parts, gives, _SUM)

    def wait(self) -> None:
        if not self._parts:
            return  # done before
        for work in self._works:
            work.wait()
        torch.add(self._parts[0], self._parts[1], out=self._out)
        for part in self._parts[2:]:
            self._out.add_(part)
        self._parts = ()
        self._whole = self._out  # what was received and sent can go


class GatheredParts:
    """An all-gather, straight into place: gloo's own copies everything twice."""

    def __init__(self, group: ProcessGroup, places: Sequence[Tensor], part: Tensor, rank: int) -> None:
        if places[rank].data_ptr() != part.data_ptr():
            places[rank].copy_(part)
        self._works = trade(group, rank, places, [places[rank]] * len(places), _GATHER)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def from_rank(source: int) -> BroadcastOptions:
    """The options of a broadcast from that rank."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    return options


class Pairs:
    """Messages between two ranks: one gloo group of two per pair that ever talks, made when first needed.

    Making it needs both ends, so it happens on a thread: a caller of `isend` must not wait for the other side
    to `recv`. Messages issued before the pair exists follow it in order.
    """

    def __init__(self, store: Store, rank: int, timeout: timedelta) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._pairs: dict[int, _Pair] = {}
        self._lock = threading.Lock()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        flat = [tensor.detach().contiguous() for tensor in tensors]
        return self._pair(peer).issue(lambda group, other: group.send(flat, other, tag), (), ())

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        targets = [tensor.detach() for tensor in tensors]
        flat = [target.contiguous() for target in targets]
        return self._pair(peer).issue(lambda group, other: group.recv(flat, other, tag), targets, flat)

    def close(self) -> None:
        with self._lock:
            for pair in self._pairs.values():
                pair.close()
            self._pairs.clear()

    def _pair(self, peer: int) -> _Pair:
        with self._lock:
            if peer not in self._pairs:
                low, high = min(peer, self._rank), max(peer, self._rank)
                store = PrefixStore(f"pair{low}-{high}", self._store)
                self._pairs[peer] = _Pair(store, int(self._rank == high), self._timeout)
            return self._pairs[peer]


class _Messenger(Protocol):
    """The methods of ProcessGroupGloo that torch's declarations leave out."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...


def _messenger(store: Store, rank: int, timeout: timedelta) -> _Messenger:
    return cast(_Messenger, ProcessGroupGloo(store, rank, 2, timeout))


class _Pair:
    def __init__(self, store: Store, rank: int, timeout: timedelta) -> None:
        self._other = 1 - rank
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="shoal-pair")
        self._group: Future[_Messenger] = self._threads.submit(_messenger, store, rank, timeout)
        self._last: Future[Work] | None = None

    def issue(
        self, call: Callable[[_Messenger, int], Work], targets: Sequence[Tensor], flat: Sequence[Tensor]
    ) -> Work:
        if self._group.done() and (self._last is None or self._last.done()):
            issued: Future[Work] = Future()
            issued.set_result(call(self._group.result(), self._other))
        else:
            issued = self._last = self._threads.submit(lambda: call(self._group.result(), self._other))
        return _Message(issued, targets, flat)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Message(Work):
    """A message that may still wait for its pair to be made."""

    def __init__(self, issued: Future[Work], targets: Sequence[Tensor], flat: Sequence[Tensor]) -> None:
        super().__init__()
        self._issued, self._targets, self._flat = issued, targets, flat

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        work = self._issued.result()
        work.wait(timeout) if timeout else work.wait()
        for target, flat in zip(self._targets, self._flat, strict=True):
            if target.data_ptr() != flat.data_ptr():
                target.copy_(flat)
        return True

    def is_completed(self) -> bool:
        return self._issued.done() and self._issued.result().is_completed()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

        def settle() -> None:
            try:
                self.wait()
                future.set_result(list(self._targets))
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        threading.Thread(target=settle, daemon=True).start()
        return future
