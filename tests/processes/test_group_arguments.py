"""Tensors and arguments that a collective cannot take are refused by name, and those that it can are as in gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import DistBackendError, PrefixStore, ReduceOp

from shoal.testing.spawn import spawn
from shoal.world.shm.backend import SharedMemoryGroup, create_group
from shoal.world.world import TIMEOUT, World

Call = Callable[[SharedMemoryGroup], Any]


def _group(world: World, name: str) -> SharedMemoryGroup:
    assert world.store is not None
    return SharedMemoryGroup(PrefixStore(name, world.store), world.rank, world.size, TIMEOUT)


def _complex() -> Tensor:
    return torch.full((2,), 1 + 2j)


def _lists(group: SharedMemoryGroup) -> None:
    group.reduce_scatter_tensor_coalesced([torch.zeros(2)], [torch.zeros(4)] * 2).wait()


def _quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


REFUSED: list[tuple[Call, str]] = [
    # Complex numbers are pairs in memory: products and maxima of pairs are not those of the numbers.
    (lambda group: group.reduce(_complex(), 0, ReduceOp.PRODUCT), "cannot reduce complex64 with PRODUCT"),
    (
        lambda group: group._reduce_scatter_base(torch.zeros(1) + 0j, _complex(), ReduceOp.PRODUCT),
        "cannot reduce complex64 with PRODUCT",
    ),
    (lambda group: group.allreduce([_complex()], ReduceOp.MAX), "cannot reduce complex64 with MAX"),
    (lambda group: group.allreduce([torch.ones(2)], ReduceOp.BAND), "cannot reduce float32 with BAND"),
    (
        lambda group: group.allreduce([torch.ones(2, dtype=torch.bool)], ReduceOp.AVG),
        "cannot reduce bool with AVG",
    ),
    (lambda group: group.allreduce([torch.ones(2).to(torch.uint16)]), "cannot reduce uint16 with SUM"),
    (lambda group: group.allreduce([_quantised()]), "cannot reduce qint8 with SUM"),
    (lambda group: group.broadcast([_quantised()], root=0), "qint8"),
    (lambda group: group.allreduce([torch.ones(2, device="meta")]), "a tensor on meta"),
    (lambda group: group.broadcast([torch.ones(2, device="meta")], root=1), "a tensor on meta"),
    (lambda group: group.broadcast([torch.eye(2).to_sparse_csr()], root=1), "got a sparse_csr tensor"),
    (
        lambda group: group.broadcast(torch.ones(2), root=2),
        "got 2 as its root; the ranks of its group are 0 to 1",
    ),
    (lambda group: group.reduce(torch.ones(2), root=-1), "got -1 as its root"),
    (_lists, "longer than argument"),
]


def _refused(world: World) -> list[str]:
    group = _group(world, "all refuse")
    said = []
    for call, _ in REFUSED:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            call(group)
        said.append(str(caught.value))
    fine = torch.ones(2)
    group.allreduce([fine]).wait()  # all have refused the same: the group goes on
    assert fine.tolist() == [2, 2]
    for number, (call, _) in enumerate(REFUSED):
        group = _group(world, f"one refuses {number}")
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            (call(group) if world.rank == 1 else group.allreduce([torch.ones(2)])).wait()
        if world.rank == 0:
            assert isinstance(caught.value, DistBackendError)
            assert "a call that it refused" in str(caught.value)
    return said


def test_what_cannot_be_right_is_refused_and_nobody_waits_for_it() -> None:
    said = spawn(_refused, 2)
    assert said[0] == said[1]
    for (_, words), sentence in zip(REFUSED, said[0], strict=True):
        assert words in sentence


def _collectives(world: World, count: int) -> list[list[float]]:
    mine = torch.full((count,), world.rank + 1.0)
    gathered = torch.zeros(count * world.size)
    part = torch.zeros(count)
    first = mine.clone()
    world.all_reduce(mine).wait()
    world.all_gather(gathered, first).wait()
    world.reduce_scatter(part, gathered).wait()
    world.broadcast(first, 1).wait()
    return [[t[0].item(), t[-1].item()] for t in (mine, gathered, part, first)]


def _in_inference_mode(world: World, counts: list[int]) -> list[list[list[float]]]:
    found = []
    for count in counts:
        with torch.inference_mode():
            inside = _collectives(world, count)
            strided = torch.ones(count, 2).t()
            world.all_reduce(strided).wait()
            assert strided.eq(world.size).all()
            left = torch.ones(count)
        world.all_reduce(left).wait()
        assert left.eq(world.size).all()
        assert _collectives(world, count) == inside
        found.append(inside)
    return found


@pytest.mark.parametrize(
    ("backend", "hosts"), [("shoal", None), ("gloo", None), ("shoal", ["a", "a", "b", "b"])]
)
def test_a_collective_in_inference_mode_spoils_none_outside(backend: str, hosts: list[str] | None) -> None:
    """Buffers that are used again were tensors of that mode, if the first collective of a type was made in it."""
    workers = len(hosts or "ab")
    whole = workers * (workers + 1) / 2
    counts = [3, 40_000, 1_100_000]
    for found in spawn(_in_inference_mode, workers, counts, backend=backend, hosts=hosts):
        for small in found:
            rank = small[2][0] / workers - 1
            assert small == [[whole, whole], [1, workers], [workers * (rank + 1)] * 2, [2, 2]]


def _asynchronous(world: World) -> None:
    group = _group(world, "asynchronous")
    with torch.inference_mode():
        large, small = torch.ones(1_000_000), torch.ones(3)
        works = [group.allreduce([tensor]) for tensor in (large, small)]
        for work in works:
            work.wait()
    assert large.eq(2).all()
    assert small.eq(2).all()


def test_a_thread_ends_what_was_begun_in_inference_mode() -> None:
    spawn(_asynchronous, 2)


def _made_again(world: World) -> list[str]:
    assert world.store is not None
    store = PrefixStore("again", world.store)
    kinds = []
    for turn in range(3):
        if world.rank == 0:
            time.sleep(0.2)  # the others would read what it wrote in the turn before
        group = create_group(store, world.rank, world.size, timedelta(seconds=10))
        tensor = torch.full((3,), turn + world.rank)
        group.allreduce([tensor]).wait()
        assert tensor.eq(2 * turn + 1).all()
        kinds.append(type(group).__name__)
        group.shutdown()
    return kinds


@pytest.mark.parametrize(("hosts", "kind"), [(None, "SharedMemoryGroup"), (["a", "b"], "ProcessGroupGloo")])
def test_a_group_can_be_left_and_made_again_on_the_same_store(hosts: list[str] | None, kind: str) -> None:
    assert spawn(_made_again, 2, hosts=hosts) == [[kind] * 3] * 2
