"""Work that goes through several stages, each with a thread of its own, first come first served.

When to use: a collective is made of parts on different process groups, and several collectives are under way. All
ranks must use a group in one order. Here every stage has one group and takes its work in the order in which it was
handed in, so the order is the same on all ranks, and while one collective is on the network the next one is
already in memory.

>>> stages, seen = Stages(2, "example"), []
>>> [stages.hand_in([lambda: seen.append(1), lambda: seen.append(2)]) for _ in range(2)][-1].wait()
>>> sorted(seen)
[1, 1, 2, 2]
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

Step = Callable[[], object]

_AHEAD = 4
"""How much work may lie between two stages: each piece holds memory of its own from the first stage to the last."""


class StagedTask:
    """One piece of work, with a step for every stage; under way, done or failed."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = list(steps)
        self.error: BaseException | None = None
        self._done = threading.Event()

    def wait(self) -> None:
        """Return when the last step is done; raise what went wrong otherwise."""
        self._done.wait()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """The last stage's word on it."""
        self.steps.clear()  # they hold tensors
        self._done.set()


class Stages:
    """A line of threads, started when the first work comes."""

    def __init__(self, count: int, label: str) -> None:
        self._label = label
        # Bounded between stages, so a slow network holds up the first stage, not memory. The first is unbounded:
        # `hand_in` must not block its caller.
        self._boxes = [queue.Queue[StagedTask | None](_AHEAD if number else 0) for number in range(count)]
        self._lock = threading.Lock()
        self._started = False
        # The threads hold no reference to this object, so a line that is dropped ends.
        weakref.finalize(self, self._boxes[0].put, None)

    def hand_in(self, steps: Sequence[Step]) -> StagedTask:
        """Put work at the end of the line; it goes on by itself."""
        work = StagedTask(steps)
        with self._lock:
            if not self._started:
                self._start()
            self._boxes[0].put(work)
        return work

    def close(self) -> None:
        """Let the threads end once they have done what was handed in."""
        self._boxes[0].put(None)

    def _start(self) -> None:
        self._started = True
        following = [*self._boxes[1:], None]
        for number, (box, after) in enumerate(zip(self._boxes, following, strict=True)):
            threading.Thread(
                target=_serve, args=(number, box, after), name=f"{self._label}-{number}", daemon=True
            ).start()


def _serve(
    number: int, box: queue.Queue[StagedTask | None], after: queue.Queue[StagedTask | None] | None
) -> None:
    """One stage. Once a step has failed, ranks no longer agree where they are: all that follows fails alike."""
    failure: BaseException | None = None
    while (work := box.get()) is not None:
        failure = failure or work.error
        if failure is None:
            try:
                work.steps[number]()
            except BaseException as error:
                failure = error
        work.error = failure
        if after is None:
            work.finish()
        else:
            after.put(work)
        del work  # while this thread sleeps, it keeps nobody's tensors
    if after is not None:
        after.put(None)
