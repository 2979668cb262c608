"""Snapshots of a run in the memory of its host, from which workers that were started anew go on.

They are checkpoints in a folder of the memory file system, which the launcher has made and removes: no disk is touched,
and the user need not have asked for anything. There is one for each Run of the script, by its number. With several
hosts each has such a folder, with the files of its own workers and of the host before it.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import monotonic, perf_counter

from shoal.checkpoint.copies.find_newest import CheckpointPlace, LocalFolder
from shoal.checkpoint.copies.peers import Peers
from shoal.checkpoint.folder import clean, glance
from shoal.checkpoint.room import free_bytes
from shoal.checkpoint.save import Saver
from shoal.errors import ConfigError
from shoal.train.state.pace import Pace
from shoal.train.state.run_state import check_types, expected_bytes
from shoal.train.step_context import StepContext
from shoal.world.free_memory import free_memory

_COPIES = 3
"""Of the state, at most: the one being taken, the file that it becomes, and the file before it."""
_APART = 4
"""The same with several hosts: two may have five halves between them, and each brings the whole into its memory."""
_FIXED_SECONDS = 0.005
_BYTES_PER_SECOND = 1e9
"""What a snapshot takes, as long as none has been taken."""
_REMEMBERED = 3
_FIRST = 0.3
"""The first one also agrees on who writes what, and makes the room for it: this is about the share that comes again."""
_RUNS = count()


class Snapshots:
    """Those of one run. Every rank has one and calls it alike."""

    def __init__(self, context: StepContext, memory: str) -> None:
        """`memory`: the job's folder in memory; empty: there is none, and nothing is ever taken."""
        self._world = context.savers
        number = next(_RUNS)
        self._apart = len(set(context.world.hosts)) > 1
        self._peers: Peers | None = None
        everywhere = bool(memory)
        if self._apart and not context.exchange.uses_servers:
            everywhere = all(self._world.gather_values(everywhere))
        takes = everywhere and not context.exchange.uses_servers
        self._root = Path(memory) / f"run-{number}" if takes else None
        self._pace = Pace(context.exchange.sync_interval)
        self._saver: Saver | None = None
        self._bytes = 0
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        """Seconds that each of the last took: whatever disturbs a measurement makes it longer, so the least counts."""
        self._within = 0.0
        """Seconds that the training waited for the one that was begun last; 0: that is counted already."""
        self._timed = (0, 0.0)
        """Since which step, and since when, steps are timed."""
        if self._root is not None:
            self._open(context, self._root)

    def _open(self, context: StepContext, root: Path) -> None:
        try:
            check_types(context.whole)
        except ConfigError:  # nothing of this model can be stored
            self._root = None
            return
        self._bytes = expected_bytes(context.whole)
        first = self._world.rank == 0
        hosts = self._world.hosts
        leads = hosts.index(hosts[self._world.rank]) == self._world.rank
        root.mkdir(exist_ok=True) if leads else None
        wanted = (_APART if self._apart else _COPIES) * self._bytes
        room = min(free_memory(), free_bytes(root.parent)) if leads else None
        least = min(each for each in self._world.gather_values(room) if each is not None)
        if least <= wanted:
            if first:
                print(
                    f"shoal: no snapshots in memory: they take up to {wanted / 1e6:.0f} MB, and "
                    f"{least / 1e6:.0f} MB are free; a lost worker costs all steps since the last checkpoint.",
                    file=sys.stderr,
                )
            self._root = None
            return
        if self._apart:
            self._peers = Peers(self._world, root)
            self._saver = Saver(self._world, root, peers=self._peers, failures=math.inf, apart=True)
            return
        if first:
            clean(root)
        self._saver = Saver(self._world, root, self._committed, failures=math.inf)

    def may_hold(self, again: bool) -> bool:
        """Whether there may be some; `again`: this worker was started anew. With several hosts others may have been."""
        return any(self._world.gather_values(again)) if self._apart and self._root is not None else again

    def places(self) -> list[CheckpointPlace]:
        """Where to look for one to go on from."""
        if self._peers is not None:
            return [self._peers]
        return [] if self._root is None else [LocalFolder(self._world, self._root)]

    def holds(self, folder: Path) -> bool:
        """Whether a checkpoint is one of these."""
        return folder.parent == self._root

    def begin(self, step: int) -> None:
        """A loop begins, or goes on."""
        if self._pace.next < 0:
            self._pace.begin(step)
            self._timed = (step, 0.0)

    def after(self, step: int, save: Callable[[Saver], None]) -> bool:
        """A step is over: `save` a snapshot if it is time. Every rank calls it. Whether one was begun."""
        saver = self._saver
        if saver is None:
            return False
        if not self._timed[1]:  # the first step of a process is slower than all others
            self._timed = (step, monotonic())
            return False
        if not self._pace.is_time(step):
            return False
        began, since = self._timed
        per_step = (monotonic() - since) / max(1, step - began)
        table = self._world.gather_numbers([self._estimate(saver), per_step])
        takes = self._pace.decide(step, float(table[:, 0].max()), float(table[:, 1].min()))
        if takes:
            start = perf_counter()
            save(saver)
            self._within = perf_counter() - start
        self._timed = (step, monotonic())
        return takes

    @property
    def takes(self) -> bool:
        """Whether there will be any."""
        return self._saver is not None

    def now(self, save: Callable[[Saver], None]) -> None:
        """Take one whatever it costs, and return when it is complete. Every rank calls it."""
        assert self._saver is not None
        save(self._saver)
        self._saver.idle()
        self._world.barrier()

    def _estimate(self, saver: Saver) -> float:
        if self._within:
            first = 1.0 if self._costs else _FIRST
            self._costs.append((self._within + saver.behind) * first)
            self._within = 0.0
        return min(self._costs, default=_FIXED_SECONDS + self._bytes / _BYTES_PER_SECOND)

    @staticmethod
    def _committed(folder: Path) -> None:
        """On rank 0, in the saver's thread: those before are not needed any more."""
        for name, outline in glance(folder.parent).items():
            if name != folder.name:
                shutil.rmtree(outline.folder, ignore_errors=True)
