"""Who drives a collective, and what its caller holds meanwhile.

A group's collectives run strictly in the order they were issued; one thread at a time drives the first of
them. Which thread is open:

- a blocking call on an idle group is driven by its caller, start to end: handing it over would cost more;
- an asynchronous call on an idle group publishes its first round at once, and a worker thread does the rest;
- whoever waits drives as well, if nobody does already.

A single asynchronous one-round collective does not even wake the worker: all that peers need from this rank
is published, so they can finish, and this rank finishes when it waits. The next collective wakes the worker.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from shoal.world.flags import Flags, Needs
from shoal.world.shm_ops import Rounds


class SharedWork(Work):
    """One collective: under way, done or failed."""

    def __init__(
        self, driver: Driver, name: str, rounds: Rounds, results: Sequence[Tensor], after: After
    ) -> None:
        super().__init__()
        self.name = name
        self.rounds = rounds
        self.started = False
        self.needs: Needs | None = None
        self.done = False
        self.error: BaseException | None = None
        self._driver = driver
        self._results = list(results)
        self._after = after
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._bell: threading.Event | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the results are there; raise what went wrong otherwise."""
        if not self.done:
            self._driver.drive_until(self, timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return True

    def sleep(self, timeout: float) -> bool:
        """Wait until another thread has done it; False after `timeout` seconds, if above 0."""
        with self._driver.lock:
            if self.done:
                return True
            bell = self._bell = self._bell or threading.Event()
        return bell.wait(timeout if timeout > 0 else None)

    def is_completed(self) -> bool:
        if not self.done:
            self._driver.wake()
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[Tensor]:
        return self._results

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

    def finish(self, error: BaseException | None) -> None:
        """The driver's last word on this collective."""
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
            future, bell = self._future, self._bell
        if bell is not None:
            bell.set()
        if future is not None:
            self._settle(future)

    def _settle(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if self.error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self.error)  # type: ignore[arg-type]


After = Sequence[Callable[[], Any]]
"""What is left to do when the last round is over, such as copying back into a tensor with strides."""


class Driver:
    """The queue of one group, and the threads that may work on it."""

    def __init__(self, flags: Flags, label: str) -> None:
        self.lock = threading.Lock()
        """Guards the moment a work becomes done against someone asking for its future."""
        self._flags = flags
        self._label = label
        self._queue: deque[SharedWork] = deque()
        self._driving = threading.Lock()
        self._waiting = 0
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        weakref.finalize(self, self._bell.put, False)

    def run(self, work: SharedWork) -> None:
        """Issue a collective whose caller blocks on it."""
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
        self._queue.append(work)
        alone = False
        if self._driving.acquire(blocking=False):
            try:
                alone = len(self._queue) == 1 and self._queue[0] is work
                if alone:
                    self._start(work)
            finally:
                self._driving.release()
        if not (alone and one_round):
            self.wake()

    def drive_until(self, work: SharedWork, timeout: float) -> None:
        """Take part in driving until `work` is done."""
        self._waiting += 1  # only a hint for how long to poll
        try:
            while not work.done:
                if self._driving.acquire(blocking=False):
                    try:
                        if not work.done:
                            self._drive_first(patient=True)
                    finally:
                        self._driving.release()
                    continue
                # Somebody drives. Waiting for the lock instead could last beyond this work, until one behind it is
                # done; and that one may need what our caller does next.
                self.wake()  # in case they stop before they come to it
                if not work.sleep(timeout):
                    raise TimeoutError(f"rank {self._flags.rank} waited {timeout:.1f} s for {work.name}")
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

    def close(self) -> None:
        """Let the worker thread end."""
        self._bell.put(False)

    def _drive_first(self, patient: bool) -> None:
        self._complete(self._queue[0], patient)
        self._queue.popleft()

    def _start(self, work: SharedWork) -> None:
        """Publish the first round. Never waits: an idle group has read all it needs of the round before."""
        work.started = True
        if self._failure is None:
            try:
                work.needs = next(work.rounds)
                self._flags.publish()
            except StopIteration:
                work.rounds = iter(())
            except BaseException as error:
                self._failure = error

    def _complete(self, work: SharedWork, patient: bool) -> None:
        flags, rounds = self._flags, work.rounds
        try:
            if self._failure is None and work.started:
                flags.wait(work.needs, work.name, patient)
            if self._failure is None:
                for needs in rounds:
                    flags.publish()
                    flags.wait(needs, work.name, patient)
        except BaseException as error:
            # The ranks no longer agree which round they are in, so nothing can follow on this group.
            self._failure = error
        work.rounds = iter(())
        work.finish(self._failure)


def _serve(driver: weakref.ref[Driver], bell: queue.SimpleQueue[bool]) -> None:
    """The worker thread. It holds no reference while idle, so a group that is dropped goes away."""
    while bell.get():
        here = driver()
        if here is None:
            return
        here.drain()
        del here
