"""The work handles of collectives, and the driver that carries them out.

A group's collectives run strictly in the order they were issued; one thread at a time drives the first of
them. Which thread is open:

- a blocking call on an idle group is driven by its caller, start to end: handing it over would cost more;
- an asynchronous call on an idle group publishes its first round at once, and a worker thread does the rest;
- whoever waits drives as well, if nobody does already.

A single asynchronous one-round collective does not even wake the worker: all that peers need from this rank
is published, so they can finish, and this rank finishes when it waits. The next collective wakes the worker.

Who ends a collective whose future was asked for runs the callbacks of that future, and remains the driver meanwhile.
A collective that a callback issues is done at once and in its place: right after the one whose callback it is, before
whatever else is queued, on every rank. So a callback can wait for it, and ranks whose threads run at other speeds
still agree on the order.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

import torch
from torch import Tensor
from torch.distributed import Work

from shoal.torch_private import untraced
from shoal.world.shm.collectives import Rounds
from shoal.world.shm.flags import CollectiveTimeout, Flags, GroupLost, Needs, WaitedLongEnough

_OVER = Needs([], 0)
"""In the place of what a round needs: there are no more rounds."""


@untraced
class SharedWork(Work):
    """One collective: under way, done or failed."""

    # Where each begins: as attributes of the class they cost a small collective nothing.
    started = False
    compared = False
    needs: Needs | None = None
    deadline = until = math.inf
    done = False
    error: BaseException | None = None
    _future: torch.futures.Future[list[Tensor]] | None = None
    _bell: threading.Event | None = None

    def __init__(
        self,
        driver: Driver,
        name: str,
        call: int,
        rounds: Rounds,
        results: Sequence[Tensor],
        after: After,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.call = call
        """What the ranks compare in its first round; see `calls`."""
        self.rounds = rounds
        self.timeout = driver.timeout if timeout is None else timeout
        self._driver = driver
        self._results = results
        self._after = after

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the results are there; raise what went wrong otherwise.

        After `timeout` it raises as well, and the collective goes on.
        """
        if not self.done:
            self._driver.drive_until(self, timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return True

    def sleep(self, until: float) -> bool:
        """Wait until another thread has done it; False if it is not at that time."""
        with self._driver.lock:
            if self.done:
                return True
            bell = self._bell = self._bell or threading.Event()
        return bell.wait(None if until == math.inf else max(0.0, until - time.monotonic()))

    def is_completed(self) -> bool:
        if not self.done:
            self._driver.wake()
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[Tensor]:
        return list(self._results)

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        with self._driver.lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.done:
                    self._settle(self._future)
        if not self.done:
            self._driver.wake()
        return self._future

    def finish(self, error: BaseException | None) -> bool:
        """The driver's last word on this collective; whether somebody has asked for its future."""
        if error is None:
            try:
                for step in self._after:
                    step()
            except Exception as failure:
                error = failure
        self.error = error
        self._after = ()
        with self._driver.lock:
            self.done = True
            future = self._future
            bell = self._bell
        # Outside of the lock: whoever wakes may take it at once.
        if bell is not None:
            bell.set()
        return future is not None

    def settle(self) -> None:
        """Run the callbacks of its future."""
        self._settle(cast("torch.futures.Future[list[Tensor]]", self._future))

    def _settle(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if self.error is None:
            future.set_result(list(self._results))
        else:
            future.set_exception(self.error)  # type: ignore[arg-type]


After = Sequence[Callable[[], object]]
"""What is left to do when the last round is over, such as copying back into a tensor with strides."""


class Driver:
    """The queue of one group, and the threads that may work on it."""

    def __init__(self, flags: Flags, timeout: float, label: str) -> None:
        self.timeout = timeout
        """Seconds that a collective may wait in all, if its call says nothing else."""
        self.lock = threading.Lock()
        """Guards the moment a work becomes done against someone asking for its future."""
        self._flags = flags
        self._label = label
        self._queue: deque[SharedWork] = deque()
        self._driving = threading.Lock()
        self._in_callback = 0
        """The thread that drives, while it runs callbacks."""
        self._waiting = 0
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # The worker thread holds only a weak reference; when the driver is collected, False ends the thread.
        weakref.finalize(self, self._bell.put, False)

    def run(self, work: SharedWork) -> None:
        """Issue a collective whose caller blocks on it."""
        if self._in_callback and self._is_callback():
            self._complete(work, patient=True)
            return
        # Fast path: nothing queued and nobody drives, so the caller runs its collective without a queue or a thread.
        if not self._queue and self._driving.acquire(blocking=False):
            try:
                if not self._queue:
                    self._complete(work, patient=True)
                    return
            finally:
                self._driving.release()
        self._queue.append(work)
        self.drive_until(work, 0.0)

    def issue(self, work: SharedWork, one_round: bool) -> None:
        """Issue a collective that goes on by itself; one of `one_round` may rest until someone waits."""
        if self._in_callback and self._is_callback():
            self._complete(work, patient=True)
            return
        self._queue.append(work)
        alone = False
        if self._driving.acquire(blocking=False):
            try:
                # Publish at once if nothing is ahead: peers can go on, though nobody here waits yet.
                alone = len(self._queue) == 1 and self._queue[0] is work
                if alone:
                    self._start(work)
            finally:
                self._driving.release()
        if not (alone and one_round):
            self.wake()

    def drive_until(self, work: SharedWork, timeout: float) -> None:
        """Take part in driving until `work` is done; raise after `timeout` seconds, if above 0."""
        until = time.monotonic() + timeout if timeout > 0 else math.inf
        self._waiting += 1  # only a hint for how long to poll
        try:
            while not work.done:
                if self._in_callback and self._is_callback():
                    self._drive_first(True, until)
                elif self._driving.acquire(blocking=False):
                    try:
                        if not work.done and self._queue:
                            self._drive_first(True, until)
                    finally:
                        self._driving.release()
                else:
                    # Somebody drives. Waiting for the lock instead could last beyond this work, until one behind it is
                    # done; and that one may need what our caller does next.
                    self.wake()  # in case they stop before they come to it
                    if not work.sleep(until):
                        raise WaitedLongEnough
        except WaitedLongEnough:
            raise CollectiveTimeout(
                f"rank {self._flags.rank} waited {timeout:g} s for {work.name}, which goes on: "
                f"Timed out waiting {timeout * 1e3:.0f}ms."
            ) from None
        finally:
            self._waiting -= 1

    def wake(self) -> None:
        """Have the worker thread drive whatever is queued."""
        if self._thread is None:
            with self.lock:
                if self._thread is None:
                    args = (weakref.ref(self), self._bell)
                    self._thread = threading.Thread(target=_serve, args=args, name=self._label, daemon=True)
                    self._thread.start()
        self._bell.put(True)

    def drain(self) -> None:
        """Drive until nothing is queued; the worker thread's share of the work."""
        while self._queue:
            with self._driving:
                if self._queue:
                    self._drive_first(patient=self._waiting > 0)

    def abort(self) -> None:
        """End every collective under way with an error; when this returns, none of them touches memory any more."""
        self._flags.abort()
        if self._is_callback():
            self._fail_all()
        else:
            with self._driving:  # whoever drives gives up soon
                self._fail_all()
        self.close()

    def close(self) -> None:
        """Let the worker thread end."""
        self._bell.put(False)

    def _is_callback(self) -> bool:
        """Whether this thread drives already: it runs a callback of a collective that it has ended."""
        return self._in_callback == threading.get_ident()

    def _fail_all(self) -> None:
        self._failure = self._failure or GroupLost(f"rank {self._flags.rank}'s group was aborted")
        while self._queue:
            work = self._queue.popleft()
            if work.finish(self._failure):
                work.settle()

    def _drive_first(self, patient: bool, until: float = math.inf) -> None:
        # Read, not popped: until it is over, `issue` has to see that it is not the first.
        work = self._queue[0]
        work.until = until
        has_future = self._complete(work, patient)
        self._queue.popleft()
        if has_future:
            outer = self._in_callback
            self._in_callback = threading.get_ident()
            try:
                work.settle()
            finally:
                self._in_callback = outer

    def _start(self, work: SharedWork) -> None:
        """Publish the first round. Never waits: an idle group has read all it needs of the round before."""
        work.started = True
        if self._failure is None:
            try:
                work.needs = next(
                    work.rounds, None
                )  # what has no rounds has one nevertheless, to be compared in
                # Call before counter: who sees the counter finds the call beside it.
                self._flags.say(work.call)
                self._flags.publish()
            except BaseException as error:
                self._failure = error

    def _complete(self, work: SharedWork, patient: bool) -> bool:
        """Do what is left of a collective; whether somebody has asked for its future."""
        flags = self._flags
        rounds = work.rounds
        if not work.started:
            self._start(work)
        try:
            while self._failure is None and work.needs is not _OVER:
                if not work.compared:
                    flags.wait(None, work, patient)  # all have begun it, whatever its first round needs
                    flags.compare()
                    work.compared = True
                    if work.needs is not None:
                        flags.wait(work.needs, work, patient)
                else:
                    flags.wait(work.needs, work, patient)
                work.needs = next(rounds, _OVER)
                if work.needs is not _OVER:
                    flags.publish()
        except WaitedLongEnough:
            raise
        except BaseException as error:
            # The ranks no longer agree which round they are in, so nothing can follow on this group.
            self._failure = error
        work.rounds = iter(())
        return work.finish(self._failure)


def _serve(driver: weakref.ref[Driver], bell: queue.SimpleQueue[bool]) -> None:
    """The worker thread. It holds no reference while idle, so a group that is dropped goes away."""
    while bell.get():
        here = driver()
        if here is None:
            return
        here.drain()
        del here
