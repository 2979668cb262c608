"""How workers that share memory wait for each other: one counter each, and a sleep the kernel can end.

Every rank owns some lines of the control page and only it writes there: a counter that never goes back, what it
calls (see `calls`), a mark that says "I sleep until that rank's counter is so far", and who it is (process id and
start time).
Waiting for a peer is reading its counter: a short poll first, since the peer is often only microseconds
behind, then perhaps sched_yield(2), then futex(2), called through ctypes so that other threads of this process
run meanwhile. Every 100 ms of sleep the waiter looks whether its peers still live.

Only for x86-64, where stores become visible in the order they were made: data first, counter second.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch.distributed import DistBackendError

from shoal.errors import PeerLost
from shoal.world.shm.calls import SEQUENCE, mismatch
from shoal.world.shm.memory import SharedRegion

_SYS_FUTEX = 202
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYBODY = 2**31 - 1
_STRIDE = 32
"""Words per rank: four cache lines, so that no line has two writers and the prefetcher joins none."""
_COUNTER = 0
_CALL = 1
"""Two words in turn: who has published the first round of a collective may be in the next, but not two further."""
_SLEEPS = 8
_PID = 16
_START = 17
_LEFT = 18
_REACHED = 19
_PASSED = 20
_FAILED = 21
_LOOK = 0.1
"""Seconds of sleep between two looks at whether the peers live."""
_POLLS_TOGETHER = 1500
"""Polls before sleeping when each worker can have a core: about as long as a sleep and a wake take."""
_POLLS_CROWDED = 8
"""Polls before sleeping with more workers than cores: the peer may need this very core to get there."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def supported() -> bool:
    """Whether this machine orders stores as the counters need, and knows futex by the number used here."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32


def control_bytes(size: int) -> int:
    """Bytes of the control page for `size` ranks."""
    return -(-size * _STRIDE * 8 // 4096) * 4096


class Needs(NamedTuple):
    """What a rank waits for, where that is not simply everybody's present round."""

    counts: list[tuple[int, int]]
    """Pairs of a peer and how far its counter must be ahead of mine (or may be behind, if negative)."""
    left: int
    """Rounds this rank has yet to publish in this collective: a peer that ends before its own is lost."""
    brief: bool = False
    """Whether the peers' steps take no longer than a sleep and a wake. With more workers than cores this rank then
    first offers its core once; not for long steps, since whoever offers loses a turn to programs of others."""


class CollectiveTimeout(TimeoutError, DistBackendError):
    """A collective has not come to its end in time."""


class GroupLost(PeerLost, DistBackendError):
    """PeerLost, in the class that users of torch.distributed catch as well."""


class Waiter(Protocol):
    """The collective that somebody waits in."""

    name: str
    timeout: float
    """Seconds it may wait in all."""
    deadline: float
    """When these are over; infinite until it first has to sleep."""
    until: float
    """When its caller wants to be told that it is not done yet."""


class WaitedLongEnough(Exception):
    """The time that a caller gave is over; the collective goes on."""


class Flags:
    """This rank's counter and its view of everybody's. One thread at a time may use it."""

    def __init__(self, region: SharedRegion, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.count = 0
        """Rounds this rank has published."""
        self.calls = 0
        """Collectives this rank has begun."""
        self._aborted = False
        self._words = region.words(0, size * _STRIDE)
        anchor = region.tensor(torch.uint8, 0, 1)
        self._address = anchor.data_ptr()
        self._anchor = anchor  # keeps the mapping alive as long as the raw address is in use
        self._mine = rank * _STRIDE + _COUNTER
        self._my_call = rank * _STRIDE + _CALL
        self._called = 0
        self._my_sleep = rank * _STRIDE + _SLEEPS
        peers = [(rank + step) % size for step in range(1, size)]
        self._counters = [peer * _STRIDE + _COUNTER for peer in peers]
        self._calls = [[peer * _STRIDE + _CALL + turn for peer in peers] for turn in (0, 1)]
        self._sleeps = [peer * _STRIDE + _SLEEPS for peer in peers]
        self._crowded = size > len(os.sched_getaffinity(0))
        self._fence = threading.Lock()
        # One structure for all sleeps: making a ctypes object costs more than a poll.
        self._pause = _Timespec(0, int(_LOOK * 1e9))
        libc = ctypes.CDLL(None)
        self._futex = libc.syscall
        self._yield = libc.sched_yield
        number = ctypes.c_long
        pointer = ctypes.c_void_p
        self._futex.argtypes = [number, pointer, number, number, pointer, pointer, number]
        self._words[rank * _STRIDE + _PID] = os.getpid()
        self._words[rank * _STRIDE + _START] = _start_time(os.getpid())

    def abort(self) -> None:
        """From any thread: who waits here gives up within `_LOOK` seconds, and so do peers that wait for this rank."""
        self._aborted = True
        self._words[self.rank * _STRIDE + _LEFT] = 1

    def say(self, call: int) -> None:
        """Beside the next round that is published stands which collective it begins."""
        self.calls = calls = self.calls + 1
        self._called = call = call | (calls & 3) << SEQUENCE
        # Two places in turn: a rank one collective ahead writes its next call while a slow one still compares this one.
        # The low bits of the count tell two equal calls one after the other apart.
        self._words[self._my_call + (calls & 1)] = call

    def compare(self) -> None:
        """Raise if another rank, which has published that round as well, has begun another collective."""
        words = self._words
        called = self._called
        for place in self._calls[self.calls & 1]:
            if words[place] != called:
                turn = self.calls & 1
                raise mismatch([words[rank * _STRIDE + _CALL + turn] for rank in range(self.size)])

    def reach_barrier(self) -> int:
        """This rank has come to its next monitored barrier; which one that is."""
        self._words[self.rank * _STRIDE + _REACHED] += 1
        return self._words[self.rank * _STRIDE + _REACHED]

    def has_reached(self, rank: int, number: int) -> bool:
        """Whether that rank has come to that monitored barrier."""
        return self._words[rank * _STRIDE + _REACHED] >= number

    def end_barrier(self, number: int, passed: bool) -> None:
        """Rank 0's word on a monitored barrier."""
        self._words[_PASSED if passed else _FAILED] = number

    def barrier_verdict(self, number: int) -> bool | None:
        """Whether all have passed that monitored barrier; None while that is open."""
        if self._words[_PASSED] >= number:
            return True
        return False if self._words[_FAILED] >= number else None

    def check_alive(self, what: str) -> None:
        """Raise if one of the others has ended."""
        for peer in range(self.size):
            pid = self._words[peer * _STRIDE + _PID]
            if pid and _start_time(pid) != self._words[peer * _STRIDE + _START]:
                raise GroupLost(f"rank {peer} (pid {pid}) ended while rank {self.rank} waited in {what}.")

    def publish(self) -> None:
        """Say that this rank has written its part of the next round."""
        words = self._words
        self.count += 1
        words[self._mine] = self.count
        # The counter must be visible before the marks are read, or a peer could mark itself, miss the new
        # count and sleep through it. Taking a lock is the cheapest full fence Python has.
        with self._fence:
            pass
        for sleeps in self._sleeps:
            mark = words[sleeps]
            # The mark is target * size + rank (see `_wait`): wake only who sleeps on this rank, and only if it is far
            # enough.
            if mark and mark % self.size == self.rank and mark // self.size <= self.count:
                word = self._address + 8 * self._mine
                self._futex(_SYS_FUTEX, word, _FUTEX_WAKE, _EVERYBODY, None, None, 0)
                return

    def wait(self, needs: Needs | None, what: Waiter, patient: bool = True) -> None:
        """Return when all ranks have published as many rounds as this one, or those that `needs` asks for.

        `patient`: poll for long, since nothing else in this process needs the core.
        """
        words = self._words
        target = self.count
        polls = _POLLS_CROWDED if self._crowded or not patient else _POLLS_TOGETHER
        if needs is None:
            for counter in self._counters:
                if words[counter] < target:
                    self._wait(counter, target, target, what, polls)
            return
        for peer, ahead in needs.counts:
            counter = peer * _STRIDE + _COUNTER
            if words[counter] < target + ahead and needs.brief and patient and self._crowded:
                self._yield()
            if words[counter] < target + ahead:
                self._wait(counter, target + ahead, target + needs.left, what, polls)

    def _wait(self, counter: int, target: int, goal: int, what: Waiter, polls: int) -> None:
        words = self._words
        for _ in range(polls):
            if words[counter] >= target:
                return
        now = time.monotonic()
        next_look = now + _LOOK
        what.deadline = min(what.deadline, now + what.timeout)
        end = min(what.deadline, what.until)
        # The mark is set before the counter is read again, the counter published before marks are read (`publish`): one
        # of both sees the other, so no wake-up is lost.
        words[self._my_sleep] = target * self.size + counter // _STRIDE
        try:
            while (seen := words[counter]) < target:
                pause = min(_LOOK, end - time.monotonic())
                self._pause.nanoseconds = max(1, int(pause * 1e9))
                # The kernel compares the low half of the counter with `seen` before it puts us to sleep.
                word = self._address + 8 * counter
                low = seen & 0xFFFFFFFF
                self._futex(_SYS_FUTEX, word, _FUTEX_WAIT, low, ctypes.addressof(self._pause), None, 0)
                if self._aborted:
                    raise GroupLost(f"rank {self.rank} gave up {what.name}: the group was aborted")
                now = time.monotonic()
                if words[counter] < target and now >= min(next_look, end):
                    self._look(counter // _STRIDE, goal, what, now)
                    next_look = now + _LOOK
        finally:
            words[self._my_sleep] = 0

    def _look(self, awaited: int, goal: int, what: Waiter, now: float) -> None:
        """Raise if someone has ended before publishing round `goal`, or if the time is up."""
        words = self._words
        for peer in [awaited, *range(self.size)]:
            pid = words[peer * _STRIDE + _PID]  # 0: still being made
            late = words[peer * _STRIDE + _COUNTER] < goal
            if late and words[peer * _STRIDE + _LEFT]:
                raise GroupLost(
                    f"rank {peer} (pid {pid}) has aborted the group that rank {self.rank} waits in for {what.name}"
                )
            # A pid can be used again by another process; its start time tells.
            if not pid or not late or _start_time(pid) == words[peer * _STRIDE + _START]:
                continue
            if words[peer * _STRIDE + _COUNTER] < goal:  # it may have published just before it ended
                raise GroupLost(
                    f"rank {peer} (pid {pid}) ended while rank {self.rank} waited for it in {what.name}. "
                    "Its own log says why; this worker only noticed."
                )
        if now >= what.deadline:
            raise CollectiveTimeout(
                f"rank {self.rank} waited {what.timeout:g} s in {what.name} for rank {awaited} "
                f"(pid {words[awaited * _STRIDE + _PID]}), which lives but has not come to it: "
                f"Timed out waiting {what.timeout * 1e3:.0f}ms."
            )
        if now >= what.until:
            raise WaitedLongEnough


def _start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
