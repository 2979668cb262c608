"""What the coordinator knows of those who take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.server.protocol.signs_of_life import ServiceMessage
from shoal.server.protocol.view import LEDGER, View, place
from shoal.server.transport.shm_transport import host_of

_HOPELESS = 6
_CHILDREN = 2
ENDED = "all servers that this run had its state on have ended; start again from the last checkpoint."


@dataclass
class Server:
    """A server as the coordinator knows it."""

    address: str
    heard: float
    slot: int
    whole: set[int] = field(default_factory=set)
    epoch: int = 0
    gone: bool = False
    """Whether somebody has seen it end."""
    load: dict[str, float] = field(default_factory=dict)
    caught_up: set[int] = field(default_factory=set)
    """Shards that it is the tail of, and whose newcomer has nearly all that it has."""
    met: bool = False
    """Whether it has reported in the view that the coordinator goes by, or in an earlier one that it has kept to."""


@dataclass
class Worker:
    """A worker as the coordinator knows it."""

    heard: float
    rank: int
    held: float = 0.0
    """How long it has been working on one part, in seconds."""
    lost: bool = False
    address: str = ""
    """Where other workers can reach it; empty: nowhere."""


@dataclass(frozen=True)
class ServiceTerms:
    """What a job asks of its servers; the same from every worker."""

    sizes: tuple[int, ...]
    """Bytes of each shard, the ledger included."""
    kinds: tuple[str, ...]
    servers: int
    replicas: int
    patience: float
    """Seconds that a worker may hold a part before others get it."""

    @staticmethod
    def of(message: ServiceMessage) -> ServiceTerms:
        """As a worker says them: in this order, as plain values."""
        sizes, kinds, servers, replicas, patience = message
        return ServiceTerms(tuple(sizes), tuple(kinds), int(servers), int(replicas), float(patience))


def first_view(terms: ServiceTerms, known: Mapping[int, Server]) -> View:
    """The shards placed on as many servers as the job asks for."""
    # A fixed order: a coordinator that takes over decides as the first would have.
    chosen = sorted(known, key=lambda server: (known[server].slot, server))[: terms.servers]
    chains = place(terms.sizes, range(len(chosen)), terms.replicas, terms.kinds)
    return View(
        chains=tuple(tuple(chosen[slot] for slot in chain) for chain in chains),
        addresses={server: known[server].address for server in chosen},
        kinds=terms.kinds,
        replicas=terms.replicas,
        places=terms.servers,
        slots={server: slot for slot, server in enumerate(chosen)},
    )


def all_whole(view: View, known: Mapping[int, Server]) -> bool:
    """Whether every shard is whole on as many servers as it should be, by what all said in this view."""
    return (
        bool(view.chains)
        and not any(view.newcomers)
        and all(s in known and known[s].epoch == view.epoch for s in view.addresses)
        and all(
            len(chain) >= view.replicas and all(s in known and shard in known[s].whole for s in chain)
            for shard, chain in enumerate(view.chains)
        )
    )


def missing_copies(view: View) -> bool:
    """Whether a shard has fewer servers than it should have, those who catch up among them."""
    newcomers = view.newcomers or ((),) * len(view.chains)
    return any(len(c) + len(n) < view.replicas for c, n in zip(view.chains, newcomers, strict=True))


def is_given_up(who: int, view: View, known: Mapping[int, Server], now: float, silence: float) -> bool:
    """Whether a server has been silent for too long: for `silence`, if all that it holds is whole on others that were
    heard in that time, for that may lose nothing; and six times as long if not, for then the job cannot go on."""
    quiet = now - known[who].heard
    others = {
        s: server
        for s, server in known.items()
        if s != who and not server.gone and now - server.heard <= silence
    }
    return quiet > _HOPELESS * silence or (quiet > silence and _can_do_without(who, view, others))


def _can_do_without(who: int, view: View, others: Mapping[int, Server]) -> bool:
    return all(
        any(s in others and shard in others[s].whole for s in chain)
        for shard, chain in enumerate(view.chains)
        if who in chain
    )


def would_hold(view: View, who: int, epoch: int, whole: set[int]) -> set[int]:
    """The shards of a view that a server has whole, or will have when it takes the view, by what it has in its own."""
    since = view.since.get(who)
    mine = {shard for shard, chain in enumerate(view.chains) if who in chain}
    # It has seen no view: of a new job there is nothing to have, of an older one it lacks all.
    if epoch == 0:
        return mine if since is not None and since == view.born else set()
    return whole & mine if since is not None and since <= epoch else set()


def seemingly_lost(view: View, known: Mapping[int, Server]) -> list[list[Server]]:
    """For each shard that nobody is known to have whole: the servers of its chain that may be there."""
    left = [[known[s] for s in chain if s in known] for chain in view.chains]
    return [some for shard, some in enumerate(left) if not any(shard in server.whole for server in some)]


def lighter(view: View, busy: Mapping[int, float], uneven: float) -> View | None:
    """A step towards servers that are equally busy: one copy more of a shard, or one less; None if nothing helps."""
    chains = list(view.chains)
    for shard, chain in enumerate(chains):
        if len(chain) > view.replicas:  # all are whole, the one that came last too
            # Not the last in the chain: that copy was made to relieve the others.
            most = max(chain[:-1], key=lambda server: busy[server])
            chains[shard] = tuple(server for server in chain if server != most)
            return replace(view, chains=tuple(chains))
    most = max(busy, key=lambda s: busy[s])
    least = min(busy, key=lambda s: busy[s])
    # The ledger is small and asked by all: moving it would cost more than it brings.
    here = [shard for shard, chain in enumerate(chains) if shard != LEDGER and most in chain]
    movable = [shard for shard in here if least not in chains[shard]]
    if busy[most] - busy[least] < uneven or len(here) < 2 or not movable:
        return None
    newcomers = tuple((least,) if shard == movable[0] else () for shard in range(len(chains)))
    return replace(view, newcomers=newcomers)


def grown(view: View, known: Mapping[int, Server]) -> View | None:
    """The view in which newcomers that have caught up have their places in the chains; None if none has."""
    tails = [known.get(chain[-1]) for chain in view.chains]
    ready = {
        shard
        for shard, tail in enumerate(tails)
        if view.newcomer(shard) is not None and tail is not None
        if tail.epoch == view.epoch and shard in tail.caught_up
    }
    if not ready:
        return None
    newcomers = list(view.newcomers)
    chains = list(view.chains)
    for shard in ready:
        chains[shard] = (*chains[shard], newcomers[shard][0])
        newcomers[shard] = newcomers[shard][1:]
    return replace(view, chains=tuple(chains), newcomers=tuple(newcomers))


def heads_without_state(view: View, known: Mapping[int, Server]) -> list[int]:
    """Heads never get a state that they have not: they may have been left out by a view that is forgotten."""
    return [
        chain[0]
        for shard, chain in enumerate(view.chains)
        if chain[0] in known and known[chain[0]].epoch == view.epoch and shard not in known[chain[0]].whole
    ]


def repaired(view: View, alive: Mapping[int, Server], spare: Sequence[int]) -> View:
    """The view without those who are gone, and others in their places, who have to catch up first; or with the chains
    as they were, and why they cannot go on."""
    slots = {server: slot for server, slot in view.slots.items() if server in alive}
    # A server that joins takes the slot of one that is gone, so shards keep their places.
    free = sorted(set(range(view.places)) - set(slots.values()))
    joining = dict(zip(spare, free, strict=False))
    chains = []
    newcomers = []
    failed = ""
    for shard, chain in enumerate(view.chains):
        left = [server for server in chain if server in alive]
        # No copy that has all that was answered: going on would take back updates that workers have seen.
        if not any(shard in alive[server].whole for server in left):
            failed = lost_sentence(shard, view)
        # Whoever holds the shard whole comes first: the others get it from there.
        left.sort(key=lambda server: shard not in alive[server].whole)
        came = [s for s in (view.newcomers[shard] if view.newcomers else ()) if s in alive]
        more = [server for server in joining if server not in (*left, *came)]
        chains.append(tuple(left))
        newcomers.append((*came, *more[: max(0, view.replicas - len(left) - len(came))]))
    slots |= joining
    return replace(
        view,
        chains=view.chains if failed else tuple(chains),
        newcomers=view.newcomers if failed else tuple(newcomers),
        addresses={server: alive[server].address for server in slots},
        slots=slots,
        failed=failed,
    )


def lost_sentence(shard: int, view: View) -> str:
    """Why a job cannot go on."""
    what = "the ledger" if shard == LEDGER else f"shard {shard}"
    return (
        f"all servers that held {what} have ended, and with them its state ({view.replicas} "
        f"{'copy' if view.replicas == 1 else 'copies'} of each shard); start again from the last checkpoint, and use "
        f"replicas={view.replicas + 1} to survive this."
    )


def source_of(who: int, workers: Mapping[int, Worker]) -> tuple[int, str, bool] | None:
    """From whom a worker gets its first values, where that one listens, and whether others may get them from it.

    None: from nobody. Sources have lower ranks than those they serve, so nobody waits in a circle, whoever is missing.

    >>> one, two, three = (Worker(0.0, rank, address=f"tcp://10.0.0.{rank}:1") for rank in range(3))
    >>> far = 2**50  # another host
    >>> source_of(far + 7, {2**16: one, 2**16 + 1: two, far + 7: three})
    (65536, 'tcp://10.0.0.0:1', True)
    >>> source_of(2**16 + 1, {2**16: one, 2**16 + 1: two, far + 7: three})
    (65536, 'tcp://10.0.0.0:1', False)
    """
    reached = sorted((worker.rank, me) for me, worker in workers.items() if worker.address or me == who)
    first: dict[int, int] = {}
    for _, me in reached:
        first.setdefault(host_of(me), me)
    source = first[host_of(who)]
    leads = first[host_of(who)] == who
    if leads:
        # One worker a host, by rank: the nodes of the tree. Others of the host get theirs from that one, in memory.
        order = list(first.values())
        place = order.index(who)
        source = order[(place - 1) // _CHILDREN] if place else who
    return None if source == who else (source, workers[source].address, leads)
