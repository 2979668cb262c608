"""Push and pull of 64 MB: a gradient to two servers, an update with plain SGD there, fresh values back.

    scripts/bench server push

One worker and two servers that hold half of the values each, all of them processes of this host. Every contestant
begins with a gradient in the worker's memory and ends with the new values in it:

    shoal             through shared memory, each value on one server (replicas=1) or on both (replicas=2)
    shoal, bytes      as if the worker were on another host: bytes on loopback, plain; encrypted, with tensors sealed;
                      and encrypted by CURVE alone, as it is where they cannot be sealed
    torch RPC         rpc_async to both servers with the gradient; the answer is the values (TensorPipe as it comes)
    Ray               two actors, the same, written as in Ray's own example of a parameter server: gradients are arrays
                      of numpy, values come back as tensors of torch, which Ray pickles
    Ray, arrays       values come back as arrays too, which Ray leaves in its shared memory
                      Both only if Ray can be imported:
                      python -m venv /tmp/ray && /tmp/ray/bin/pip install ray
                      PYTHONPATH=/tmp/ray/lib/python3.11/site-packages scripts/bench server push
    limit             the same passes over memory with nobody to wait for: gradient into shared memory, from there into
                      the server's, the update, values back; on one core. With replicas=2 the middle two are made twice

Goals: 3 times as fast as torch RPC and 5 times as fast as Ray; encrypted bytes take at most twice as long as plain
ones, two copies of each shard 1.3 times as long as one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed.rpc as rpc

from benchmarks.report.result import Goal, Section
from benchmarks.workload.servers import Servers
from benchmarks.workload.turns import Seen, goals_of_turns, ratio_of, section_of_turns, take_turns
from shoal.exchange.ps_worker.bucket_shards import cut_shards
from shoal.exchange.ps_worker.push import Outgoing
from shoal.exchange.ps_worker.transfer import Transfer
from shoal.server.client.connection import Link
from shoal.server.protocol.optimizer_description import describe
from shoal.server.transport.keys import JobKeys
from shoal.server.transport.shm_transport import new_id
from shoal.testing.spawn import spawn
from shoal.world.buckets import lay_out
from shoal.world.shm.memory import copy
from shoal.world.world import World

MB = 1 << 20
SIZE = 64 * MB // 4
SHARD = 16 * MB
"""As large as buckets are if nothing else is said."""
RATE = 1e-3
ROUNDS = 4
"""In a row: a server may put off work until nobody waits for it, but not for ever."""

ONCE, TWICE, BYTES = "shoal", "shoal, replicas=2", "shoal, bytes"
SEALED, CURVE = "shoal, bytes, encrypted", "shoal, bytes, CURVE"
LIMIT, LIMIT_TWICE = "limit", "limit, replicas=2"
RPC, RAY, RAY_ARRAYS = "torch RPC", "Ray", "Ray, arrays"

Push = Callable[[torch.Tensor], None]
Place = tuple[str, JobKeys | None]
"""The address of a coordinator, and its keys."""


class Pushed:
    """A worker of ours, with one parameter and no model."""

    def __init__(self, place: Place, replicas: int, apart: bool, seals: bool) -> None:
        """`apart`: the worker counts as one of another host, so bytes travel."""
        buckets = lay_out([("w", SIZE, torch.float32)], 1, SHARD)
        self.shards = cut_shards(buckets, SHARD)
        self._bucket = buckets[0]
        self.values = torch.zeros(self._bucket.size)
        self._outgoing = Outgoing(buckets, self.shards, torch.device("cpu"), None)
        address, keys = place
        sizes = [4096, *(shard.nbytes for shard in self.shards)]
        kinds = ["ledger", *["dense"] * len(self.shards)]
        me = new_id("apart" if apart else "")
        self.link = Link(me, address, keys, 0, (sizes, kinds, 2, replicas, 60.0))
        if not seals:
            self.link._transport.wire._bulk = None
        model = torch.nn.Module()
        model.register_parameter("w", torch.nn.Parameter(self.values[:SIZE]))
        named = dict(model.named_parameters())
        self._transfer = Transfer(self.link, self.shards, [self.values], model, named, later=False)
        sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
        self._transfer.give({"w": 0}, describe(sgd), "weighted", False, "", 0)
        self._step = 0

    def push_pull(self, gradient: torch.Tensor) -> None:
        """A gradient there, values back."""
        requests = []
        for shard in self.shards:  # as in a backward pass: what is full goes out while the next fills
            part = self._outgoing.gradients[self._bucket.index][shard.start : shard.stop]
            where = self._outgoing.where(shard)
            copy(part, gradient[shard.start : shard.stop])
            with self.link.lock:
                told = {"part": 0, "micro": 0}
                requests.append(self.link.client.call(shard.number, "stage", told, self._step, part, where))
        self.link.wait(requests)
        args = {
            "parts": [[0, 1.0]],
            "factor": 1.0,
            "limit": None,
            "settings": None,
            "share": 1.0,
            "floor": self._step,
        }
        self._transfer.apply(self._step, args, {"w"}, self._step + 1)
        self._step += 1


_HELD: dict[str, torch.Tensor] = {}
"""Of a server of torch RPC, whose functions have no other place to keep something."""


def _update(gradient: torch.Tensor) -> torch.Tensor:
    """What a server of torch RPC does with a gradient."""
    values = _HELD.setdefault("w", torch.zeros(SIZE // 2))
    values.add_(gradient, alpha=-RATE)
    return values


def by_rpc(values: torch.Tensor) -> Push:
    """A worker of torch RPC."""

    def push_pull(gradient: torch.Tensor) -> None:
        # A view is sent with all of its memory: halves have to be tensors of their own.
        halves = [half.clone() for half in gradient.chunk(2)]
        futures = [rpc.rpc_async(f"server{i}", _update, args=(half,)) for i, half in enumerate(halves)]
        for half, future in zip(values.chunk(2), futures, strict=True):
            copy(half, future.wait())

    return push_pull


def by_ray(values: torch.Tensor, as_array: bool) -> tuple[Push, list[int]]:
    """A worker of Ray, and the processes of its two actors."""
    import ray  # type: ignore[import-not-found]

    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)

    class Holder:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self.values = torch.zeros(SIZE // 2)

        def pid(self) -> int:
            return os.getpid()

        def update(self, gradient: Any) -> Any:
            self.values.add_(torch.from_numpy(gradient), alpha=-RATE)
            return self.values.numpy() if as_array else self.values

    holders = [ray.remote(Holder).options(num_cpus=0).remote() for _ in range(2)]

    def push_pull(gradient: torch.Tensor) -> None:
        halves = [half.numpy() for half in gradient.chunk(2)]
        futures = [holder.update.remote(half) for holder, half in zip(holders, halves, strict=True)]
        for half, future in zip(values.chunk(2), futures, strict=True):
            found = ray.get(future)
            half.copy_(torch.from_numpy(found) if as_array else found)

    return push_pull, ray.get([holder.pid.remote() for holder in holders])


def limit(replicas: int) -> Push:
    """The passes over memory alone."""
    shared, values = torch.zeros(SIZE), torch.zeros(SIZE)
    servers = [(torch.zeros(SIZE), torch.zeros(SIZE)) for _ in range(replicas)]

    def passes(gradient: torch.Tensor) -> None:
        copy(shared, gradient)
        for staged, held in servers:
            copy(staged, shared)
            held.add_(staged, alpha=-RATE)
        copy(values, servers[-1][1])

    return passes


def contest(
    world: World, places: dict[str, Place], jobs: dict[str, list[int]], meeting: str, turns: int
) -> dict[str, Seen]:
    """The first process is the worker, the others are torch RPC's servers."""
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", num_worker_threads=4)
    name = "worker" if world.rank == 0 else f"server{world.rank - 1}"
    rpc.init_rpc(name, rank=world.rank, world_size=3, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    seen = lead(places, jobs, turns) if world.rank == 0 else {}
    rpc.shutdown()
    return seen


def lead(places: dict[str, Place], jobs: dict[str, list[int]], turns: int) -> dict[str, Seen]:
    """Be the worker."""
    gradient, servers = torch.randn(SIZE), dict(jobs)
    ours = {
        name: Pushed(place, 1 + (name == TWICE), name in (BYTES, SEALED, CURVE), seals=name != CURVE)
        for name, place in places.items()
    }
    values = {name: pushed.values[:SIZE] for name, pushed in ours.items()}
    makers: dict[str, Push] = {LIMIT: limit(1), LIMIT_TWICE: limit(2)}
    makers |= {name: pushed.push_pull for name, pushed in ours.items()}
    values[RPC] = torch.zeros(SIZE)
    makers[RPC] = by_rpc(values[RPC])
    servers[RPC] = [rpc.rpc_sync(f"server{i}", os.getpid) for i in range(2)]
    if importlib.util.find_spec("ray") is not None:
        for name in (RAY, RAY_ARRAYS):
            values[name] = torch.zeros(SIZE)
            makers[name], servers[name] = by_ray(values[name], as_array=name == RAY_ARRAYS)
    pushes = {name: partial(push, gradient) for name, push in makers.items()}
    seen = take_turns(pushes, turns, servers, rounds=ROUNDS)
    for name, found in values.items():  # all have made the same updates
        assert torch.allclose(found, gradient * -RATE * (turns + 2) * ROUNDS, rtol=1e-3, atol=1e-5), name
    for pushed in ours.values():
        pushed.link.close()
    if RAY in makers:
        import ray

        ray.shutdown()
    return seen


def measure(turns: int) -> Iterator[Section]:
    """One table."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        jobs = {
            name: stack.enter_context(Servers(encrypted=name != BYTES))
            for name in (ONCE, TWICE, BYTES, SEALED, CURVE)
        }
        places = {name: (job.address, job.keys) for name, job in jobs.items()}
        pids = {name: job.pids for name, job in jobs.items()}
        meeting = os.path.join(folder, "meeting")
        seen: dict[str, Seen] = spawn(contest, 3, places, pids, meeting, turns, timeout=600)[0]
    goals = [Goal(f"{RPC} / {ONCE}", ratio_of(seen, RPC, ONCE), 3.0, least=True)]
    notes = [
        f"{CURVE} / {BYTES} = {ratio_of(seen, CURVE, BYTES):.3f}",
        f"{LIMIT_TWICE} / {LIMIT} = {ratio_of(seen, LIMIT_TWICE, LIMIT):.3f}: where all cores are busy",
    ]
    if RAY in seen:
        goals.append(Goal(f"{RAY} / {ONCE}", ratio_of(seen, RAY, ONCE), 5.0, least=True))
    else:
        notes.append("Ray is not here; the head of benchmarks/server/push.py says how to have it take part")
    goals += goals_of_turns(seen, [(SEALED, BYTES, 2.0), (TWICE, ONCE, 1.3)])
    section = section_of_turns("push and pull: 64 MB, 1 worker, 2 servers", seen, LIMIT)
    yield replace(section, goals=goals, notes=notes)
