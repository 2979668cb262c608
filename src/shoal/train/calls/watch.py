"""A thread of each rank that ends it when its calls are proven to differ from another rank's.

Whoever has waited in a call for a second publishes that in the job's store. Every rank looks there now and then, and
compares what it finds with what it has begun itself, whatever its script is doing at the time: see `call.py` for what
proves a difference. The first to find one leaves the sentence there, and every rank ends with it.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from time import monotonic, sleep
from typing import Any, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from shoal.errors import CallMismatch
from shoal.torch_private import PrefixStore, Store
from shoal.train.calls.call import Call, caller, different
from shoal.world.failure import is_lost_peer
from shoal.world.traffic import Traffic
from shoal.world.world import World

TICK_SECONDS = 0.5
WAIT_SECONDS = 1.0
"""So long a rank waits for the others in a call before it says so: most often they are there at once."""
LINGER_SECONDS = 0.75
"""So long a rank that has read the sentence stays, for others read it from a store that may end with this rank."""
LEAVE_SECONDS = 2.0
"""So long rank 0, whose process may hold the store, waits at the end of its script for those who still run."""


class Watch(threading.Thread):
    """The face calls of this process, in order; the script has one of it, however many Runs there are."""

    def __init__(self, world: World) -> None:
        super().__init__(name="shoal-calls", daemon=True)
        assert world.store is not None
        self.group = world.group
        self.calls = 0
        self.begun: list[int] = []
        """Steps that have been begun, by Run."""
        self.intervals: list[int] = []
        """So many steps lie between two at which all workers are sure to be, by Run."""
        self._world = (
            world.wire()
        )  # nothing else uses it, so that calls never pair up with a step's collectives
        self._world.device = torch.device("cpu")
        self._world.traffic = Traffic()
        own = world.store.clone()  # type: ignore[attr-defined]  # the script's may be busy waiting for a key
        self._store: Store = PrefixStore("shoal/calls", own)
        self._script = threading.get_ident()
        self._waiting: tuple[Call, float] | None = None
        self._published: Call | None = None
        self._known: list[Call] = []
        self._stopped = threading.Event()

    @staticmethod
    def of(world: World) -> Watch:
        """The one of this process; the first Run of a script makes it. Collective."""
        for thread in threading.enumerate():
            if isinstance(thread, Watch) and thread.group is world.group:
                return thread
        made = Watch(world)
        made.start()
        return made

    def compare(self, run: int, what: str) -> None:
        """All ranks have come to the same call, and go on; or raises `CallMismatch`."""
        self.calls += 1
        call = self._call(run, what, caller(sys._getframe()))
        self._waiting = (call, monotonic())
        signs = self._world.gather_numbers([crc32(f"{what} {call.rounds}".encode())])
        if not bool((signs == signs[0]).all()):
            self._refuse([_read(value) for value in self._world.gather_values(asdict(call))])
        self._waiting = None

    def _refuse(self, calls: list[Call]) -> NoReturn:
        first = calls[0]
        other = next(call for call in calls if (call.what, call.rounds) != (first.what, first.rounds))
        sentence = different(str(first), str(other), (first.what, other.what))
        self._store.set("verdict", sentence)
        raise CallMismatch(sentence)

    def explain(self, error: BaseException) -> None:
        """A peer is gone: raise `CallMismatch` if its calls were others than this rank's, which is why."""
        if not is_lost_peer(error):
            return
        try:
            sentence = self._look()
        except RuntimeError:  # the store went with it
            return
        if sentence:
            raise CallMismatch(sentence) from None

    def close(self) -> None:
        """The script has ended; others may still wait for this rank."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if getattr(sys, "last_value", None) is not None:
            return  # by an error of its own, which is what the user should see
        try:
            self._publish(self._call(len(self.begun) - 1, "", ""))
            self._store.set(f"ended/{self._world.rank}", "")
            others = [f"ended/{rank}" for rank in range(1, self._world.size)]
            until = monotonic() + (LEAVE_SECONDS if self._world.rank == 0 else 0.0)
            while monotonic() < until and not self._store.check(others):
                sleep(LEAVE_SECONDS / 100)
        except RuntimeError:  # the store has gone
            return

    def run(self) -> None:
        while not self._stopped.wait(TICK_SECONDS):
            try:
                sentence = self._look()
            except RuntimeError:  # no store, no job
                return
            if sentence:
                sleep(LINGER_SECONDS)
                raise CallMismatch(sentence)  # ends the process: see `world/failure.py`

    def _look(self) -> str:
        """The sentence for which this rank must end; empty if there is none."""
        waiting = self._waiting
        if waiting is not None and monotonic() - waiting[1] > WAIT_SECONDS:
            self._publish(waiting[0])
        while self._store.check([key := f"call/{len(self._known) + 1}"]):
            self._known.append(_read(json.loads(self._store.get(key))))
        if self._store.check(["verdict"]):
            return self._store.get("verdict").decode()
        sentence = next((text for call in self._known if (text := self._against(call))), "")
        if sentence:
            self._store.set("verdict", sentence)
        return sentence

    def _against(self, call: Call) -> str:
        """What proves that this rank cannot come to another's call any more."""
        # Steps first: a call that is made in between is counted, and then it is not too late for it.
        rounds = self._rounds()
        made = self.calls
        waiting = self._waiting
        me = self._world.rank
        if call.rank == me:
            return ""
        run = call.passed_by(rounds, made)
        if run is not None:
            where = caller(sys._current_frames().get(self._script), running=True)
            mine = f"rank {me} has gone on to step {self.begun[run]} at {where}"
        elif call.ended and made > call.number and waiting is not None:
            mine = str(waiting[0])
        else:
            return ""
        pair = sorted([(call.rank, str(call)), (me, mine)])
        return different(pair[0][1], pair[1][1], (call.what,))

    def _publish(self, call: Call) -> None:
        """Once for each call; and where many ranks wait in one call, by the first of them."""
        if call == self._published:
            return
        self._published = call
        if self._store.add(f"claim/{call.number}/{call.ended}/{call.rounds}", 1) == 1:
            self._store.set(f"call/{self._store.add('calls', 1)}", json.dumps(asdict(call)))

    def _call(self, run: int, what: str, where: str) -> Call:
        return Call(self._world.rank, self.calls, self._rounds(), self.begun[run], what, where)

    def _rounds(self) -> tuple[int, ...]:
        return tuple(-(-begun // every) for begun, every in zip(self.begun, self.intervals, strict=False))


def _read(value: dict[str, Any]) -> Call:
    return Call(**{**value, "rounds": tuple(value["rounds"])})


def watch_of(world: World) -> Watch | None:
    """The watch over these workers, if there are several and they meet in collectives. Collective."""
    if world.size == 1 or world.group is None or world.store is None or not dist.is_initialized():
        return None
    return Watch.of(world)
