"""Collectives on two levels: workers of one machine that count as several hosts, and hosts on a cable."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from warm import Command

from shoal.errors import ConfigError
from shoal.testing.hosts import Hosts, make_hosts
from shoal.testing.parity import ParityTrace, largest_difference, run_toy
from shoal.testing.spawn import spawn, warm
from shoal.testing.toys import Toy
from shoal.world.launch import Launch
from shoal.world.mesh import Mesh
from shoal.world.two_level import groups as reach
from shoal.world.two_level.hierarchical import BORDER, CHUNK
from shoal.world.world import Handle, World

HOSTS = {
    "2 x 2": ["a", "a", "b", "b"],
    "mixed": ["a", "b", "b", "a"],
    "3 x 2": ["a", "a", "b", "b", "c", "c"],
}


def _values(rank: int, number: int, count: int, dtype: torch.dtype) -> Tensor:
    made = torch.randn(
        count, generator=torch.Generator().manual_seed(1000 * number + rank), dtype=torch.float64
    )
    return made.to(dtype)


def _by_host(hosts: list[str], tensors: list[Tensor]) -> Tensor:
    """The sum as it is promised: rank order within each host, then the hosts in order; the same bits."""
    sums: dict[str, Tensor] = {}
    for host, tensor in zip(hosts, tensors, strict=True):
        sums[host] = sums[host] + tensor if host in sums else tensor.clone()
    first, *rest = sums.values()
    for one in rest:
        first = first + one
    return first


def _all_reduce(world: World, number: int, count: int, dtype: torch.dtype) -> tuple[Handle, Tensor, Tensor]:
    mine = _values(world.rank, number, count, dtype)
    wanted = _by_host(list(world.hosts), [_values(r, number, count, dtype) for r in range(world.size)])
    return world.all_reduce(mine), mine, wanted


def _reduce_scatter(
    world: World, number: int, count: int, dtype: torch.dtype
) -> tuple[Handle, Tensor, Tensor]:
    whole = _values(world.rank, number, count * world.size, dtype)
    every = [_values(r, number, count * world.size, dtype) for r in range(world.size)]
    out = whole.chunk(world.size)[world.rank] if number % 2 else torch.empty(count, dtype=dtype)
    wanted = _by_host(list(world.hosts), every).chunk(world.size)[world.rank]
    return world.reduce_scatter(out, whole), out, wanted


def _all_gather(world: World, number: int, count: int, dtype: torch.dtype) -> tuple[Handle, Tensor, Tensor]:
    out = torch.zeros(count * world.size, dtype=dtype)
    part = _values(world.rank, number, count, dtype)
    if number % 2:  # in its place already
        out.chunk(world.size)[world.rank].copy_(part)
        part = out.chunk(world.size)[world.rank]
    wanted = torch.cat([_values(r, number, count, dtype) for r in range(world.size)])
    return world.all_gather(out, part), out, wanted


def _broadcast(world: World, number: int, count: int, dtype: torch.dtype) -> tuple[Handle, Tensor, Tensor]:
    source = number % world.size
    mine = _values(world.rank, number, count, dtype)
    return world.broadcast(mine, source), mine, _values(source, number, count, dtype)


COLLECTIVES: dict[str, Callable[[World, int, int, torch.dtype], tuple[Handle, Tensor, Tensor]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
}
COUNTS = (BORDER // 4 + 1, 40_961, 65_537 * 2)


def every_collective(world: World) -> list[str]:
    assert world.hierarchical is not None
    wrong = []
    cases = [(n, c, t) for n in COLLECTIVES for c in COUNTS for t in (torch.float32, torch.float64)]
    for number, (name, count, dtype) in enumerate(cases):
        handle, found, wanted = COLLECTIVES[name](world, number, count, dtype)
        handle.wait()
        if not torch.equal(found, wanted):
            wrong.append(f"{name} of {count} {dtype}: off by {(found - wanted).abs().max()}")
    return wrong


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS.keys())
def test_every_collective_gives_the_promised_bits(hosts: list[str]) -> None:
    assert spawn(every_collective, len(hosts), hosts=hosts) == [[]] * len(hosts)


def many_at_once(world: World, seed: int) -> list[str]:
    """Large and small ones under way together, waited for in another order on each rank."""
    draw = random.Random(seed)
    under_way = []
    for number in range(24):
        name = draw.choice(list(COLLECTIVES))
        count = draw.choice((7, 1000, BORDER // 4 + draw.randrange(5000), 3 * CHUNK // 8 + draw.randrange(9)))
        under_way.append((name, count, *COLLECTIVES[name](world, number, count, torch.float32)))
    random.Random(seed + 1 + world.rank).shuffle(under_way)
    wrong = []
    for name, count, handle, found, wanted in under_way:
        handle.wait()
        if not torch.allclose(found, wanted, rtol=1e-5, atol=1e-5):
            wrong.append(f"{name} of {count}")
    return wrong


@pytest.mark.parametrize("seed", [1, 2])
def test_many_under_way_in_mixed_order(seed: int) -> None:
    assert spawn(many_at_once, 4, seed, hosts=HOSTS["2 x 2"]) == [[]] * 4


def odd_tensors(world: World) -> bool:
    """Several chunks with a rest, strides, and numbers that are not float32."""
    long = torch.full((CHUNK // 4 * 2 + 5,), float(world.rank))
    striped = torch.full((300, 200), float(world.rank)).t()
    half = torch.full((BORDER,), float(world.rank), dtype=torch.bfloat16)
    whole = torch.full((BORDER,), world.rank, dtype=torch.int64)
    handles = [world.all_reduce(tensor) for tensor in (long, striped, half, whole)]
    copied = torch.arange(60_000.0).view(300, 200).t() * (world.rank == 3)
    copied = copied if world.rank % 2 else copied.contiguous()
    handles.append(world.broadcast(copied, 3))
    for handle in handles:
        handle.wait()
        handle.wait()  # twice is fine
    total = sum(range(world.size))
    return all(bool((tensor == total).all()) for tensor in (long, striped, half, whole)) and torch.equal(
        copied, torch.arange(60_000.0).view(300, 200).t()
    )


def test_odd_tensors() -> None:
    assert spawn(odd_tensors, 4, hosts=HOSTS["2 x 2"]) == [True] * 4


def worlds_of_a_world(world: World) -> list[Any]:
    """Smaller worlds, and two worlds of one group, find levels of their own or share them."""
    again, other = world.within(world.group), world.new_group()  # type: ignore[arg-type]
    four = world.cut([[0, 1, 2, 3], [4, 5]])
    ones = [torch.ones(BORDER) for _ in range(4)]
    for handle in [w.all_reduce(t) for w, t in zip((world, other, four, again), ones, strict=True)]:
        handle.wait()
    kinds = [
        again.hierarchical is world.hierarchical,
        other.hierarchical is world.hierarchical,
        four.hierarchical is None,
        four.size,
    ]
    return [*kinds, *(int(one[0]) for one in ones)]


def test_worlds_of_a_world() -> None:
    found = spawn(worlds_of_a_world, 6, hosts=["a", "a", "b", "b", "c", "c"])
    assert found[:4] == [[True, False, False, 4, 6, 6, 4, 6]] * 4
    assert found[4:] == [[True, False, True, 2, 6, 6, 2, 6]] * 2


def an_axis_of_a_mesh(world: World) -> tuple[bool, float]:
    """Two data axes, each with two workers on each host, at work at once."""
    data = Mesh.open(world, tensor=2).data
    tensor = torch.full((BORDER,), float(world.rank))
    data.all_reduce(tensor).wait()
    return data.hierarchical is not None, float(tensor[0])


def test_an_axis_of_a_mesh() -> None:
    found = spawn(an_axis_of_a_mesh, 8, hosts=["a"] * 4 + ["b"] * 4)
    assert found == [(True, 12.0), (True, 16.0)] * 4


def without_levels(world: World) -> tuple[bool, float]:
    tensor = torch.ones(BORDER)
    world.all_reduce(tensor).wait()
    return world.hierarchical is None, float(tensor.sum())


@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b"], ["a", "a"]])
def test_one_level_is_left_alone(hosts: list[str]) -> None:
    assert spawn(without_levels, len(hosts), hosts=hosts) == [(True, float(BORDER * len(hosts)))] * len(hosts)


def test_who_asks_for_gloo_gets_gloo() -> None:
    assert spawn(without_levels, 4, hosts=HOSTS["2 x 2"], backend="gloo") == [(True, float(BORDER * 4))] * 4


def counted(world: World) -> tuple[int, int, int]:
    traffic = world.traffic
    tensor = torch.zeros(BORDER)
    world.reduce_scatter(tensor.chunk(4)[world.rank], tensor).wait()
    first = (traffic.bytes_sent, traffic.bytes_between_hosts)
    world.all_reduce(torch.zeros(8)).wait()  # too small for levels
    return *first, traffic.bytes_between_hosts - first[1]


def test_traffic_counts_what_leaves_the_host() -> None:
    nbytes = 4 * BORDER
    wanted = (nbytes * 3 // 4, nbytes // 4, 32)
    assert spawn(counted, 4, hosts=HOSTS["2 x 2"]) == [wanted] * 4


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 161), nn.Tanh(), nn.Linear(161, 151), nn.Tanh(), nn.Linear(151, 3))


WIDE = Toy("large enough for two levels", wide, clip=0.5)


def train(world: World, strategy: str) -> tuple[ParityTrace, int]:
    trace = run_toy(world, WIDE, strategy, steps=6)
    return trace, world.traffic.bytes_between_hosts


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_training_on_two_hosts_equals_one_process(strategy: str) -> None:
    wanted = run_toy(World.alone(), WIDE, "solo", steps=6, accumulate=4)
    found = spawn(train, 4, f"{strategy}(bucket_mb=0.25)", hosts=HOSTS["2 x 2"])
    plain = spawn(train, 4, f"{strategy}(bucket_mb=0.25)", hosts=HOSTS["2 x 2"], backend="gloo")
    for (trace, between), (_, before) in zip(found, plain, strict=True):
        gap, where = largest_difference(wanted, trace)
        assert gap < 1e-12, f"{strategy}: {gap:.2e} at {where}"
        assert between < 0.6 * before, "the levels were not used"


def without_memory(world: World) -> tuple[bool, bool]:
    """One host has no shared memory: all find out, and the numbers are right all the same."""
    if world.rank >= 2:
        reach.supported = lambda: False  # type: ignore[assignment]
    ones, number = torch.ones(BORDER), torch.full((BORDER,), float(world.rank))
    handles = [world.all_reduce(ones), world.broadcast(number, 3)]
    parts = torch.zeros(4 * BORDER)
    handles.append(world.all_gather(parts, torch.full((BORDER,), float(world.rank))))
    for handle in handles:
        handle.wait()
    wanted = torch.arange(4.0).repeat_interleave(BORDER)
    return bool((ones == 4).all() and (number == 3).all()), torch.equal(parts, wanted)


def test_a_host_without_shared_memory() -> None:
    assert spawn(without_memory, 4, hosts=HOSTS["2 x 2"]) == [(True, True)] * 4


def left_behind(launch: Launch, answers: Any) -> None:
    os.environ["SHOAL_HOST"] = launch.host
    world = World.open(launch)
    world.all_reduce(torch.ones(BORDER)).wait()
    if launch.rank == 3:
        os._exit(9)
    handles = [world.all_reduce(torch.ones(8 * BORDER)) for _ in range(3)]
    said = []
    for handle in handles:
        try:
            handle.wait()
            said.append("done")
        except Exception as error:
            said.append(type(error).__name__)
    answers.put((launch.rank, said))


def test_the_loss_of_a_worker_is_an_error_for_all(tmp_path: Path) -> None:
    context = warm()
    answers = context.Queue()
    where = f"file://{tmp_path}/store"
    launches = [Launch(rank, 4, rank, 4, where, host) for rank, host in enumerate(HOSTS["2 x 2"])]
    workers = [context.Process(target=left_behind, args=(one, answers), daemon=True) for one in launches]
    for worker in workers:
        worker.start()
    try:
        for rank, said in [answers.get(timeout=60) for _ in range(3)]:
            assert "done" not in said, f"rank {rank}: {said}"
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


SCRIPT = """
import os, sys, torch, shoal
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset

def sent():
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(words[9]) for words in lines if words[0] != "lo:")

data = TensorDataset(torch.randn(64, 512), torch.randn(64, 512))
run = shoal.Run(
    model=lambda: nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)),
    loss=lambda out, batch: (((out - batch[1]) ** 2).sum(), batch[1].numel()),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    data=data, global_batch=16, progress=False, backend=sys.argv[1])
for step in run.steps(12):
    if step.number == 2:
        before = sent()
if run.world.rank == 0:
    print("sent", (sent() - before) / 10 / (4 * 2 * 512 * 513))
"""


@pytest.mark.parametrize(("backend", "least", "most"), [("auto", 0.9, 1.1), ("gloo", 1.4, 1.7)])
def test_bytes_on_the_cable(tmp_path: Path, backend: str, least: float, most: float) -> None:
    """ddp on two hosts of two workers: one model leaves each host for a step; plain gloo sends one and a half."""
    (tmp_path / "train.py").write_text(SCRIPT)
    try:
        with make_hosts(2) as hosts:
            outputs = _run_on(hosts, str(tmp_path / "train.py"), backend)
    except ConfigError as reason:
        pytest.skip(str(reason))
    share = float(outputs[0].partition("sent ")[2])
    assert least < share < most


def _run_on(hosts: Hosts, script: str, backend: str) -> list[str]:
    started = []
    for host in range(2):
        words = ["-m", "shoal", "run", "--workers", "2", "--hosts", "2", "--host", str(host)]
        words += ["--at", f"{hosts.addresses[0]}:29617", "--strategy", "ddp", script, backend]
        started.append(
            Command(
                Path(script).parent, {**os.environ, "OMP_NUM_THREADS": "1"}, words, partial(hosts.enter, host)
            )
        )
    try:
        outputs = [process.communicate(timeout=90) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], str(outputs)
    return [output for output, _ in outputs]
