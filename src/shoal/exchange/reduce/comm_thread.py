"""A thread that does tasks in order, while backward goes on.

Compressed sums take several steps each (sum within the host, encode, send, decode). If each step started when the one
before had ended, workers would start collectives in different orders and wait for each other for ever. One thread that
does one task after the other has the same order everywhere.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch


class CommTask:
    """A task of the communication thread; `wait` returns when it is done, or raises what went wrong."""

    def __init__(self, action: Callable[[], None], device: torch.device) -> None:
        self._action = action
        self._device = device
        self._done = threading.Event()
        self._error: BaseException | None = None
        # On a card: this thread's stream starts where the caller's is now, and the caller's waits for its end.
        self._begun = torch.cuda.current_stream().record_event() if device.type == "cuda" else None
        self._ended: torch.cuda.Event | None = None

    def run(self, stream: torch.cuda.Stream | None) -> None:
        try:
            if stream is None or self._begun is None:
                self._action()
            else:
                with torch.cuda.stream(stream):
                    stream.wait_event(self._begun)
                    self._action()
                    self._ended = stream.record_event()
        # Raised where somebody waits for it: here it would end the thread, and every later `wait` would hang.
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._ended is not None:
            torch.cuda.current_stream().wait_event(self._ended)


class CommThread:
    """Tasks, one after the other, in the order in which they were given.

    >>> comm, found = CommThread(torch.device("cpu")), []
    >>> first, second = comm.send(lambda: found.append(1)), comm.send(lambda: found.append(2))
    >>> second.wait(); found
    [1, 2]
    >>> comm.close()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The order in the queue is the order of collectives. Buckets are sent in the order of their layout, the same
        # on all ranks.
        self._tasks: queue.SimpleQueue[CommTask | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, action: Callable[[], None]) -> CommTask:
        """Have something done."""
        # Made at the first task: an exchange that is only asked for its costs needs no thread.
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._tasks, self._device), name="shoal-comm", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None)  # a run may be forgotten without being closed
        task = CommTask(action, self._device)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """No more tasks come."""
        self._tasks.put(None)


def _work(tasks: queue.SimpleQueue[CommTask | None], device: torch.device) -> None:
    # Not a method: the thread must not keep alive what owns it.
    stream = _new_stream(device) if device.type == "cuda" else None
    while (task := tasks.get()) is not None:
        task.run(stream)
        # Else the loop variable keeps the last task, and its vectors, alive until the next step.
        del task


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
