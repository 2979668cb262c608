"""Saving: the training stops for one copy of what this rank writes; the rest happens behind its back.

    snapshot    every rank copies its writes into one block of memory               the step waits for this
    write       a thread of every rank: checksums, one file, flushed to disk         training goes on
    commit      a thread of rank 0: when all files are there, the manifest, the rename, `latest`

Ranks tell rank 0 of their files through the folder itself, so the threads need no collectives of their own. Where each
host has a folder of its own, its memory, peers carry files and words from host to host.

A save that fails is said at once, by rank 0, and training goes on; the next one tries again. All ranks count alike how
often that has happened in a row, and end together when it was too often.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

import torch

from shoal.checkpoint import folder as folders
from shoal.checkpoint.copies.peers import Peers
from shoal.checkpoint.large_tensors import FileReport, Piece, PieceFiles
from shoal.checkpoint.layout.head import FILE
from shoal.checkpoint.layout.region import Region
from shoal.checkpoint.layout.shard_file import DTYPES, NAMES, PAGE, Slot, head, place, write_block
from shoal.checkpoint.layout.write_plan import Holding, Write, assign
from shoal.checkpoint.lock import FolderTaken
from shoal.checkpoint.reports import Facts, SaveFailed, manifest_of
from shoal.checkpoint.room import reason_of, room_facts
from shoal.errors import ConfigError
from shoal.sealed import checksum, read_file, seal, unseal, write_file
from shoal.world.shm.memory import put
from shoal.world.world import World

State = Sequence[tuple[Holding, torch.Tensor]]
"""What a rank holds, and the numbers themselves."""

_Listed: TypeAlias = "tuple[str, list[int], int, Sequence[Sequence[int]], int, int, str, bool]"
"""A holding as ranks tell each other: path, shape, its region (four fields), type, whether others hold it too."""

_PATIENCE = 600.0
"""Seconds that rank 0 waits for the files of the others."""
_GRACE = 2.0
"""And once the run has failed."""
FAILURES = 3
"""So many saves in a row may fail before they end the run."""


class Saver:
    """Writes checkpoints of one run into one folder. Every rank has one and calls it alike."""

    def __init__(
        self,
        world: World,
        root: Path,
        after: Callable[[Path], None] = lambda _: None,
        peers: Peers | None = None,
        before: Callable[[], None] = lambda: None,
        failures: float = FAILURES,
        apart: bool = False,
    ) -> None:
        """`after` is called on rank 0, in its thread, with each checkpoint that is complete; `before` before it is.

        `failures`: so many saves in a row that fail end the run; infinite: none does. `apart`: `root` is that of the
        peers, and no host sees another's.
        """
        self._world = world
        self._root = root
        self._after = after
        self._peers = peers
        self._before = before
        self._limit = failures
        self._apart = apart
        self._token = world.gather_values(f"{time.time_ns():x}-{os.getpid():x}")[0]
        self._turn = 0
        self._known: list[Holding] | None = None
        self._writes: list[Write] = []
        self._slots: list[Slot] = []
        self._targets: list[torch.Tensor] = []
        """Where in the block each write is copied to."""
        self._begin = self._end = 0
        """Where the tensors are in the block."""
        self._needed = 0
        """Bytes of a checkpoint, of all ranks."""
        self._block = torch.empty(0, dtype=torch.uint8)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, self._jobs.put, None)
        self._committed = threading.Event()
        self._idle = threading.Event()
        self._committed.set()
        self._idle.set()
        self._error: BaseException | None = None
        """What went wrong with the last save, as this rank knows it."""
        self._failed = 0
        """How many have failed in a row, without the last one; the same on every rank."""
        self._last = ""
        self._urgent = False
        self._deadline = math.inf
        self._threaded = False
        self.behind = 0.0
        """Seconds of the processor, and of the line to other hosts, that the last save took behind the training."""

    def save(self, state: State, facts: Facts, urgent: bool = False, pieces: Iterable[Piece] = ()) -> None:
        """Begin a checkpoint of what all ranks hold. Returns as soon as the state may change again.

        An urgent one is written here and now; others by a thread that leaves the processor to the training. Pieces,
        which memory need not hold, go to their files at once. Raises on every rank where too many have failed.
        """
        folders.check_target(self._root, facts.name)
        self._idle.wait()
        self._plan([holding for holding, _ in state])
        self._error = None
        self._last = facts.name
        self._urgent = urgent
        for write, target in zip(self._writes, self._targets, strict=True):
            put(target, _elements(state[write.holding][1], write))
        self._turn += 1
        written = folders.temporary(self._root, facts.name, f"{self._token}-{self._turn}")
        paths = [state[write.holding][0].path for write in self._writes]
        files = PieceFiles(written, self._world.rank)
        files.write(pieces)
        self._committed.clear()
        self._idle.clear()
        decides = self._failed > 0 and self._failed + 1 >= self._limit
        if urgent or decides:
            self._work(written, paths, facts, files)
        else:
            self._start()
            self._jobs.put(lambda: self._work(written, paths, facts, files))
        if decides:  # one more would end the run: then it ends here, and not when the next is due
            self._count(float(self._world.gather_numbers([self._outcome])[:, 0].max()))
            self._error = None

    def wait(self) -> None:
        """Until the last save is on disk; raises what went wrong with it, as far as this rank knows."""
        self._committed.wait()
        if self._error is not None:
            error = self._error
            self._error = None
            if isinstance(error, FolderTaken):
                raise error
            raise ConfigError(
                f"a checkpoint could not be written to {self._root} ({self._last}: {reason_of(error)}); "
                f"{room_facts(self._root, self._needed)}. Free some space, or choose another folder."
            ) from error

    def rest(self) -> None:
        """Until nothing is left to do; raises what went wrong."""
        self._idle.wait()
        self.wait()

    def idle(self) -> None:
        """Until nothing is left to do, whatever came of it."""
        self._idle.wait()

    @property
    def failed(self) -> bool:
        """Whether the last save has failed, as far as this rank knows."""
        return self._error is not None

    @property
    def _outcome(self) -> float:
        """Of the last save: 0 as far as this rank knows all is well, 1 failed, 2 no other will do better."""
        return 0.0 if self._error is None else 2.0 if isinstance(self._error, FolderTaken) else 1.0

    def _count(self, worst: float) -> None:
        """What came of the last save, the same on every rank; raises on all of them if it ends the run."""
        self._failed = self._failed + 1 if worst else 0
        if worst < 2 and self._failed < self._limit:
            return
        mine = reason_of(self._error) if self._error is not None else ""
        reason = next((text for text in self._world.gather_values(mine) if text), "")
        self._error = None
        if worst == 2:
            raise FolderTaken(reason)
        newest = folders.latest(self._root)
        left = f"the newest there is {newest}" if newest else "there is none"
        raise ConfigError(
            f"{self._failed} checkpoints in a row could not be written to {self._root} ({reason}), and {left}; free "
            "some space or choose another folder, and start again. checkpoint_failures= says how many may fail."
        )

    def abandon(self) -> None:
        """The run has failed: let what is nearly done come to its end, and wait for nobody who may be gone."""
        self._deadline = time.monotonic() + _GRACE
        self._committed.wait(2 * _GRACE)

    def _start(self) -> None:
        """Have a thread, waiting: a new one would take the interpreter at once, from the training."""
        if not self._threaded:
            self._threaded = True
            # A daemon: a run that fails must end. One that does not fail waits for it.
            threading.Thread(target=_run, args=(self._jobs,), name="checkpoint", daemon=True).start()

    def _plan(self, mine: list[Holding]) -> None:
        """Agree on what came of the last save, and on who writes what, if that has changed since the last time."""
        table = self._world.gather_numbers([float(mine != self._known), self._outcome])
        self._count(float(table[:, 1].max()))
        if not table[:, 0].any():
            return
        self._known = mine
        listed = [[h.path, list(h.region.shape), *h.region.to_json(), NAMES[h.dtype], h.shared] for h in mine]
        everyone = [[_holding(entry) for entry in theirs] for theirs in self._world.gather_values(listed)]
        assigned = assign(everyone)
        writes = assigned[self._world.rank]
        self._needed = sum(
            write.region.numel * everyone[rank][write.holding].dtype.itemsize
            for rank, theirs in enumerate(assigned)
            for write in theirs
        )
        # The widest numbers first: then each tensor begins where one of its kind may.
        self._writes = sorted(writes, key=lambda write: -mine[write.holding].dtype.itemsize)
        self._slots = place([_slot(write, mine[write.holding]) for write in self._writes])
        header = head(self._slots, PAGE)
        self._begin = len(header)
        self._end = self._begin + (self._slots[-1].stop if self._slots else 0)
        if self._block.numel() < self._end:
            self._block = _room(self._end, pinned=self._world.device.type == "cuda")
        data = self._block[self._begin : self._end]
        self._targets = [data[slot.start : slot.stop].view(slot.dtype) for slot in self._slots]
        self._block[: self._begin] = torch.frombuffer(bytearray(header), dtype=torch.uint8)

    # From here on in the thread, or where it is urgent.

    def _work(self, written: Path, paths: Sequence[str], facts: Facts, files: PieceFiles) -> None:
        began = time.thread_time()
        try:
            reports = self._write(written, paths, files)
            if self._apart:
                manifest = self._compose(facts, reports)
            else:
                self._hand_in(written, reports)
                manifest = self._commit(written, facts) if self._world.rank == 0 else b""
            if self._peers is not None:
                self._peers.finish(written.name, facts.name, manifest)
            self._committed.set()
            if manifest and not self._apart:
                self._after(self._root / facts.name)
        except BaseException as error:  # the next save counts it
            self._error = error
            if self._world.rank == 0:
                shutil.rmtree(written, ignore_errors=True)
                self._say(facts.name, error)
            elif not self._apart:
                self._hand_in(written, {"error": reason_of(error)})
        finally:
            self.behind = time.thread_time() - began + (self._peers.take_seconds() if self._peers else 0.0)
            self._committed.set()
            self._idle.set()

    def _write(
        self, written: Path, paths: Sequence[str], files: PieceFiles
    ) -> list[FileReport] | dict[str, str]:
        """This rank's files, or why they are not there. Peers get theirs all the same: they wait for them."""
        name = _file_of(self._world.rank)
        block = memoryview(self._block.numpy().data)[: self._end]
        sums = [checksum(block[self._begin + slot.start : self._begin + slot.stop]) for slot in self._slots]
        reports: list[FileReport] = []
        try:
            written.mkdir(parents=True, exist_ok=True)
            if not self._apart:
                (written / f".part-{self._world.rank}").touch()
            if files.error is not None:
                raise files.error
            write_block(written / name, block)
        except OSError as error:
            self._error = error
        if self._peers is not None:
            self._peers.put(written.name, name, [block])
        try:
            reports = files.settle(self._peers)
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            with suppress(OSError):
                (written / name).unlink(missing_ok=True)  # and so make room to say it
            return {"error": reason_of(self._error)}
        report: FileReport = {
            "file": {"name": name, "bytes": len(block), "head": checksum(block[: self._begin])},
            "slices": [
                (path, NAMES[slot.dtype], list(write.region.shape), slot.key, write.region.to_json(), total)
                for path, write, slot, total in zip(paths, self._writes, self._slots, sums, strict=True)
            ],
        }
        return [report, *reports]

    def _hand_in(self, written: Path, report: list[FileReport] | dict[str, str]) -> None:
        """Tell rank 0. Where the disk is too full even for that, the name of a file that is there already does."""
        draft = written / f".part-{self._world.rank}"
        part = written / f"part-{self._world.rank}"
        try:
            write_file(draft, [seal(report)])
        except OSError as error:
            self._error = self._error or error
            first = self._error
            number = first.errno if isinstance(first, OSError) and first.errno is not None else errno.EIO
            part = part.with_suffix(f".{number}")
        with suppress(OSError):
            os.replace(draft, part)

    def _compose(self, facts: Facts, mine: list[FileReport] | dict[str, str]) -> bytes:
        """The same where each host has a folder of its own, over the line between them; empty but on rank 0."""
        assert self._peers is not None
        said = mine["error"] if isinstance(mine, dict) else mine
        everyone = self._peers.gather(said)
        if self._world.rank > 0:
            return b""
        try:
            return manifest_of(facts, everyone).dumps()
        except SaveFailed as error:
            self._error = error
            self._say(facts.name, error)
            return b""

    def _commit(self, written: Path, facts: Facts) -> bytes:
        """Make it a checkpoint once all files are there; its manifest. Empty where it could not be written."""
        try:
            # All of them, also after the first that has failed: whoever still writes would leave its file behind.
            everyone = [self._reports(written, rank) for rank in range(self._world.size)]
            text = manifest_of(facts, everyone).dumps()
            write_file(written / FILE, [text])
            for rank in range(self._world.size):
                (written / f"part-{rank}").unlink()
            self._before()
            folders.commit(written, self._root / facts.name)
            return text
        except (OSError, SaveFailed, ConfigError) as error:
            self._error = error
            shutil.rmtree(written, ignore_errors=True)
            self._say(facts.name, error)
            return b""

    def _say(self, name: str, error: BaseException) -> None:
        """At once, whatever the training does."""
        if self._urgent or isinstance(error, FolderTaken) or self._deadline < math.inf:
            return  # who asked for it hears of it; that ends the run; or the run has ended already
        facts = room_facts(self._root, self._needed)
        number = self._failed + 1
        if math.isinf(self._limit):
            text = f"a snapshot in memory failed ({reason_of(error)}); {facts}; training goes on without it"
            print(f"shoal: {text}.", file=sys.stderr, flush=True)
            return
        then = "training goes on, and the next save tries again" if number < self._limit else "the run ends"
        text = f"checkpoint {name} could not be written ({reason_of(error)}); {facts}; {then}"
        print(f"shoal: {text} (failure {number} of {self._limit} in a row).", file=sys.stderr, flush=True)

    def _reports(self, written: Path, rank: int) -> list[FileReport] | str:
        """What a rank says of its files, once it has written them; or why it has not."""
        if rank == 0 and self._error is not None:
            return reason_of(self._error)
        part = written / f"part-{rank}"
        begin = time.monotonic()
        while not part.exists():
            for short in written.glob(f"part-{rank}.*"):
                return f"{written / _file_of(rank)}: {os.strerror(int(short.suffix[1:]))}"
            waited = time.monotonic() - begin
            gone = self._error is not None and not written.exists()
            if waited > min(_GRACE if gone else _PATIENCE, self._deadline - begin):
                return f"it has written no file in {waited:.0f} s"
            time.sleep(0.005)
        said = unseal(read_file(part))
        if "error" in said:
            return str(said["error"])
        reports: list[FileReport] = said
        return reports


def _file_of(rank: int) -> str:
    return f"rank-{rank:04}.safetensors"


def _elements(tensor: torch.Tensor, write: Write) -> torch.Tensor:
    """What of a holding is written, flat."""
    flat = tensor.reshape(-1)
    count = write.region.numel
    return flat if flat.numel() == count else flat[write.start : write.start + count]


def _slot(write: Write, holding: Holding) -> tuple[str, torch.dtype, tuple[int, ...]]:
    """Name, dtype and shape in the file: of what is whole as any reader of such a file would expect them."""
    region = write.region
    key = holding.path
    if region.part_shape != region.shape:
        key += f"@{region.dim}:{region.spans[0][0]}"
    if region.is_part:
        return key, holding.dtype, region.part_shape
    return f"{key}[{region.start}:{region.stop}]", holding.dtype, (region.numel,)


def _holding(entry: _Listed) -> Holding:
    path, shape, dim, spans, start, stop, dtype, shared = entry
    return Holding(path, Region.from_json(shape, (dim, spans, start, stop)), DTYPES[dtype], shared)


def give_way() -> None:
    """Let others have the processor before this thread does; where that is not allowed, it stays as it is."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # it may wait its turn when it wakes up
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _run(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    give_way()
    while (job := jobs.get()) is not None:
        job()
        del job  # or it would keep its saver alive


def _room(size: int, pinned: bool) -> torch.Tensor:
    """Memory that begins at a page."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
