"""The "shoal" backend in real processes: every collective, the libraries above it, and how things end."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from shoal.errors import PeerLost
from shoal.testing.spawn import warm
from shoal.world.network.compared import Network
from shoal.world.shm.backend import SharedMemoryGroup, register_backend
from shoal.world.shm.memory import SharedMemoryUnavailable, SharedRegion

_CONTEXT = warm()


def _child(
    fn: Callable[..., Any], rank: int, size: int, meeting: str, answer: Connection, args: tuple[Any, ...]
) -> None:
    try:
        torch.set_num_threads(1)
        register_backend()
        answer.send((True, fn(rank, size, meeting, *args)))
    except BaseException:
        answer.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    os._exit(0)  # what is tested is the group, not the order in which an interpreter takes things apart


def spawn(fn: Callable[..., Any], size: int, tmp_path: Path, *args: Any, timeout: float = 60) -> list[Any]:
    """Run fn(rank, size, meeting, *args) on `size` processes; their results by rank, None if killed."""
    meeting = str(tmp_path / f"store{time.monotonic_ns()}")
    ends = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
    workers = [
        _CONTEXT.Process(target=_child, args=(fn, rank, size, meeting, ends[rank][1], args))
        for rank in range(size)
    ]
    for worker, (_, theirs) in zip(workers, ends, strict=True):
        worker.start()
        theirs.close()
    results: list[Any] = [None] * size
    deadline = time.monotonic() + timeout
    pending = {ours: rank for rank, (ours, _) in enumerate(ends)}
    try:
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(pending.values())} gave no answer in {timeout} s"
            for ours in ready:
                rank = pending.pop(ours)
                with contextlib.suppress(EOFError):
                    fine, results[rank] = ours.recv()
                    assert fine, results[rank]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return results


def _init(rank: int, size: int, meeting: str, seconds: float = 30) -> Any:
    store = dist.FileStore(meeting, size)
    dist.init_process_group(
        "shoal", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    return dist.group.WORLD


def _input(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return _drawn(rank, count, dtype).clone()


@cache
def _drawn(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 5, (count,), generator=generator).to(dtype)


_FOLD: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def _folded(size: int, count: int, dtype: torch.dtype, op: Any) -> Tensor:
    total = _input(0, count, dtype)
    for rank in range(1, size):
        total = _FOLD[op](total, _input(rank, count, dtype))
    if op == ReduceOp.AVG:
        total = total / size if dtype.is_floating_point else torch.div(total, size, rounding_mode="trunc")
    return total


def _same(name: str, got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype, name
    assert torch.equal(got, expected), f"{name}: {got.flatten()[:5]} is not {expected.flatten()[:5]}"


SIZES = (0, 1, 7, 1000, 70_001, 1_500_007)
DTYPES = (
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def _reductions(rank: int, size: int, meeting: str) -> None:
    assert isinstance(_init(rank, size, meeting), SharedMemoryGroup)
    gloo = dist.new_group(backend="gloo")
    cases = [(count, torch.float32, ReduceOp.SUM) for count in SIZES]
    cases += [(count, dtype, ReduceOp.SUM) for count in (1, 70_001) for dtype in DTYPES]
    cases += [(count, torch.float32, op) for count in (7, 70_001) for op in list(_FOLD)[:5]]
    cases += [(count, torch.int32, op) for count in (7, 70_001) for op in _FOLD]
    for count, dtype, op in cases:
        name = f"{count} {dtype} {op}"
        mine, expected = _input(rank, count, dtype), _folded(size, count, dtype, op)
        dist.all_reduce(mine, op=op)
        _same(f"all_reduce {name}", mine, expected)
        reduced = _input(rank, count, dtype)
        dist.reduce(reduced, dst=size - 1, op=op)
        if rank == size - 1:
            _same(f"reduce {name}", reduced, expected)
        whole, out = _input(rank, count * size, dtype), torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(out, whole, op=op)
        share = _folded(size, count * size, dtype, op)[rank * count : (rank + 1) * count]
        _same(f"reduce_scatter_tensor {name}", out, share)
        dist.reduce_scatter(out.zero_(), list(whole.chunk(size)) if count else [whole] * size, op=op)
        _same(f"reduce_scatter {name}", out, share)
        if count:
            dist.reduce_scatter_tensor(whole[rank * count : (rank + 1) * count], whole, op=op)  # in place
            _same(f"reduce_scatter_tensor in place {name}", whole[rank * count : (rank + 1) * count], share)
    mine, theirs = _input(rank, 70_001, torch.float32), _input(rank, 70_001, torch.float32)
    dist.all_reduce(mine)
    dist.all_reduce(theirs, group=gloo)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_reductions_have_the_bits_of_a_fold_in_rank_order(size: int, tmp_path: Path) -> None:
    spawn(_reductions, size, tmp_path)


def _movements(rank: int, size: int, meeting: str) -> None:
    _init(rank, size, meeting)
    for count, dtype in [(count, torch.float32) for count in SIZES] + [(1001, dtype) for dtype in DTYPES]:
        name, root = f"{count} {dtype}", size - 1
        mine, inputs = _input(rank, count, dtype), [_input(peer, count, dtype) for peer in range(size)]
        data = mine.clone()
        dist.broadcast(data, src=root)
        _same(f"broadcast {name}", data, inputs[root])
        outs = [torch.empty(count, dtype=dtype) for _ in range(size)]
        dist.all_gather(outs, mine)
        _same(f"all_gather {name}", torch.cat(outs), torch.cat(inputs))
        whole = torch.empty(count * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine)
        _same(f"all_gather_into_tensor {name}", whole, torch.cat(inputs))
        whole.zero_()[rank * count : (rank + 1) * count] = mine
        dist.all_gather_into_tensor(whole, whole[rank * count : (rank + 1) * count])
        _same(f"all_gather_into_tensor in place {name}", whole, torch.cat(inputs))
        dist.gather(mine, [out.zero_() for out in outs] if rank == root else None, dst=root)
        if rank == root:
            _same(f"gather {name}", torch.cat(outs), torch.cat(inputs))
        parts = list(_input(root, count * size, dtype).view(size, count).unbind()) if rank == root else None
        dist.scatter(data, parts, src=root)
        _same(f"scatter {name}", data, _input(root, count * size, dtype).view(size, count)[rank])
        sent, got = _input(rank, count * size, dtype), torch.empty(count * size, dtype=dtype)
        expected = torch.cat(
            [_input(peer, count * size, dtype).view(size, count)[rank] for peer in range(size)]
        )
        dist.all_to_all_single(got, sent)
        _same(f"all_to_all_single {name}", got, expected)
        dist.all_to_all(outs, list(sent.view(size, count).unbind()))
        _same(f"all_to_all {name}", torch.cat(outs), expected)
    # rank i sends (i + 1) * (j + 1) rows of three to rank j
    sends, receives = [(rank + 1) * (j + 1) for j in range(size)], [(i + 1) * (rank + 1) for i in range(size)]
    got = torch.empty(sum(receives), 3)
    dist.all_to_all_single(got, torch.full((sum(sends), 3), float(rank)), receives, sends)
    _same(
        "uneven all_to_all_single",
        got[:, 0],
        torch.cat([torch.full((n,), float(i)) for i, n in enumerate(receives)]),
    )
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [item["rank"] for item in objects] == list(range(size))
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_movements(size: int, tmp_path: Path) -> None:
    spawn(_movements, size, tmp_path)


def _strides_and_more(rank: int, size: int, meeting: str) -> None:
    group = _init(rank, size, meeting)
    square = _input(rank, 300 * 70, torch.float32).view(300, 70)
    turned = square.t()
    dist.all_reduce(turned)
    _same("strided all_reduce", square.flatten(), _folded(size, 300 * 70, torch.float32, ReduceOp.SUM))
    leaf = nn.Parameter(torch.full((5,), float(rank)))
    dist.broadcast(leaf, src=0)
    assert leaf.sum() == 0
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar == sum(range(size))
    outs = [torch.zeros(4, 3).t() for _ in range(size)]
    dist.all_gather(outs, torch.full((3, 4), float(rank)))
    assert [out[0, 0].item() for out in outs] == list(range(size))
    many = [torch.full((count,), 1.0) for count in (3, 0, 100_000)]
    with dist._coalescing_manager(group):
        for tensor in many:
            dist.all_reduce(tensor)
    assert all(bool((tensor == size).all()) for tensor in many)
    # A ring in which everybody sends before it receives.
    got = torch.empty(50_000)
    sending = dist.isend(torch.full((50_000,), float(rank)), (rank + 1) % size)
    receiving = dist.irecv(got, (rank - 1) % size)
    sending.wait()
    receiving.wait()
    assert got[-1] == (rank - 1) % size
    with pytest.raises(NotImplementedError, match="PREMUL_SUM"):
        dist.all_reduce(torch.ones(3), op=dist._make_nccl_premul_sum(2.0))


def test_strides_scalars_leaves_and_messages(tmp_path: Path) -> None:
    spawn(_strides_and_more, 3, tmp_path)


def _determinism(rank: int, size: int, meeting: str) -> list[bytes]:
    _init(rank, size, meeting)
    seen = []
    for count in (12, 12_000, 600_000):
        mine = _input(rank, count, torch.float32)
        reduced, share, again = mine.clone(), torch.empty(count // size), torch.empty(count)
        dist.all_reduce(reduced)
        dist.reduce_scatter_tensor(share, mine)
        dist.all_gather_into_tensor(again, share)
        _same(f"reduce_scatter + all_gather of {count}", again, reduced)
        seen.append(reduced.numpy().tobytes())
    return seen


def test_every_rank_has_the_same_bits(tmp_path: Path) -> None:
    results = spawn(_determinism, 3, tmp_path)
    assert results[0] == results[1] == results[2]


def _asynchronous(rank: int, size: int, meeting: str) -> None:
    first = _init(rank, size, meeting)
    second = dist.new_group(backend="shoal")
    sizes = [5, 700_000, 9, 30_000, 1, 400_000]
    tensors = [torch.full((count,), float(rank)) for count in sizes * 2]
    works = [
        dist.all_reduce(tensor, group=(first, second)[i % 2], async_op=True)
        for i, tensor in enumerate(tensors)
    ]
    order = range(len(works)) if rank % 2 else reversed(range(len(works)))
    for i in order:
        works[i].wait()
    assert all(bool((tensor == sum(range(size))).all()) for tensor in tensors)
    # One round published and left alone must not keep the others from finishing.
    lazy = dist.all_reduce(ones := torch.ones(3), group=first, async_op=True)
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=second)
        lazy.wait()
    else:
        lazy.wait()
        dist.all_reduce(torch.ones(1), group=second)
    assert ones[0] == size
    small = [torch.full((3,), float(i)) for i in range(100)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in small]
    futures = [work.get_future() for work in works]
    assert torch.futures.collect_all(futures).wait()[99].value()[0][0] == 99 * size
    assert all(work.is_completed() for work in works)
    assert all(bool((tensor == i * size).all()) for i, tensor in enumerate(small))


@pytest.mark.parametrize("size", [2, 4])
def test_asynchronous_collectives_of_two_groups(size: int, tmp_path: Path) -> None:
    spawn(_asynchronous, size, tmp_path)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 8)).double()


def _train(model: nn.Module, batch: Tensor) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _libraries(rank: int, size: int, meeting: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _init(rank, size, meeting)
    batch = _input(0, 4 * size * 12, torch.float64).view(-1, 12)
    alone = _net()
    expected = _train(alone, batch)
    mesh = init_device_mesh("cpu", (size,))
    ddp = nn.parallel.DistributedDataParallel(_net())
    sharded = fully_shard(_net(), mesh=mesh)
    for name, model in (("ddp", ddp), ("fsdp", sharded)):
        losses = torch.tensor(_train(model, batch.chunk(size)[rank]), dtype=torch.float64)
        dist.all_reduce(losses, op=ReduceOp.AVG)
        torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), msg=name)
    parallel = parallelize_module(_net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert _train(parallel, batch) == pytest.approx(expected, rel=1e-12)
    for ours, theirs in zip(alone.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours)


def test_ddp_fsdp_and_tensor_parallel_equal_one_process(tmp_path: Path) -> None:
    spawn(_libraries, 2, tmp_path)


def _parts(rank: int, size: int, meeting: str) -> None:
    group = _init(rank, size, meeting)
    count = 300_001
    store = dist.PrefixStore("parts", dist.distributed_c10d._get_default_store())
    region = SharedRegion.create(store, "buffers", rank, size, 4 * count * size)
    buffers = [region.tensor(torch.float32, 4 * count * peer, count) for peer in range(size)]
    buffers[rank].copy_(_input(rank, count, torch.float32))
    edges = [count * peer // size for peer in range(size + 1)]
    mine = slice(edges[rank], edges[rank + 1])
    group.reduce_parts([buffer[mine] for buffer in buffers], buffers[rank][mine]).wait()
    _same("reduce_parts", buffers[rank][mine], _folded(size, count, torch.float32, ReduceOp.SUM)[mine])


def test_parts_that_are_already_shared_are_summed_in_place(tmp_path: Path) -> None:
    spawn(_parts, 4, tmp_path)


def _lose_one(rank: int, size: int, meeting: str) -> tuple[str, float]:
    _init(rank, size, meeting)
    dist.all_reduce(torch.ones(1))
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        dist.all_reduce(torch.ones(1_000_000))
    return str(caught.value), time.monotonic() - begun


def test_the_others_learn_of_a_killed_rank(tmp_path: Path) -> None:
    first, second, killed = spawn(_lose_one, 3, tmp_path)
    assert killed is None
    for message, seconds in (first, second):
        assert "rank 2 (pid" in message
        assert "all_reduce" in message
        assert seconds < 2


def _be_late(rank: int, size: int, meeting: str) -> str:
    _init(rank, size, meeting, seconds=1)
    if rank == 1:
        time.sleep(2)
        return ""
    with pytest.raises(TimeoutError) as caught:
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    message = spawn(_be_late, 2, tmp_path)[0]
    assert "rank 0 waited 1 s in all_reduce for rank 1" in message


def _die(rank: int, size: int, meeting: str) -> None:
    _init(rank, size, meeting)
    dist.all_reduce(torch.ones(1_000_000))
    opened = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    assert any(name.startswith(("/memfd:", "/dev/shm/")) for name in mapped)
    Path(f"{meeting}-{rank}").write_text("\n".join([*opened, *mapped]))
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Of all that the killed ones had open; the folder itself belongs to every process of the machine."""
    assert spawn(_die, 2, tmp_path) == [None, None]
    held = {name for file in tmp_path.glob("store*-?") for name in file.read_text().splitlines()}
    assert held
    assert not [name for name in held if name.startswith("/dev/shm/") and os.path.exists(name)]


def _kind(group: object) -> str:
    return "shm" if isinstance(group, SharedMemoryGroup) else "gloo"


def _short_of_memory(rank: int, size: int, meeting: str) -> tuple[str, str, str]:
    store = dist.FileStore(meeting, size)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    with pytest.raises(SharedMemoryUnavailable) as caught:
        SharedRegion.create(dist.PrefixStore("direct", store), "big", rank, size, 4 << 20)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        dist.init_process_group("shoal", store=store, rank=rank, world_size=size)
    group: Any = dist.group.WORLD
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    assert tensor[0] == sum(range(size))
    return _kind(group), said.getvalue(), str(caught.value)


def test_without_memory_all_ranks_take_gloo_and_rank_0_says_so(tmp_path: Path) -> None:
    results = spawn(_short_of_memory, 3, tmp_path)
    assert [kind for kind, _, _ in results] == ["gloo"] * 3
    assert len({reason for _, _, reason in results}) == 1
    assert "no shared memory" in results[0][1]
    assert "gloo" in results[0][1]
    assert results[0][1].count("\n") == 1
    assert results[1][1] == results[2][1] == ""


def _two_hosts(rank: int, size: int, meeting: str) -> str:
    os.environ["SHOAL_HOST"] = f"host{rank % 2}"
    group = _init(rank, size, meeting)
    for count in (5, 70_001):
        out, whole = torch.empty(count), _input(rank, count * size, torch.float32)
        Network(group, rank, size).reduce_scatter(out, whole).wait()
        expected = _folded(size, count * size, torch.float32, ReduceOp.SUM)[rank * count : (rank + 1) * count]
        _same(f"reduce-scatter over gloo of {count}", out, expected)
    pair = dist.new_group([0, 2], backend="shoal")
    kind = _kind(pair) if rank in (0, 2) else "none"
    alone = torch.ones(3)
    dist.all_reduce(alone)
    model = nn.parallel.DistributedDataParallel(_net())
    _train(model, _input(0, 48, torch.float64).view(4, 12))
    return f"{_kind(group)} {kind}"


def test_several_hosts_use_gloo_and_each_host_its_memory(tmp_path: Path) -> None:
    assert spawn(_two_hosts, 4, tmp_path) == ["gloo shm", "gloo none", "gloo shm", "gloo none"]
