"""Who is here and how they talk: one World per process, and smaller ones cut from it.

A World of one worker needs no process group: every collective is the identity. So every exchange runs alone
too, by the same code.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.torch_private import all_gather, c10d, default_store, reduce_scatter
from shoal.world.devices import choose_device, small_backend, whole_backend
from shoal.world.gloo import from_rank
from shoal.world.launch import Launch
from shoal.world.network.compared import Network
from shoal.world.rendezvous import bind_gloo, in_attempt, open_store
from shoal.world.shm.backend import NAME, SharedMemoryGroup, register_backend
from shoal.world.shm.flatten import writable
from shoal.world.shm.memory import host_key
from shoal.world.traffic import Traffic as Traffic
from shoal.world.traffic import ring_bytes, share_of
from shoal.world.two_level.hierarchical import BORDER, HierarchicalCollectives, Routes

TIMEOUT = timedelta(minutes=10)


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        return None


DONE: Handle = _Done()


def _collective(method: Callable[..., Handle]) -> Callable[..., Handle]:
    """Do it outside of inference mode: what is made on the way is used again, and by threads that are not in it."""

    @wraps(method)
    def _call(world: World, *tensors: Any, **named: Any) -> Handle:
        if not torch.is_inference_mode_enabled():
            return method(world, *tensors, **named)
        with torch.inference_mode(mode=False):
            return method(
                world, *[writable(t) if isinstance(t, torch.Tensor) else t for t in tensors], **named
            )

    return _call


class World:
    """A set of workers and this worker's place among them.

    >>> world = World.alone()
    >>> world.rank, world.size, world.gather_values("hello")
    (0, 1, ['hello'])
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        hosts: Sequence[str],
        store: c10d.Store | None = None,
        group: dist.ProcessGroup | None = None,
        traffic: Traffic | None = None,
        members: Sequence[int] | None = None,
        launcher: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.hosts = tuple(hosts)
        """Which host each rank is on."""
        self.store = store
        self.group = group
        self.traffic = traffic or Traffic()
        self.members = tuple(range(size)) if members is None else tuple(members)
        """The number of each of these workers among all workers of the job."""
        self.launcher = launcher
        """Where our launcher listens to its workers; empty if another has started them."""
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}
        """The ways in which these workers have been arranged so far."""
        self.routes = Routes()
        """How groups that span hosts work on two levels; smaller worlds share it."""

    @staticmethod
    def alone(device: torch.device | None = None) -> World:
        """A world of one."""
        return World(0, 1, device or torch.device("cpu"), [""])

    @staticmethod
    def open(launch: Launch, backend: str = "auto", device: str = "auto") -> World:
        """Join the job that `launch` describes; a second call in one process finds the group of the first."""
        if launch.dry_run:  # the others are not there: to wait for them would be for ever
            raise RuntimeError(
                f"this process was started to find out: {launch.dry_run}. It cannot join a job."
            )
        where = choose_device(device, launch.local_rank)
        if launch.size == 1:
            return World.alone(where)
        register_backend()
        bind_gloo(launch)
        if dist.is_initialized():
            store = in_attempt(launch, default_store())
        else:
            store = in_attempt(launch, open_store(launch, TIMEOUT))
            name = whole_backend(backend, where)
            dist.init_process_group(
                name, store=store, rank=launch.rank, world_size=launch.size, timeout=TIMEOUT
            )
        # Through the store, before any group is made: which group is right depends on who shares a host.
        store.set(f"shoal/host/{launch.rank}", host_key(launch.host))
        hosts = [store.get(f"shoal/host/{rank}").decode() for rank in range(launch.size)]
        world = World(
            launch.rank, launch.size, where, hosts, store, dist.group.WORLD, launcher=launch.launcher
        )
        world.routes = Routes(store.add(f"shoal/opened/{launch.rank}", 1))  # all open worlds equally often
        return world

    @staticmethod
    def unjoined(launch: Launch, device: str = "auto") -> World:
        """A worker that knows its number and meets nobody: it joins no group, and its collectives are with itself."""
        where = choose_device(device, launch.local_rank)
        first = launch.rank - launch.local_rank
        own = range(first, first + launch.local_size)
        # Nobody is asked: `shoal run` starts as many on each host, and whoever is elsewhere has another name.
        hosts = [
            launch.host if rank in own else f"another-{rank // launch.local_size}"
            for rank in range(launch.size)
        ]
        return World(launch.rank, launch.size, where, hosts, launcher=launch.launcher)

    def alone_among(self) -> World:
        """This worker without a group: its collectives are with itself."""
        other = copy.copy(self)
        other.group = None
        return other

    def cut(self, groups: Sequence[Sequence[int]]) -> World:
        """The smaller world, of those given, that this worker is in. Every worker calls it with the same groups."""
        # A group more would cost memory and threads, and no call could tell it from this one.
        if list(groups[0]) == list(range(self.size)) and isinstance(self.group, SharedMemoryGroup):
            return self  # everybody, who share memory already
        mine = next(ranks for ranks in groups if self.rank in ranks)
        members = [self.members[rank] for rank in mine]
        if len(members) == 1:
            return self._smaller(members, None)
        # Only members meet to make a group, so that parts of the job may be cut in ways of their own.
        group = dist.new_group(members, backend=small_backend(self.device), use_local_synchronization=True)
        return self._smaller(members, group)

    def new_group(self) -> World:
        """These workers with a second group, whose collectives need not be in one order with those of the first."""
        if self.group is None:  # alone, or imagined
            return self
        group = dist.new_group(
            list(self.members), backend=small_backend(self.device), use_local_synchronization=True
        )
        return self._smaller(self.members, group)

    def wire(self) -> World:
        """These workers with a gloo group for a thread of each, so that it never interferes with our collectives."""
        if self.group is None:
            return self
        return self._smaller(
            self.members, dist.new_group(list(self.members), backend="gloo", use_local_synchronization=True)
        )

    def within(self, group: dist.ProcessGroup) -> World:
        """The smaller world of a process group that this worker is in."""
        return self._smaller(dist.get_process_group_ranks(group), group)

    def _smaller(self, members: Sequence[int], group: dist.ProcessGroup | None) -> World:
        me = members.index(self.members[self.rank])
        hosts = [self.hosts[self.members.index(member)] for member in members]
        smaller = World(me, len(members), self.device, hosts, self.store, group, self.traffic, members)
        smaller.routes = self.routes
        return smaller

    def abort(self) -> None:
        """A peer is gone: end the collectives of this group that are under way. No word to anybody.

        In shared memory nothing touches a tensor after this. Gloo has no such call: what it had begun may still write
        into its tensors until the dead peer's sockets are closed, so those must not be used again.
        """
        if self.group is not None:
            self.group.abort()

    def close(self) -> None:
        """Leave the job. Peers may already be gone, so nothing waits."""
        self.routes.close()
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()
        self.group = None

    # The collectives. Each returns a Handle at once; the tensors belong to the collective until wait() returns.
    # They call the process group itself: the functions of torch.distributed around it cost several microseconds
    # more and change their names between versions.

    @_collective
    def all_reduce(self, tensor: torch.Tensor) -> Handle:
        """Sum over all ranks, in place."""
        if self.group is None:
            return DONE
        if (
            hierarchical := self._way(tensor, ring_bytes(tensor.numel() * tensor.itemsize, self.size))
        ) is not None:
            return hierarchical.all_reduce(tensor)
        if (network := self._network) is not None:
            return network.all_reduce(tensor)
        return self._group.allreduce([tensor], c10d.AllreduceOptions())

    @_collective
    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        """Sum over all ranks; rank r keeps slice r in `out`, which may be that slice of `tensor` itself."""
        if self.group is None:
            if out.data_ptr() != tensor.data_ptr():
                out.copy_(tensor)
            return DONE
        if (hierarchical := self._way(tensor, self.share_of(tensor))) is not None:
            return hierarchical.reduce_scatter(out, tensor)
        if (network := self._network) is not None:
            return network.reduce_scatter(out, tensor)
        return reduce_scatter(self._group, out, tensor)

    @_collective
    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Handle:
        """`out` becomes the parts of all ranks, in rank order; `part` may lie in its place in `out`."""
        if self.group is None:
            if out.data_ptr() != part.data_ptr():
                out.copy_(part)
            return DONE
        if (hierarchical := self._way(out, self.share_of(out))) is not None:
            return hierarchical.all_gather(out, part)
        if (network := self._network) is not None:
            return network.all_gather(out.chunk(self.size) if out.numel() else [out] * self.size, part)
        return all_gather(self._group, out, part)

    @_collective
    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> Handle:
        """Slice r of `tensor` goes to rank r; `out` gets one slice from every rank, in rank order."""
        if self.group is None:
            out.copy_(tensor)
            return DONE
        self.traffic.count(self.share_of(tensor), self._elsewhere)
        if (network := self._network) is not None:
            return network.all_to_all(out, tensor)
        return self._group.alltoall_base(out, tensor, [], [], c10d.AllToAllOptions())

    @_collective
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Handle:
        """`tensor` of every rank becomes that of rank `source`."""
        if self.group is None:
            return DONE
        if (hierarchical := self._way(tensor, tensor.nbytes if self.rank == source else 0)) is not None:
            return hierarchical.broadcast(tensor, source)
        if (network := self._network) is not None:
            return network.broadcast(tensor, source)
        return self._group.broadcast([tensor], from_rank(source))

    def send(self, tensor: torch.Tensor, to: int) -> Handle:
        """Give a tensor to one rank, which receives it. Messages of a pair arrive in order."""
        self.traffic.count(tensor.nbytes, float(self.hosts[to] != self.hosts[self.rank]))
        return self._group.send([tensor], to, 0)

    def receive(self, tensor: torch.Tensor, source: int) -> Handle:
        """Fill a tensor with what one rank sends."""
        return self._group.recv([tensor], source, 0)

    def barrier(self) -> None:
        """Wait until everybody is here."""
        if self.group is not None:
            self.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu")).wait()

    def gather_numbers(self, mine: Sequence[float]) -> torch.Tensor:
        """A float64 table with one row per rank."""
        table = torch.zeros(self.size, len(mine), dtype=torch.float64, device="cpu")
        table[self.rank] = torch.tensor(mine, dtype=torch.float64, device="cpu")
        self.all_reduce(table).wait()  # every other row is zero, so the sum is exact
        return table

    def gather_values(self, mine: object) -> list[Any]:
        """The JSON value of every rank, in rank order."""
        if self.group is None:
            return [mine]
        # JSON, not pickle: what comes from others is data, and nothing in it is run.
        text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        sizes = self.gather_numbers([text.numel()])[:, 0].to(torch.int64).tolist()
        longest = max(sizes)
        # all_gather takes equal parts.
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: text.numel()] = text
        table = torch.zeros(self.size * longest, dtype=torch.uint8, device="cpu")
        self.all_gather(table, padded).wait()
        rows = table.view(self.size, longest)
        return [json.loads(bytes(rows[r, : int(n)].tolist())) for r, n in enumerate(sizes)]

    @cached_property
    def hierarchical(self) -> HierarchicalCollectives | None:
        """These workers as hosts with as many workers each, if they are and the group is ours."""
        if self.group is None or self.store is None or self.device.type != "cpu":
            return None
        if NAME not in dist.get_backend(self.group):
            return None  # plain gloo was asked for
        return self.routes.of(self.group.group_name, self.store, self.hosts, self.members, self.rank)

    @cached_property
    def _elsewhere(self) -> float:
        """The share of the other workers that are on other hosts."""
        return sum(host != self.hosts[self.rank] for host in self.hosts) / max(self.size - 1, 1)

    def _way(self, tensor: torch.Tensor, nbytes: int) -> HierarchicalCollectives | None:
        """Two levels or one, for a tensor of that size; count what it sends: on two as much, and less of it leaves."""
        hierarchical = self.hierarchical if tensor.nbytes >= BORDER else None
        self.traffic.count(
            nbytes, self._elsewhere / (1 if hierarchical is None else hierarchical.seating.width)
        )
        return hierarchical

    @cached_property
    def _network(self) -> Network | None:
        """What compares calls, where the group is gloo and does not do so itself."""
        if self.device.type != "cpu" or isinstance(self.group, SharedMemoryGroup):
            return None
        return self.routes.network(self._group, self.store, self.members, self.rank)

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self.group is not None
        return self.group

    def share_of(self, tensor: torch.Tensor) -> int:
        """The bytes of a tensor that other workers must get, or give."""
        return share_of(tensor.numel() * tensor.itemsize, self.size)
