"""A thread that does errands in order, while backward goes on.

Compressed sums take several steps each (sum within the host, encode, send, decode). If each step started when the one
before had ended, workers would start collectives in different orders and wait for each other for ever. One thread that
does one errand after the other has the same order everywhere.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch


class Errand:
    """Something the courier does; `wait` returns when it is done, or raises what went wrong."""

    def __init__(self, action: Callable[[], None], device: torch.device) -> None:
        self._action, self._device = action, device
        self._done = threading.Event()
        self._error: BaseException | None = None
        # On a card: the courier's stream starts where the caller's is now, and the caller's waits for its end.
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
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._ended is not None:
            torch.cuda.current_stream().wait_event(self._ended)


class Courier:
    """Errands, one after the other, in the order in which they were given.

    >>> courier, found = Courier(torch.device("cpu")), []
    >>> first, second = courier.send(lambda: found.append(1)), courier.send(lambda: found.append(2))
    >>> second.wait(); found
    [1, 2]
    >>> courier.close()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._errands: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, action: Callable[[], None]) -> Errand:
        """Have something done."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._errands, self._device), name="shoal-courier", daemon=True
            )
            self._thread.start()
        errand = Errand(action, self._device)
        self._errands.put(errand)
        return errand

    def close(self) -> None:
        """No more errands come."""
        self._errands.put(None)


def _work(errands: queue.SimpleQueue[Errand | None], device: torch.device) -> None:
    # Not a method: the thread must not keep alive what owns it.
    stream = _new_stream(device) if device.type == "cuda" else None
    while (errand := errands.get()) is not None:
        errand.run(stream)
        del errand


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
