"""The c10d backend "shoal": shared memory where the ranks of a group are on one host, else gloo.

`register_backend()` once, then `dist.init_process_group("shoal", …)` or `dist.new_group(backend="shoal")`.
DDP, FSDP2 and DTensor run on it as they are. Only the first of the two is a `SharedMemoryGroup`.

This file translates c10d's calls into `collectives`; `work` drives them, `flags` waits, `memory` holds the
bytes.
"""

# torch declares several signatures per method; `collective` brings all of them into one.
# mypy: disable-error-code="override"

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, ReduceOp, Work

from shoal.torch_private import PrefixStore, Store, admit, c10d, profiler_enabled, untraced
from shoal.world.gloo import FromAnySource, Pairs, gloo_backend
from shoal.world.launch import from_environment
from shoal.world.rendezvous import in_attempt
from shoal.world.shm import sparse
from shoal.world.shm.calls import Refused, kind_of, word_of
from shoal.world.shm.collectives import Staging, line_bytes, pieces, region_bytes
from shoal.world.shm.flags import Flags, supported
from shoal.world.shm.flatten import Batch, as_bytes, check_list, check_parts, cut, numbers
from shoal.world.shm.local_group import NOT_PROFILED, LocalGroup, profiled
from shoal.world.shm.mailboxes import Mailboxes, mailbox_bytes
from shoal.world.shm.memory import SharedMemoryUnavailable, SharedRegion, host_key
from shoal.world.shm.monitored import monitored_barrier
from shoal.world.shm.reductions import SUM, reduction
from shoal.world.shm.short_forms import Options, collective
from shoal.world.shm.work import Driver, SharedWork

NAME = "shoal"


class _Options(Protocol):
    """What all of c10d's option structs have."""

    asyncOp: bool
    timeout: timedelta


class _ReduceOptions(_Options, Protocol):
    reduceOp: ReduceOp


class _RootOptions(_Options, Protocol):
    rootRank: int


class _ReduceRootOptions(_ReduceOptions, _RootOptions, Protocol):
    pass


_ALL_REDUCE = kind_of("all_reduce")
_ALL_REDUCE_COALESCED = kind_of("all_reduce_coalesced")
_SPARSE_ALL_REDUCE = kind_of("sparse_all_reduce")
_REDUCE = kind_of("reduce")
_REDUCE_SCATTER = kind_of("reduce_scatter")
_REDUCE_PARTS = kind_of("reduce_parts")
_BROADCAST = kind_of("broadcast")
_ALL_GATHER = kind_of("all_gather")
_GATHER = kind_of("gather")
_SCATTER = kind_of("scatter")
_ALL_TO_ALL = kind_of("all_to_all")
_UNEVEN_ALL_TO_ALL = kind_of("all_to_all of uneven parts")
_BARRIER = kind_of("barrier")
_REFUSED = kind_of("a call that it refused")

_KEPT = 64
_KEPT_BYTES = 4096
"""So many collectives of so few bytes are kept after their end: DDP's join hands one to C++, which does not keep the
part of it that is written in Python, and asks for the result one pass later."""


@untraced
class SharedMemoryGroup(LocalGroup):
    """A group of ranks on one host. Making it raises `SharedMemoryUnavailable` on all ranks or on none."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(NAME, rank, size)
        boxes, line = mailbox_bytes(size), line_bytes(size)
        # One region for everything: one descriptor, one mapping, one agreement on whether there is memory.
        region = SharedRegion.create(store, "staging", rank, size, region_bytes(size) + boxes, line + boxes)
        self._ops = Staging(region, rank, size)
        self._flags = Flags(region, rank, size)
        self._driver = Driver(self._flags, timeout.total_seconds(), f"shoal-group-{rank}")
        self._mail = Mailboxes(region, region_bytes(size), rank, size)
        self._pairs = Pairs(store, rank, timeout)
        self._kept: deque[Work] = deque(maxlen=_KEPT)
        self.under_way = 0
        """Which error has come from a collective that had begun: of other errors peers have not heard."""

    def set_timeout(self, timeout: timedelta) -> None:
        """How long collectives that are issued from now on may wait, if their call says nothing else."""
        self._driver.timeout = timeout.total_seconds()
        self._pairs.timeout = timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._flags.calls

    def shutdown(self) -> None:
        self._driver.close()
        self._pairs.close()

    def abort(self) -> None:
        self._driver.abort()
        self._pairs.close()

    # Reductions

    @collective(1, "op", "timeout", wrapped=[0])
    def allreduce(self, tensors: list[Tensor], opts: _ReduceOptions) -> Work:
        return self._all_reduce("all_reduce", _ALL_REDUCE, tensors, opts)

    @collective(1)
    def allreduce_coalesced(self, tensors: list[Tensor], opts: _ReduceOptions) -> Work:
        return self._all_reduce("all_reduce_coalesced", _ALL_REDUCE_COALESCED, tensors, opts)

    def _all_reduce(self, name: str, kind: int, tensors: list[Tensor], opts: _ReduceOptions) -> Work:
        op = reduction(opts.reduceOp, tensors)
        batch = Batch()
        if tensors and tensors[0].layout is torch.sparse_coo:
            return self._sparse_all_reduce(tensors, opts)
        for tensor in tensors:
            batch.add(self._ops.all_reduce(batch.numbers(tensor), op), tensor.nbytes)
        return self._submit(name, batch, word_of(kind, tensors, op.number), tensors, opts)

    def _sparse_all_reduce(self, tensors: list[Tensor], opts: _ReduceOptions) -> Work:
        op = reduction(opts.reduceOp, tensors)
        if op is not SUM:
            raise Refused("a sparse all_reduce can only SUM; pass tensor.to_dense() for other reductions.")
        if any(tensor.layout is not torch.sparse_coo or not tensor.is_cpu for tensor in tensors):
            raise Refused("a sparse all_reduce got tensors that are not all sparse_coo tensors of the host.")
        batch = Batch()
        for tensor in tensors:
            batch.add(sparse.all_reduce(self._ops, tensor), sys.maxsize)
        call = word_of(_SPARSE_ALL_REDUCE, tensors, op.number)
        return self._submit("sparse_all_reduce", batch, call, tensors, opts)

    @collective(1, "root", "op", "timeout", wrapped=[0])
    def reduce(self, tensors: list[Tensor], opts: _ReduceRootOptions) -> Work:
        op = reduction(opts.reduceOp, tensors)
        root = self._root(opts)
        batch = Batch()
        for tensor in tensors:
            batch.add(self._ops.reduce(batch.numbers(tensor), root, op), tensor.nbytes)
        return self._submit("reduce", batch, word_of(_REDUCE, tensors, op.number, root), tensors, opts)

    @collective(2)
    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: _ReduceOptions
    ) -> Work:
        return self._reduce_scatter_tensors(outputs, inputs, opts)

    @collective(2, "op", "timeout")
    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: _ReduceOptions) -> Work:
        return self._reduce_scatter_tensors([output], [whole], opts)

    def _reduce_scatter_tensors(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: _ReduceOptions
    ) -> Work:
        op = reduction(opts.reduceOp, outputs)
        batch = Batch()
        for out, whole in zip(outputs, inputs, strict=True):
            check_parts("reduce_scatter", whole, out, self._size)
            # chunk of an empty tensor gives one part, whatever the number asked for.
            parts = numbers(whole).chunk(self._size) if whole.numel() else [numbers(whole)] * self._size
            batch.add(self._ops.reduce_scatter(batch.numbers(out), parts, op), out.nbytes)
        return self._submit(
            "reduce_scatter", batch, word_of(_REDUCE_SCATTER, outputs, op.number), outputs, opts
        )

    @collective(2, "op", "timeout", wrapped=[0])
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: _ReduceOptions) -> Work:
        op = reduction(opts.reduceOp, outputs)
        batch = Batch()
        for out, parts in zip(outputs, inputs, strict=True):
            check_list("reduce_scatter", parts, out, self._size)
            flat = [numbers(part) for part in parts]
            batch.add(self._ops.reduce_scatter(batch.numbers(out), flat, op), out.nbytes)
        return self._submit(
            "reduce_scatter", batch, word_of(_REDUCE_SCATTER, outputs, op.number), outputs, opts
        )

    def reduce_parts(self, parts: Sequence[Tensor], out: Tensor) -> Work:
        """`out` = parts[0] + parts[1] + … in rank order, once every rank has called this.

        `parts[i]` is the same slice of rank i's buffer in a SharedRegion that all ranks see; calling says
        "mine is written". `out` may be one of them. All tensors are flat and contiguous. Returning does not
        mean that the others have read this rank's part: a collective before the next write sees to that.
        """
        batch = Batch()
        batch.add(self._ops.reduce_parts(parts, out), out.nbytes)
        # An empty slice, to compare the dtype only: slices may be of other sizes on other ranks.
        call = word_of(_REDUCE_PARTS, [out[:0]])
        return self._submit("reduce_parts", batch, call, [out], _ISSUED)

    # Movements

    @collective(1, "root", "timeout", wrapped=[0])
    def broadcast(self, tensors: list[Tensor], opts: _RootOptions) -> Work:
        root = self._root(opts)
        batch = Batch()
        for tensor in tensors:
            batch.add(self._ops.broadcast(batch.bytes(tensor), root), tensor.nbytes)
        return self._submit("broadcast", batch, word_of(_BROADCAST, tensors, root=root), tensors, opts)

    @collective(2, "timeout", wrapped=[1])
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Options) -> Work:
        return self._all_gather(outputs, inputs, opts)

    def _all_gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Options) -> Work:
        batch = Batch()
        for outs, tensor in zip(outputs, inputs, strict=True):
            check_list("all_gather", outs, tensor, self._size, self._rank)
            most = max(out.nbytes for out in outs)
            batch.add(self._ops.gather([batch.bytes(out) for out in outs], as_bytes(tensor), most), most)
        results = [out for outs in outputs for out in outs]
        return self._submit("all_gather", batch, word_of(_ALL_GATHER, results), results, opts, inputs)

    @collective(2)
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Options) -> Work:
        # One list for each rank, where all_gather has one for each tensor.
        if len(outputs) != self._size or any(len(outs) != len(inputs) for outs in outputs):
            raise Refused(
                f"all_gather_coalesced of {len(inputs)} tensors got lists of {[len(outs) for outs in outputs]}; "
                f"it needs {self._size} lists, one for each rank, of {len(inputs)} tensors."
            )
        return self._all_gather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    @collective(2)
    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: _Options
    ) -> Work:
        return self._all_gather_tensors(outputs, inputs, opts)

    @collective(2, "timeout")
    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: _Options) -> Work:
        return self._all_gather_tensors([output], [tensor], opts)

    def _all_gather_tensors(self, outputs: list[Tensor], inputs: list[Tensor], opts: _Options) -> Work:
        batch = Batch()
        for out, tensor in zip(outputs, inputs, strict=True):
            check_parts("all_gather", out, tensor, self._size)
            flat = batch.bytes(out)
            slots = pieces(flat, tensor.nbytes) if tensor.nbytes else [flat] * self._size
            batch.add(self._ops.gather(slots, as_bytes(tensor), tensor.nbytes), tensor.nbytes)
        return self._submit("all_gather", batch, word_of(_ALL_GATHER, inputs), outputs, opts, inputs)

    @collective(2, "root", "timeout", wrapped=[1])
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _RootOptions) -> Work:
        root = self._root(opts)
        part = inputs[0]
        batch = Batch()
        mine = outputs[0] if self._rank == root else []
        if self._rank == root:
            check_list("gather", mine, part, self._size)
        slots = [batch.bytes(out) for out in mine]
        batch.add(self._ops.gather(slots, as_bytes(part), part.nbytes), part.nbytes)
        return self._submit("gather", batch, word_of(_GATHER, inputs, root=root), mine, opts, inputs)

    @collective(2, "root", "timeout", wrapped=[0])
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: _RootOptions) -> Work:
        root = self._root(opts)
        out = outputs[0]
        batch = Batch()
        if self._rank == root:
            check_list("scatter", inputs[0], out, self._size)
        parts = [as_bytes(part) for part in inputs[0]] if self._rank == root else []
        batch.add(self._ops.scatter(batch.bytes(out), parts, root), out.nbytes)
        return self._submit("scatter", batch, word_of(_SCATTER, outputs, root=root), outputs, opts, parts)

    @collective(4, "timeout")
    def alltoall_base(
        self, output: Tensor, whole: Tensor, output_splits: list[int], input_splits: list[int], opts: _Options
    ) -> Work:
        uneven = bool(output_splits or input_splits)
        if output.dtype != whole.dtype or (not uneven and output.numel() != whole.numel()):
            raise Refused(
                f"all_to_all got {whole.numel()} {whole.dtype} to send and {output.numel()} {output.dtype} to receive "
                "into; they must be of one type, and of one size without split sizes."
            )
        batch = Batch()
        outs = cut(batch.bytes(output), output, output_splits, self._size)
        ins = cut(as_bytes(whole), whole, input_splits, self._size)
        most = ins[0].numel() if not uneven else sys.maxsize
        batch.add(self._ops.all_to_all(outs, ins, uneven), most)
        kind = _UNEVEN_ALL_TO_ALL if uneven else _ALL_TO_ALL
        call = word_of(kind, [whole[:0] if uneven else whole])
        return self._submit("all_to_all", batch, call, [output], opts, [whole])

    @collective(2, "timeout")
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: _Options) -> Work:
        check_list("all_to_all", inputs, outputs[min(self._rank, len(outputs) - 1)], self._size, self._rank)
        check_list("all_to_all", outputs, inputs[self._rank], self._size, self._rank)
        batch = Batch()
        outs = [batch.bytes(out) for out in outputs]
        batch.add(self._ops.all_to_all(outs, [as_bytes(part) for part in inputs], uneven=True), sys.maxsize)
        call = word_of(_UNEVEN_ALL_TO_ALL, [outputs[0][:0]])
        return self._submit("all_to_all", batch, call, outputs, opts, inputs)

    @collective(0, "timeout")
    def barrier(self, opts: _Options) -> Work:
        batch = Batch()
        batch.add(self._ops.barrier(), 0)
        return self._submit("barrier", batch, word_of(_BARRIER, []), [], opts, timeout=opts.timeout)

    def compare(self, call: int) -> Work:
        """A barrier of those who have come to this call, which has a word; a mismatch for all if others came too."""
        batch = Batch()
        batch.add(self._ops.barrier(), 0)
        return self._submit("compare", batch, call, [], _ISSUED)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called this; else rank 0 names the first that has not, or all of them."""
        seconds = self._driver.timeout if timeout is None else timeout.total_seconds()
        monitored_barrier(self._flags, seconds, wait_all_ranks)

    # Messages

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        self._mail.announce(peer, tag)
        with profiled("send", tensors):
            return self._pairs.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        self._mail.claim(peer, tag)
        with profiled("recv", tensors):
            return self._pairs.recv(tensors, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        def look() -> int | None:
            self._flags.check_alive("recv from any source")
            return self._mail.claim_any(tag)

        with profiled("recvAnySource", tensors):
            return FromAnySource(self._pairs, tensors, tag, look)

    # The names that newer versions of torch call
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def announce_refusal(self) -> None:
        """This rank has refused a call before it began: tell those who have begun theirs. All may have refused."""
        work = SharedWork(self._driver, "refused", _REFUSED, iter(()), [], [])
        self._driver.issue(work, one_round=True)

    def _root(self, opts: _RootOptions) -> int:
        root = opts.rootRank
        if 0 <= root < self._size:
            return root
        raise Refused(
            f"a collective got {root} as its root; the ranks of its group are 0 to {self._size - 1}."
        )

    def _submit(
        self,
        name: str,
        batch: Batch,
        call: int,
        results: Sequence[Tensor],
        opts: _Options,
        shown: Sequence[Tensor] = (),
        timeout: timedelta | None = None,
    ) -> Work:
        if timeout is None and isinstance(opts, Options):
            timeout = opts.timeout
        seconds = timeout.total_seconds() if timeout is not None and timeout > _NO_TIME else None
        work = SharedWork(self._driver, name, call, batch.rounds(), results, batch.after, seconds)
        try:
            with profiled(name, shown or results) if profiler_enabled() else NOT_PROFILED:
                if not opts.asyncOp:
                    self._driver.run(work)
                    return work
                self._driver.issue(work, batch.count == 1 and self._ops.is_one_round(batch.most))
        except Exception as error:
            self.under_way = id(error)  # not the error itself, which holds the caller's tensors
            raise
        if batch.most <= _KEPT_BYTES:
            self._kept.append(work)
        return work


_NO_TIME = timedelta(0)
_ISSUED = c10d.AllgatherOptions()
"""Options of a collective that goes on by itself."""


def create_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup | ProcessGroupGloo:
    """Shared memory if every rank is on this host and it can be had, else gloo; all ranks decide alike."""
    launch = from_environment()
    store = in_attempt(launch, store)
    # Who leaves a group and makes it anew, as notebooks and tests do, finds the store as the first one left it. All
    # ranks have made it equally often.
    store = PrefixStore(f"made{store.add(f'made by {rank}', 1)}", store)
    mine = host_key(launch.host) if supported() else f"rank {rank} on a CPU we cannot use"
    store.set(f"host{rank}", mine)
    if all(store.get(f"host{peer}").decode() == mine for peer in range(size)):
        try:
            return SharedMemoryGroup(store, rank, size, timeout)
        except SharedMemoryUnavailable as reason:
            if rank == 0:
                print(
                    f"shoal: no shared memory for a group of {size} workers, which needs "
                    f"{region_bytes(size)} bytes ({reason}); the group uses gloo, which is slower.",
                    file=sys.stderr,
                    flush=True,
                )
    return gloo_backend(store, rank, size, timeout)


def register_backend() -> None:
    """Make "shoal" a name that torch.distributed knows. May be called again."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_group, devices=["cpu"])
        admit(SharedMemoryGroup)
