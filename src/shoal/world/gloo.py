"""What gloo does for us: whole groups that span hosts, and messages between two ranks."""

# torch declares several signatures per method; a group written in Python is called by the first one only.
# mypy: disable-error-code="override"

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup, ProcessGroupGloo, ReduceOp, Work

from shoal.world.shm_ops import check_op, reduce_in_order


class _ReduceOptions(Protocol):
    reduceOp: ReduceOp


class GlooGroup(ProcessGroup):
    """Gloo, except for reduce-scatter: gloo's own is an all-reduce underneath and sends twice the bytes."""

    kind = "gloo"

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form for groups written in Python
        self._rank, self._size = rank, size
        cpu = torch.device("cpu")
        self._gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        self._register_backend(cpu, ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        return "shoal"

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: _ReduceOptions
    ) -> Work:
        check_op(opts.reduceOp)
        exchanges = [self._exchange(out, whole) for out, whole in zip(outputs, inputs, strict=True)]
        return _Scattered(exchanges, opts.reduceOp)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: _ReduceOptions) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [whole], opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: _ReduceOptions) -> Work:
        whole = [torch.cat([part.detach().reshape(-1) for part in parts]) for parts in inputs]
        return self.reduce_scatter_tensor_coalesced(outputs, whole, opts)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def _exchange(self, out: Tensor, whole: Tensor) -> _Exchange:
        flat = whole.detach().contiguous().view(-1)
        received = torch.empty_like(flat)
        work = super().alltoall_base(received, flat, [], [])
        return out.detach(), received.chunk(self._size) if flat.numel() else (), work, flat


_Exchange = tuple[Tensor, Sequence[Tensor], Work, Tensor]


class _Scattered(Work):
    """Pieces on their way to the rank that sums them."""

    def __init__(self, exchanges: list[_Exchange], op: ReduceOp) -> None:
        super().__init__()
        self._exchanges, self._op = exchanges, op
        self._results = [out for out, *_ in exchanges]
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._lock:
            for out, parts, work, _ in self._exchanges:
                work.wait(timeout) if timeout else work.wait()
                if parts:
                    total = torch.empty_like(parts[0])
                    reduce_in_order(self._op, parts, total, len(parts))
                    out.copy_(total.view(out.shape))
            self._exchanges = []
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for _, _, work, _ in self._exchanges)

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

        def settle() -> None:
            try:
                self.wait()
                future.set_result(self._results)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        threading.Thread(target=settle, daemon=True).start()
        return future


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
