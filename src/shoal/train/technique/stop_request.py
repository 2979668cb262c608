"""Ctrl-C and SIGTERM: all ranks finish the same step, so that it can be saved.

A signal may reach one rank only, and ranks at different moments. Whoever has it writes into the store after how many
steps it learned of it; the others look there once a second. When all have written, the run stops after the next step
at which all meet: nobody can be further, because that step needs everybody.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from itertools import count
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

from shoal.world.failure import is_interactive
from shoal.world.progress_page import ProgressPage
from shoal.world.world import World

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_SECONDS = 1.0
_AGAIN_SECONDS = 1.0
"""A terminal, and what has started the workers, may both pass on one Ctrl-C: this long it is the same one."""
YIELD = 1000
"""In the place of a signal's number: the launcher wants to start another number of workers."""
_NUMBERS = count()


class StopRequest:
    """Catches signals while it is open, as a context. `number` is the signal, 0 before there was one."""

    def __init__(
        self,
        world: World,
        meets_every: int,
        listens: bool,
        finishing: str,
        page: ProgressPage | None = None,
    ) -> None:
        """`meets_every`: after so many steps all ranks wait for each other. `finishing`: see `Launch`.

        `page`: where our launcher may ask all of its workers to make way for others; None: it is not heard.
        """
        self.number = 0
        self._page = page
        self._world = world
        self._meets_every = meets_every
        self._listens = listens and threading.current_thread() is threading.main_thread()
        self._finishing = finishing
        self._key = f"shoal/stop/{next(_NUMBERS)}"  # the same on all ranks: they train equally often
        self._posted = False
        self._looked = monotonic()
        self._caught = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS if self._listens else ():
            handler = signal.getsignal(number)
            # Whoever has handlers of their own keeps them.
            if handler in (signal.default_int_handler, signal.SIG_DFL) or getattr(handler, "shoal", False):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def reached(self, done: int) -> bool:
        """Whether the run ends here, after so many steps: on all ranks alike."""
        if not self.number and self._page is not None and self._page.is_asked_to_yield:
            self.number = YIELD
        if not self.number and not self._requested():
            return False
        store = self._world.store
        if store is None or self._world.size == 1:
            return True
        if not self._posted:
            self._posted = True
            store.set(f"{self._key}/{self._world.rank}", str(done))
            store.set(self._key, str(self.number))
        keys = [f"{self._key}/{rank}" for rank in range(self._world.size)]
        if not store.check(keys):
            return False
        last = max(int(store.get(key)) for key in keys)
        return done >= (last // self._meets_every + 1) * self._meets_every

    def leave(self) -> None:
        """End the program, with the exit code that says which signal ended it."""
        if self.number == signal.SIGINT and is_interactive():  # a notebook goes on
            raise KeyboardInterrupt
        raise SystemExit(128 + self.number)

    def _requested(self) -> bool:
        """Whether another rank has had a signal."""
        store = self._world.store
        if not self._listens or store is None or monotonic() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = monotonic()
        if store.check([self._key]):
            self.number = int(store.get(self._key))
        return bool(self.number)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = monotonic()
        if not self._caught:
            self._caught = now
            self.number = number
            with suppress(OSError):
                if self._finishing:  # our launcher waits, and takes a second Ctrl-C itself
                    os.close(os.open(self._finishing, os.O_CREAT | os.O_WRONLY, 0o600))
                if self._world.rank == 0:
                    text = "shoal: finishing this step and saving; once more ends at once.\n"
                    os.write(2, text.encode())  # print may be in the middle of a line
            return
        if self._finishing or now - self._caught < _AGAIN_SECONDS:
            return
        self.__exit__(None, None, None)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
