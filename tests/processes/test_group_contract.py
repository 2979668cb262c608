"""What users of the backend "shoal" may rely on when something is wrong, late, or called from a callback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import torchrun, write
from torch import Tensor
from torch.distributed import DistBackendError, PrefixStore, ReduceOp

from shoal.testing.spawn import spawn
from shoal.world.shm.backend import SharedMemoryGroup
from shoal.world.two_level.hierarchical import BORDER
from shoal.world.world import World

Call = Callable[[SharedMemoryGroup, int], Any]


def _group(world: World, name: str, seconds: float = 20) -> SharedMemoryGroup:
    """A group of its own: one that has failed stays failed."""
    assert world.store is not None
    store = PrefixStore(name, world.store)
    return SharedMemoryGroup(store, world.rank, world.size, timedelta(seconds=seconds))


def _reduce(dtype: torch.dtype = torch.float32, count: int = 10, op: Any = ReduceOp.SUM) -> Call:
    return lambda group, rank: group.allreduce([torch.full((count,), rank, dtype=dtype)], op).wait()


def _broadcast(root: int) -> Call:
    return lambda group, _: group.broadcast(torch.zeros(10), root=root).wait()


def _sums(*counts: int) -> Call:
    def call(group: SharedMemoryGroup, _: int) -> None:
        options = torch.distributed.AllreduceCoalescedOptions()
        group.allreduce_coalesced([torch.ones(count) for count in counts], options).wait()

    return call


def _splits(sent: list[int], got: list[int]) -> Call:
    return lambda group, _: group.alltoall_base(
        torch.zeros(sum(got)), torch.zeros(sum(sent)), got, sent
    ).wait()


MISMATCHES: list[tuple[Call, Call, str, str]] = [
    (_reduce(), _reduce(torch.float64), "all_reduce (SUM) of 10 float32", "all_reduce (SUM) of 10 float64"),
    (_reduce(), _reduce(count=11), "of 10 float32", "of 11 float32"),
    (_reduce(), _reduce(count=0), "of 10 float32", "of 0 float32"),
    (_reduce(), _reduce(op=ReduceOp.MAX), "all_reduce (SUM)", "all_reduce (MAX)"),
    (_reduce(count=3_000_000), _reduce(count=3_000_001), "of 3000000 float32", "of 3000001 float32"),
    (_reduce(), _broadcast(0), "all_reduce (SUM)", "broadcast from rank 0 of 10 float32"),
    (_broadcast(0), _broadcast(1), "broadcast from rank 0", "broadcast from rank 1"),
    (_sums(3, 4), _sums(4, 3), "all_reduce_coalesced", "of other sizes"),
    (_reduce(), lambda group, _: group.barrier().wait(), "all_reduce (SUM) of 10 float32", "barrier"),
    (
        _splits([1, 2, 3], [1, 1, 1]),
        _splits([1, 2, 3], [2, 2, 2]),
        "rank 0 sends 8 bytes to rank 1",
        "expects 4",
    ),
]


def _mismatch(world: World) -> list[str]:
    said = []
    for number, (usual, other, _, _) in enumerate(MISMATCHES):
        group = _group(world, f"mismatch{number}")
        with pytest.raises(DistBackendError) as caught:
            (other if world.rank == 2 else usual)(group, world.rank)
        said.append(str(caught.value))
    return said


def test_ranks_that_call_other_things_are_told_what_and_no_number_is_touched() -> None:
    said = spawn(_mismatch, 3)
    assert said[0] == said[1] == said[2]  # the same sentence everywhere
    for (_, _, first, second), sentence in zip(MISMATCHES, said[0], strict=True):
        assert first in sentence
        assert second in sentence
        assert "No tensor was changed" in sentence


def _refused(world: World) -> list[str]:
    whole = {
        "wrong type": torch.zeros(2 * world.size, dtype=torch.float64),
        "wrong size": torch.zeros(2 * world.size + 1),
    }
    said = []
    for name, out in whole.items():
        group = _group(world, name)
        mine = torch.ones(2)
        wrong = out if world.rank == 1 else torch.zeros(2 * world.size)
        with pytest.raises((ValueError, DistBackendError)) as caught:
            group._allgather_base(wrong, mine).wait()
        said.append(f"{type(caught.value).__name__}: {caught.value}")
        assert not wrong.any()
    group = _group(world, "all alike")
    for view in (
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
    ):
        with pytest.raises(ValueError, match="resolve_conj"):
            group.allreduce([view])
    with pytest.raises(NotImplementedError, match="PREMUL_SUM"):
        group.reduce(torch.ones(2), 0, dist._make_nccl_premul_sum(2.0))
    fine = torch.ones(2)
    group.allreduce([fine]).wait()  # all have refused the same: the group goes on
    assert fine.tolist() == [world.size] * 2
    return said


def test_what_one_rank_refuses_the_others_hear_of() -> None:
    said = spawn(_refused, 2)
    assert [text.partition(":")[0] for text in said[0]] == ["CollectiveMismatch"] * 2
    assert [text.partition(":")[0] for text in said[1]] == ["Refused"] * 2
    assert "rank 1 called a call that it refused" in said[0][0]
    assert "4 torch.float64 for parts of 2 torch.float32" in said[1][0]


def _sum_of(count: int, dtype: torch.dtype = torch.float32) -> Callable[[World], Any]:
    return lambda world: world.all_reduce(torch.ones(count, dtype=dtype)).wait()


def _spread(count: int, root: int = 0) -> Callable[[World], Any]:
    return lambda world: world.broadcast(torch.full((count,), float(world.rank)), root).wait()


def _gathered(count: int, dtype: torch.dtype = torch.float32) -> Callable[[World], Any]:
    def call(world: World) -> None:
        out = torch.zeros(count * world.size, dtype=dtype)
        try:
            world.all_gather(out, torch.full((count,), 1.0 + world.rank, dtype=dtype)).wait()
        finally:
            for rank, part in enumerate(out.chunk(world.size)):
                assert bool(((part == 0) | (part == 1 + rank)).all())  # never what lies in other bytes

    return call


def _scattered(count: int) -> Callable[[World], Any]:
    return lambda world: world.reduce_scatter(torch.zeros(count), torch.ones(count * world.size)).wait()


def _exchanged(count: int) -> Callable[[World], Any]:
    return lambda world: world.all_to_all(
        torch.zeros(count * world.size), torch.ones(count * world.size)
    ).wait()


LARGE = 60_000
BETWEEN_HOSTS = [
    (_sum_of(10), _sum_of(5, torch.float64), "all_reduce (SUM) of 10 float32", "of 5 float64"),
    (_sum_of(10), _sum_of(LARGE), "of 10 float32", f"of {LARGE} float32"),
    (
        _sum_of(LARGE),
        _sum_of(LARGE // 2),
        f"of {LARGE} float32",
        f"of {LARGE // 2} float32",
    ),  # gloo's would abort
    (_sum_of(LARGE), _sum_of(LARGE // 2, torch.float64), f"of {LARGE} float32", f"of {LARGE // 2} float64"),
    (_spread(10), _sum_of(10), "broadcast from rank 0 of 10 float32", "all_reduce (SUM) of 10 float32"),
    (_spread(LARGE), _spread(LARGE, 2), "broadcast from rank 0", "broadcast from rank 2"),
    (_gathered(10), _gathered(5, torch.float64), "all_gather of 10 float32", "all_gather of 5 float64"),
    (_gathered(LARGE), _gathered(LARGE // 2, torch.float64), f"all_gather of {LARGE} float32", "float64"),
    (_scattered(LARGE), _scattered(10), f"reduce_scatter (SUM) of {LARGE} float32", "of 10 float32"),
    (_exchanged(LARGE), _scattered(LARGE), "all_to_all of", f"reduce_scatter (SUM) of {LARGE} float32"),
    (lambda world: world.barrier(), _sum_of(10), "all_reduce (SUM) of 1 float32", "of 10 float32"),
]


def _over_gloo(world: World) -> list[str]:
    said = []
    for usual, other, _, _ in BETWEEN_HOSTS:
        part = world.wire()
        with pytest.raises(DistBackendError) as caught:
            (other if world.rank == 2 else usual)(part)
        said.append(str(caught.value))
        # Nothing has been lost on the way: what all call alike is done.
        assert part.gather_values(world.rank) == [0, 1, 2]
    return said


def test_over_gloo_too_ranks_that_call_other_things_are_told_what() -> None:
    said = spawn(_over_gloo, 3, backend="gloo", timeout=60)
    assert said[0] == said[1] == said[2]
    for (_, _, first, second), sentence in zip(BETWEEN_HOSTS, said[0], strict=True):
        assert first in sentence
        assert second in sentence
        assert "No tensor holds anything of another call" in sentence


def _again_over_gloo(world: World) -> tuple[str, float]:
    part, plain = world.wire(), dist.new_group(backend="gloo")
    for _ in range(5):  # the 3rd and the 5th are not compared
        large = torch.full((LARGE,), 1.0 + world.rank)
        part.all_reduce(large).wait()
        assert bool((large == 3).all())
        part.broadcast(large.fill_(world.rank), 1).wait()
        assert bool((large == 1).all())
        out = torch.zeros(2 * LARGE)
        part.all_gather(out, large.fill_(world.rank)).wait()
        assert bool((out[:LARGE] == 0).all())
        assert bool((out[LARGE:] == 1).all())

    few = torch.zeros(256)

    def cost(call: Callable[[], Any]) -> float:
        begun = time.process_time()
        for _ in range(60):
            call()
        return time.process_time() - begun

    theirs, ours = lambda: dist.all_reduce(few, group=plain), lambda: part.all_reduce(few).wait()
    spent = [(cost(ours), cost(theirs)) for _ in range(5)]
    with pytest.raises(DistBackendError) as caught:
        (_spread(2 * LARGE) if world.rank else _sum_of(2 * LARGE))(part)
    return str(caught.value), sum(ours for ours, _ in spent) / sum(theirs for _, theirs in spent)


def test_over_gloo_the_check_is_cheap_and_large_calls_are_right_with_and_without_it() -> None:
    said = spawn(_again_over_gloo, 2, backend="gloo", timeout=60)
    for sentence, ratio in said:
        assert "rank 0 called all_reduce (SUM) of 120000 float32" in sentence
        assert "rank 1 called broadcast from rank 0 of 120000 float32" in sentence
        # Messages of our own, which gloo's thread spins for, took 3 to 9 times the processor time of gloo's call.
        assert ratio < 2


def _on_two_levels(world: World, culprit: int, call: int) -> str:
    count = BORDER  # elements: well above it
    calls = [_sum_of(count), _sum_of(2 * count), _gathered(count), _scattered(count), _spread(count, 1)]
    with pytest.raises(DistBackendError) as caught:
        calls[(call + 1) % len(calls) if world.rank == culprit else call](world)
    return str(caught.value)


@pytest.mark.parametrize(("culprit", "call"), [(3, 0), (0, 2), (1, 3), (2, 4)])
def test_on_two_levels_every_rank_is_told(culprit: int, call: int) -> None:
    begun = time.monotonic()
    said = spawn(_on_two_levels, 4, culprit, call, hosts=["a", "a", "b", "b"], timeout=60)
    assert all("have called different collectives" in text for text in said)
    assert time.monotonic() - begun < 30


def _callbacks(world: World) -> list[list[float]]:
    group = _group(world, "callbacks")
    time.sleep(0.02 * world.rank)  # threads at other speeds: the order must be the same
    seen: list[list[float]] = []

    def hook(future: Any) -> Tensor:
        (first,) = future.value()
        second = first.clone()
        group.allreduce([second]).wait()
        third = second.clone()
        (out,) = group.allreduce([third]).get_future().wait()
        seen.append([float(first), float(second), float(out)])
        return out

    futures = [group.allreduce([torch.full((), float(n))]).get_future().then(hook) for n in range(20)]
    last = torch.ones(3)
    group.allreduce([last]).wait()
    for future in futures:
        future.wait()
    assert last.tolist() == [world.size] * 3
    return seen


def test_a_callback_waits_for_collectives_in_the_same_order_everywhere() -> None:
    size = 3
    for seen in spawn(_callbacks, size, timeout=60):
        assert seen == [[n * size, n * size**2, n * size**3] for n in range(20)]


def _late(world: World) -> list[str]:
    group, gate, short, changed = (_group(world, name) for name in ("late", "gate", "short", "changed"))
    told = []

    def timed(call: Callable[[], Any], seconds: float) -> None:
        begun = time.monotonic()
        with pytest.raises(DistBackendError) as caught:  # a RuntimeError, as torch's users expect
            call()
        told.append(str(caught.value))
        assert time.monotonic() - begun >= seconds

    if world.rank == 0:
        mine = torch.ones(2)
        work = group.allreduce([mine])
        limit = timedelta(seconds=0.2)
        timed(lambda: work.wait(limit), 0.2)
        driver = threading.Thread(target=work.wait)  # now another thread drives it
        driver.start()
        timed(lambda: work.wait(limit), 0.2)
        timed(lambda: group.recv_anysource([torch.zeros(1)], 0).wait(limit), 0.2)
        timed(lambda: short.barrier(timeout=limit).wait(), 0.2)
        dist.distributed_c10d._set_pg_timeout(limit, changed)
        timed(lambda: changed.allreduce([torch.ones(1)]).wait(), 0.2)
        gate.barrier().wait()
        driver.join()
        assert mine.tolist() == [2, 2]  # it went on
        timed(lambda: dist.monitored_barrier(gate, limit), 0.2)
        gate.barrier().wait()
    else:
        gate.barrier().wait()
        group.allreduce([torch.ones(2)]).wait()
        gate.barrier().wait()
    return told


def test_timeouts_mean_what_they_say() -> None:
    told = spawn(_late, 2)[0]
    assert len(told) == 6
    assert all(" Timed out waiting 200ms" in text for text in told[:5]), told
    assert "which goes on" in told[0]
    assert "in barrier for rank 1" in told[3]
    assert "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 200 ms" in told[5]


def _forms(world: World) -> None:
    group, rank, size = _group(world, "forms"), world.rank, world.size
    total = sum(range(size))
    x = torch.tensor([float(rank)])
    group.allreduce([x]).wait()
    assert x.item() == total
    x = torch.tensor([float(rank)])
    group.allreduce(x, op=ReduceOp.MAX).wait()
    assert x.item() == size - 1
    group.broadcast(x.fill_(rank), 1).wait()
    assert x.item() == 1
    group.reduce(x.fill_(rank), 0, ReduceOp.SUM).wait()
    assert x.item() == (total if rank == 0 else rank)
    parts = [torch.zeros(1) for _ in range(size)]
    group.allgather(parts, torch.tensor([float(rank)])).wait()
    assert torch.cat(parts).tolist() == list(range(size))
    group.gather(parts if rank == 1 else [], torch.tensor([2.0 * rank]), root=1).wait()
    assert rank != 1 or torch.cat(parts).tolist() == [2 * other for other in range(size)]
    group.scatter(x, [torch.tensor([5.0 + other]) for other in range(size)] if rank == 0 else [], 0).wait()
    assert x.item() == 5 + rank
    group.reduce_scatter(x, [torch.tensor([float(rank)])] * size).wait()
    assert x.item() == total
    group.barrier().wait()
    assert group._get_backend(torch.device("cpu")) is group
    with pytest.raises(TypeError, match="op, timeout; not root"):
        group.allreduce(x, root=1)
    # One list for each rank, where the others have one for each tensor.
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    group.allgather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), 10.0 + rank)]).wait()
    assert [[int(t[0]) for t in tensors] for tensors in lists] == [
        [other, 10 + other] for other in range(size)
    ]
    for dtype in (torch.float64, torch.complex64):
        where = torch.tensor([[rank, size]])
        sparse = torch.sparse_coo_tensor(where, torch.ones(2, 2, dtype=dtype), (size + 1, 2))
        group.allreduce([sparse]).wait()
        assert sparse.to_dense()[:, 0].tolist() == [1] * size + [size]


def _messages(world: World) -> None:
    group, rank, size = _group(world, "messages"), world.rank, world.size
    if rank:
        for work in [group.send([torch.tensor([10.0 * rank + tag])], 0, tag) for tag in (3, 4)]:
            work.wait()
    else:
        named = torch.zeros(1)
        group.recv([named], 2, 4).wait()  # by name, before what rank 2 sent first
        assert named.item() == 24
        for tag, others in ((4, [1]), (3, [1, 2])):
            got = {}
            for _ in others:
                work = group.recv_anysource([named], tag)
                work.wait()
                got[work._source_rank()] = named.item()
            assert got == {other: 10.0 * other + tag for other in others}
    group.barrier().wait()
    late = [group.recv_anysource([torch.zeros(1)], 0) for _ in range(size - 1)] if rank == 0 else []
    if rank:
        group.send([torch.tensor([float(rank)])], 0, 0).wait()
    for work in late:
        work.wait()
    assert sorted(work._source_rank() for work in late) == list(range(1, size))[: len(late)]


def _profile(world: World) -> None:
    group = _group(world, "profile")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(3), group=world.group)
        group.allreduce([torch.ones(3)]).wait()
    names = [event.name for event in profile.events() if event.name.startswith("shoal:")]
    assert names == ["shoal:all_reduce"] * 2
    assert dist.get_backend(world.group) == "shoal"


def _save(world: World, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"weight": torch.full((4,), 3.0)}
    dcp.async_save(state, checkpoint_id=folder).result()
    loaded = {"weight": torch.zeros(4)}
    dcp.load(loaded, checkpoint_id=folder)
    assert loaded["weight"].tolist() == [3.0] * 4
    assert world.size == 3


def _rest(world: World, folder: str) -> None:
    _forms(world)
    _messages(world)
    _profile(world)
    _save(world, folder)


def test_what_groups_in_c_can_ours_can_as_well(tmp_path: Path) -> None:
    spawn(_rest, 3, str(tmp_path / "saved"))


RESTART = """
import os, torch, torch.distributed as dist
from shoal.world.shm.backend import register_backend
register_backend()
dist.init_process_group("shoal")
ones = torch.ones(4)
dist.all_reduce(ones, group=dist.new_group())
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 0:
    os._exit(1)
print("sum", ones[0].item())
dist.destroy_process_group()
"""


def test_workers_that_torchrun_starts_anew_do_not_read_what_the_first_wrote(
    tmp_path: Path, everything: bool
) -> None:
    done = torchrun(tmp_path, "--max-restarts", "1", write(tmp_path, RESTART), forked=not everything)
    assert done.code == 0, done.err
    assert done.out.count("sum 2.0") >= 2
