"""Waiting for the workers: one selector over process descriptors, pipes and the launcher's signals.

No thread runs: a worker's end, a line of output and Ctrl-C each wake the launcher at once. Once a second it looks
whether the workers move (stalls.py).
"""

from __future__ import annotations

import math
import os
import select
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from shoal.cluster import output, report
from shoal.cluster.process_state import is_dying
from shoal.cluster.stalls import LOOK_SECONDS, Stalls
from shoal.cluster.worker import STOP_SIGNALS
from shoal.errors import WorkerFailed
from shoal.world.failure import YIELD_CODE
from shoal.world.progress_page import Phase, Place, ProgressPage

GATHER_SECONDS = 0.5
"""How long after the first bad end the others may still report: theirs may be the earlier cause."""
DYING_SECONDS = 60.0
"""The same for one that is being killed: the kernel frees its memory first, which takes a second for several GB."""
GRACE_SECONDS = 2.0
"""How long after a polite signal the rest is killed."""
FINISH_SECONDS = 600.0
"""The same for workers that finish a step and save it first."""
FINISHING = "finishing-"
"""The prefix of the files that such workers create in the private folder."""


class Interrupts:
    """Turns Ctrl-C, SIGTERM and SIGHUP into bytes in a pipe that the selector waits for. Use as a context."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.descriptors: tuple[int, int] = (-1, -1)
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
        self._wakeup = -1

    def __enter__(self) -> Interrupts:
        self.descriptors = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._wakeup = signal.set_wakeup_fd(self.descriptors[1], warn_on_full_buffer=False)
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, _wake_only)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._handlers:
            signal.set_wakeup_fd(self._wakeup)
        for descriptor in self.descriptors:
            os.close(descriptor)

    def collect(self) -> None:
        """Read the pipe: each byte is the number of a signal."""
        numbers = os.read(self.descriptors[0], 64)
        self.received += [signal.Signals(n) for n in numbers if n in STOP_SIGNALS]

    def pause(self, seconds: float) -> None:
        """Sleep for so long, or until a signal comes."""
        if select.select([self.descriptors[0]], [], [], seconds)[0]:
            self.collect()

    def obey(self) -> None:
        """End this process if a signal has come; nothing runs that would have to be ended first."""
        if self.received:
            number = self.received[0]
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block signals while workers start: none may reach a worker before its handlers are set."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wake_only(_number: int, _frame: FrameType | None) -> None:
    """The wakeup descriptor carries the signal; the handler only keeps the default action away."""


class Crew:
    """The workers of this host while they run."""

    def __init__(
        self,
        folder: str,
        size: int,
        interrupts: Interrupts,
        host: str = "",
        stalls: Stalls | None = None,
        hurries: bool = False,
    ) -> None:
        """`folder`: the job's private one. `stalls`: looks whether the workers move; None: nobody does.

        `hurries`: the workers may be started again, so nobody waits for what cannot change the first cause.
        """
        self.ended: Callable[[int], None] = lambda _: None
        """Called when a worker has ended, however it did."""
        self.replace: Callable[[int], bool] = lambda _: False
        """Called when a worker was killed by a signal; True if another has been started in its place."""
        self.independent: Callable[[], bool] = lambda: False
        """Whether the workers do not need each other: they meet at servers only."""
        self._look_at_others: Callable[[], None] = lambda: None
        self._others = -1
        self._folder = folder
        self._size = size
        self._host = host
        self._stalls = stalls
        self._hurries = hurries
        self._own: list[int] = []
        self._pages: dict[int, ProgressPage] = {}
        self._dispensed: set[int] = set()
        """Workers that were ended because all there was to do had been done without them."""
        self._interrupts = interrupts
        self._pids: dict[int, int] = {}
        self._endings: list[report.Ending] = []
        self._relays: list[output.Relay] = []
        self._ending = False
        self._yielding = False
        self.yielded = False
        """Whether a worker has ended because it was asked to."""
        self._selector = selectors.EpollSelector()
        self._selector.register(interrupts.descriptors[0], selectors.EVENT_READ, interrupts.collect)

    def attend(self, descriptor: int, action: Callable[[], None]) -> None:
        """Call `action` whenever the descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def forget(self, descriptor: int) -> None:
        """Stop watching a descriptor."""
        self._selector.unregister(descriptor)

    def hear_others(self, descriptor: int, hear: Callable[[], None], look: Callable[[], None]) -> None:
        """Call `hear` when it is readable, and `look` once a second; both may raise `WorkerFailed`."""
        self._others = descriptor
        self._look_at_others = look
        self.attend(descriptor, hear)

    def forget_others(self) -> None:
        """The workers end: nothing that happens elsewhere matters to them any more."""
        if self._others >= 0:
            self.forget(self._others)
            self._others = -1
            self._look_at_others = lambda: None

    def keep_from_workers(self, descriptor: int) -> None:
        """A descriptor that only the launcher may hold."""
        self._own.append(descriptor)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that a forked worker inherits and must close."""
        watched = [key.fd for key in self._selector.get_map().values()]
        return [self._selector.fileno(), self._interrupts.descriptors[1], *watched, *self._own]

    def add(
        self, rank: int, pid: int, relays: Iterable[output.Relay], page: ProgressPage | None = None
    ) -> None:
        """Watch one more worker; `page`: where it writes how far it is."""
        self._pids[rank] = pid
        if page is not None:
            self._pages[rank] = page
            if self._stalls is not None:
                self._stalls.add(rank, pid, page)
        descriptor = os.pidfd_open(pid)
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._reap(rank, descriptor))
        for relay in relays:
            self._relays.append(relay)
            self._selector.register(relay.source, selectors.EVENT_READ, lambda relay=relay: self._pump(relay))

    def watch(self, seconds: float | None = None) -> None:
        """Return when all workers have ended well, or after so many seconds; raise the first cause as soon as one
        has not."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while self._pids and not self._failed and not self._interrupts.received:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._wait(min(left, LOOK_SECONDS) if self._stalls is not None or seconds is not None else None)
            self._look()
        if self._failed:
            # A kill is nobody's consequence, so it stands already.
            killed = any(ending.code == -signal.SIGKILL for ending in self._endings)
            self._wait_for_all(0.0 if killed and self._hurries else GATHER_SECONDS, 0)
            self._wait_for_the_dying()
        if self._interrupts.received:
            number = self._interrupts.received[0]
            self.end(number)
            self._say_what_is_saved(number)
            self._interrupts.obey()
        if self._failed:
            raise report.first_cause(self._endings, self._size)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the workers that still run: by this signal, and after a grace time, or a second Ctrl-C, by SIGKILL."""
        self._ending = True
        first = len(self._interrupts.received[:1])  # the one that ends them; both may have come by now
        self._send(number)
        self._wait_for_all(GRACE_SECONDS, first)
        if any(name.startswith(FINISHING) for name in os.listdir(self._folder)):
            try:
                self._wait_for_all(FINISH_SECONDS, first, looks=True)
            except WorkerFailed as hung:  # it will not finish
                say(str(hung))
        self._send(signal.SIGKILL)
        while self._pids:
            self._wait(None)

    def kill(self) -> None:
        """End the workers that still run, here and now: others will go on from what is kept elsewhere."""
        self._ending = True
        self._send(signal.SIGKILL)
        while self._pids:
            self._wait(None)

    def ask_to_yield(self) -> None:
        """Have all workers end after a step, for another number of them; whoever does so ends well."""
        self._yielding = True
        for page in self._pages.values():
            page.ask_to_yield()

    @property
    def works(self) -> bool:
        """Whether any worker runs."""
        return bool(self._pids)

    @property
    def reached(self) -> int:
        """The last step that any of the workers has begun."""
        return max((page.read().step for page in self._pages.values()), default=0)

    def close(self) -> None:
        """End the workers and pass on the last of their output."""
        self.end()
        for relay in self._relays:
            relay.finish()
        self._selector.close()

    def _look(self) -> None:
        """Whether the workers move; end those that do not, where the job is done without them."""
        self._look_at_others()
        if self._stalls is None or not self._pids:
            return
        independent = self.independent()
        self._stalls.look(independent)
        if independent and any(ending.code == 0 for ending in self._endings):
            for rank in set(self._stalls.dispensable()) - self._dispensed:
                self._dispensed.add(rank)
                say(f"worker {rank} does not move, and the job is done without it; it is ended.")
                os.kill(self._pids[rank], signal.SIGKILL)

    def _wait_for_the_dying(self) -> None:
        """Whoever has reported a lost peer has seen its sockets close; the peer's own end comes when it is all gone."""
        deadline = time.monotonic() + DYING_SECONDS
        while all(ending.is_consequence for ending in self._endings if ending.code != 0):
            if not any(map(is_dying, self._pids.values())) or time.monotonic() > deadline:
                return
            self._wait_for_all(GATHER_SECONDS, 0)

    def _say_what_is_saved(self, number: signal.Signals) -> None:
        """After a signal, unless the workers have finished and saved their step, and said so."""
        places = [page.read() for page in self._pages.values()]
        last = max(places, key=lambda place: place.step, default=Place())
        if last.step and not any(place.phase == Phase.ENDED for place in places):
            say(f"stopped by {number.name} {report.within(last)}. {report.resume(last, places)}")

    @property
    def _failed(self) -> bool:
        return any(ending.code != 0 for ending in self._endings)

    def _wait(self, seconds: float | None) -> None:
        for key, _ in self._selector.select(seconds):
            key.data()

    def _wait_for_all(self, seconds: float, signals: int, looks: bool = False) -> None:
        """Until all have ended, or more than so many signals have come."""
        deadline = time.monotonic() + seconds
        while self._pids and len(self._interrupts.received) <= signals:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._wait(min(left, LOOK_SECONDS) if looks else left)
            if looks and self._stalls is not None:
                self._stalls.look(self.independent())

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pids.values():
            os.kill(pid, number)  # not reaped yet, so the number cannot belong to another process

    def _reap(self, rank: int, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        pid = self._pids.pop(rank)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if self._stalls is not None:
            self._stalls.remove(rank)
        self.ended(rank)
        if self._yielding and code == YIELD_CODE:
            self.yielded = True
            code = 0
        if rank in self._dispensed:
            code = 0
        if code < 0 and not self._ending and self.replace(rank):
            return
        said = report.read(self._folder, rank)
        tail = output.tail(self._folder, rank)
        place = self._pages[rank].read() if rank in self._pages else Place()
        ending = report.Ending(rank, pid, time.monotonic(), code, said, tail, place, self._host)
        self._endings.append(ending)

    def _pump(self, relay: output.Relay) -> None:
        if not relay.pump():
            self._selector.unregister(relay.source)


def say(text: str) -> None:
    """One sentence of the launcher for the user."""
    print(f"shoal: {text}", file=sys.stderr, flush=True)
