"""The c10d backend "shoal": shared memory where the ranks of a group are on one host, else gloo.

`register_backend()` once, then `dist.init_process_group("shoal", …)` or `dist.new_group(backend="shoal")`.
DDP, FSDP2 and DTensor run on it as they are. Only the first of the two is a `SharedMemoryGroup`.

This file translates c10d's calls into `shm_ops`; `shm_work` drives them, `flags` waits, `memory` holds the
bytes.
"""

# torch declares several signatures per method; a group written in Python is called by the first one only.
# mypy: disable-error-code="override"

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, ProcessGroupGloo, ReduceOp, Work

from shoal.world.flags import Flags, supported
from shoal.world.gloo import Pairs, gloo_backend
from shoal.world.launch import from_environment
from shoal.world.memory import SharedMemoryUnavailable, SharedRegion, host_key
from shoal.world.reduce import check_op
from shoal.world.shm_flat import Batch, as_bytes, cut, numbers
from shoal.world.shm_ops import Staging, line_bytes, pieces, region_bytes
from shoal.world.shm_work import Driver, SharedWork

NAME = "shoal"


class _Options(Protocol):
    """What all of c10d's option structs have."""

    asyncOp: bool


class _ReduceOptions(_Options, Protocol):
    reduceOp: ReduceOp


class _RootOptions(_Options, Protocol):
    rootRank: int


class _ReduceRootOptions(_ReduceOptions, _RootOptions, Protocol):
    pass


class SharedMemoryGroup(ProcessGroup):
    """A group of ranks on one host. Making it raises `SharedMemoryUnavailable` on all ranks or on none."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form for groups written in Python
        self._rank, self._size = rank, size
        self._name = self._description = ""
        region = SharedRegion.create(store, "staging", rank, size, region_bytes(size), line_bytes(size))
        self._ops = Staging(region, rank, size)
        self._driver = Driver(Flags(region, rank, size, timeout.total_seconds()), f"shoal-group-{rank}")
        self._pairs = Pairs(store, rank, timeout)

    def getBackendName(self) -> str:
        return NAME

    # A group without inner backends has to remember its own name.

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description

    def shutdown(self) -> None:
        self._driver.close()
        self._pairs.close()

    def abort(self) -> None:
        self.shutdown()

    # Reductions

    def allreduce(self, tensors: list[Tensor], opts: _ReduceOptions) -> Work:
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: _ReduceOptions) -> Work:
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: list[Tensor], opts: _ReduceOptions) -> Work:
        op = opts.reduceOp
        check_op(op)
        batch = Batch()
        for tensor in tensors:
            batch.add(self._ops.all_reduce(batch.numbers(tensor), op), tensor.nbytes)
        return self._submit(name, batch, tensors, opts.asyncOp)

    def reduce(self, tensors: list[Tensor], opts: _ReduceRootOptions) -> Work:
        check_op(opts.reduceOp)
        batch = Batch()
        for tensor in tensors:
            batch.add(self._ops.reduce(batch.numbers(tensor), opts.rootRank, opts.reduceOp), tensor.nbytes)
        return self._submit("reduce", batch, tensors, opts.asyncOp)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: _ReduceOptions
    ) -> Work:
        check_op(opts.reduceOp)
        batch = Batch()
        for out, whole in zip(outputs, inputs, strict=True):
            parts = numbers(whole).chunk(self._size) if whole.numel() else [numbers(whole)] * self._size
            batch.add(self._ops.reduce_scatter(batch.numbers(out), parts, opts.reduceOp), out.nbytes)
        return self._submit("reduce_scatter", batch, outputs, opts.asyncOp)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: _ReduceOptions) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [whole], opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: _ReduceOptions) -> Work:
        check_op(opts.reduceOp)
        batch = Batch()
        for out, parts in zip(outputs, inputs, strict=True):
            flat = [numbers(part) for part in parts]
            batch.add(self._ops.reduce_scatter(batch.numbers(out), flat, opts.reduceOp), out.nbytes)
        return self._submit("reduce_scatter", batch, outputs, opts.asyncOp)

    def reduce_parts(self, parts: Sequence[Tensor], out: Tensor) -> Work:
        """`out` = parts[0] + parts[1] + … in rank order, once every rank has called this.

        `parts[i]` is the same slice of rank i's buffer in a SharedRegion that all ranks see; calling says
        "mine is written". `out` may be one of them. All tensors are flat and contiguous. Returning does not
        mean that the others have read this rank's part: a collective before the next write sees to that.
        """
        batch = Batch()
        batch.add(self._ops.reduce_parts(parts, out), out.nbytes)
        return self._submit("reduce_parts", batch, [out], is_async=True)

    # Movements

    def broadcast(self, tensors: list[Tensor], opts: _RootOptions) -> Work:
        batch = Batch()
        for tensor in tensors:
            batch.add(self._ops.broadcast(batch.bytes(tensor), opts.rootRank), tensor.nbytes)
        return self._submit("broadcast", batch, tensors, opts.asyncOp)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Options) -> Work:
        batch = Batch()
        for outs, tensor in zip(outputs, inputs, strict=True):
            most = max(out.nbytes for out in outs)
            batch.add(self._ops.gather([batch.bytes(out) for out in outs], as_bytes(tensor), most), most)
        return self._submit("all_gather", batch, [out for outs in outputs for out in outs], opts.asyncOp)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Options) -> Work:
        return self.allgather(outputs, inputs, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: _Options
    ) -> Work:
        batch = Batch()
        for out, tensor in zip(outputs, inputs, strict=True):
            flat = batch.bytes(out)
            slots = pieces(flat, tensor.nbytes) if tensor.nbytes else [flat] * self._size
            batch.add(self._ops.gather(slots, as_bytes(tensor), tensor.nbytes), tensor.nbytes)
        return self._submit("all_gather", batch, outputs, opts.asyncOp)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: _Options) -> Work:
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _RootOptions) -> Work:
        batch = Batch()
        mine = outputs[0] if self._rank == opts.rootRank else []
        slots = [batch.bytes(out) for out in mine]
        batch.add(self._ops.gather(slots, as_bytes(inputs[0]), inputs[0].nbytes), inputs[0].nbytes)
        return self._submit("gather", batch, mine, opts.asyncOp)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: _RootOptions) -> Work:
        batch = Batch()
        parts = [as_bytes(part) for part in inputs[0]] if self._rank == opts.rootRank else []
        batch.add(self._ops.scatter(batch.bytes(outputs[0]), parts, opts.rootRank), outputs[0].nbytes)
        return self._submit("scatter", batch, outputs, opts.asyncOp)

    def alltoall_base(
        self, output: Tensor, whole: Tensor, output_splits: list[int], input_splits: list[int], opts: _Options
    ) -> Work:
        batch = Batch()
        outs = cut(batch.bytes(output), output, output_splits, self._size)
        ins = cut(as_bytes(whole), whole, input_splits, self._size)
        uneven = bool(output_splits or input_splits)
        most = ins[0].numel() if not uneven else sys.maxsize
        batch.add(self._ops.all_to_all(outs, ins, uneven), most)
        return self._submit("all_to_all", batch, [output], opts.asyncOp)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: _Options) -> Work:
        batch = Batch()
        outs = [batch.bytes(out) for out in outputs]
        batch.add(self._ops.all_to_all(outs, [as_bytes(part) for part in inputs], uneven=True), sys.maxsize)
        return self._submit("all_to_all", batch, outputs, opts.asyncOp)

    def barrier(self, opts: _Options) -> Work:
        batch = Batch()
        batch.add(self._ops.barrier(), 0)
        return self._submit("barrier", batch, [], opts.asyncOp)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._pairs.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._pairs.recv(tensors, peer, tag)

    # The names that newer versions of torch call
    all_gather_single = _allgather_base  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def _submit(self, name: str, batch: Batch, results: Sequence[Tensor], is_async: bool) -> Work:
        work = SharedWork(self._driver, name, batch.rounds(), results, batch.after)
        if is_async:
            self._driver.issue(work, batch.count == 1 and self._ops.is_one_round(batch.most))
        else:
            self._driver.run(work)
        return work


def create_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup | ProcessGroupGloo:
    """Shared memory if every rank is on this host and it can be had, else gloo; all ranks decide alike."""
    mine = host_key(from_environment().host) if supported() else f"rank {rank} on a CPU we cannot use"
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
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create_group, devices=["cpu"])
