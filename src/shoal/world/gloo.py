"""What gloo does for us: whole groups that span hosts, and messages between two ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as PairTimeout
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import DistBackendError, ProcessGroup, ProcessGroupGloo, Work

from shoal.torch_private import PrefixStore, Store, c10d, untraced, wrap_gloo


def gloo_backend(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Gloo as it is. A group written in Python around it would call it with the interpreter lock held, and gloo's
    threads take that lock when they drop a finished collective while holding gloo's own: the two would meet.
    """
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """A group of its own, outside of torch's list: it may be made on any thread, when and where it is needed.

    Gloo is wrapped as torch does it: the wrapper's methods run without the interpreter lock.
    """
    return wrap_gloo(store, rank, size, gloo_backend(store, rank, size, timeout))


def from_rank(source: int) -> c10d.BroadcastOptions:
    """The options of a broadcast from that rank."""
    options = c10d.BroadcastOptions()
    options.rootRank = source
    options.rootTensor = 0
    return options


_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 2e-3
"""Seconds between two looks at whether anybody has sent something."""


class Pairs:
    """Messages between two ranks: one gloo group of two per pair that ever talks, made when first needed.

    Making it needs both ends, so it happens on a thread: a caller of `isend` must not wait for the other side
    to `recv`. Messages issued before the pair exists follow it in order.
    """

    def __init__(self, store: Store, rank: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self.timeout = timeout
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
                # Both ends have to name the group alike, whoever sends first.
                low, high = min(peer, self._rank), max(peer, self._rank)
                store = PrefixStore(f"pair{low}-{high}", self._store)
                self._pairs[peer] = _Pair(store, int(self._rank == high), self.timeout)
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
        # The caller may send itself only if nothing that was issued before still waits on the thread.
        if self._group.done() and (self._last is None or self._last.done()):
            issued: Future[Work] = Future()
            issued.set_result(call(self._group.result(), self._other))
        else:
            issued = self._last = self._threads.submit(lambda: call(self._group.result(), self._other))
        return _Message(issued, targets, flat)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@untraced
class _Message(Work):
    """A message that may still wait for its pair to be made."""

    def __init__(self, issued: Future[Work], targets: Sequence[Tensor], flat: Sequence[Tensor]) -> None:
        super().__init__()
        self._issued = issued
        self._targets = targets
        self._flat = flat

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            work = self._issued.result(timeout.total_seconds() or None)
        except PairTimeout:
            raise DistBackendError(
                f"a message has not found the other rank: Timed out waiting {timeout.total_seconds() * 1e3:.0f}ms."
            ) from None
        work.wait(timeout) if timeout else work.wait()
        for target, flat in zip(self._targets, self._flat, strict=True):
            if target.data_ptr() != flat.data_ptr():
                target.copy_(flat)
        return True

    def is_completed(self) -> bool:
        return self._issued.done() and self._issued.result().is_completed()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return _future_of(self, self._targets)


@untraced
class FromAnySource(Work):
    """A message from whichever rank sends one first: whose it is, is found out by whoever waits."""

    def __init__(
        self, pairs: Pairs, tensors: Sequence[Tensor], tag: int, look: Callable[[], int | None]
    ) -> None:
        """`look` gives a rank that has sent something, whose message is then this one's; None while nobody has."""
        super().__init__()
        self._pairs = pairs
        self._tensors = list(tensors)
        self._tag = tag
        self._look = look
        self._lock = threading.Lock()
        self._source = -1
        self._message: Work | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = (timeout or self._pairs.timeout).total_seconds()
        end = time.monotonic() + seconds
        pause = _SHORTEST_PAUSE
        while (message := self._found()) is None:
            if time.monotonic() > end:
                raise DistBackendError(
                    f"nobody has sent what is received from any source: Timed out waiting {seconds * 1e3:.0f}ms."
                )
            time.sleep(pause)
            # Polling: each pair is a group of its own, and several groups cannot be waited for together.
            pause = min(_LONGEST_PAUSE, 2 * pause)
        return message.wait(timeout)

    def is_completed(self) -> bool:
        message = self._found()
        return message is not None and message.is_completed()

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return _future_of(self, self._tensors)

    def _found(self) -> Work | None:
        with self._lock:
            if self._message is None and (source := self._look()) is not None:
                self._source = source
                self._message = self._pairs.recv(self._tensors, source, self._tag)
            return self._message


def _future_of(work: Work, results: Sequence[Tensor]) -> torch.futures.Future[list[Tensor]]:
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    def settle() -> None:
        try:
            work.wait()
            future.set_result(list(results))
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]

    threading.Thread(target=settle, daemon=True).start()
    return future
