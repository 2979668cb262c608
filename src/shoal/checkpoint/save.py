"""Saving: the training stops for one copy of what this rank writes; the rest happens behind its back.

    snapshot    every rank copies its writes into one block of memory               the step waits for this
    write       a thread of every rank: checksums, one file, flushed to disk         training goes on
    commit      a thread of rank 0: when all files are there, the manifest, the rename, `latest`

Ranks tell rank 0 of their files through the folder itself, so the threads need no collectives of their own.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

import shoal
from shoal.checkpoint import folder as folders
from shoal.checkpoint.copies.peers import Peers
from shoal.checkpoint.large_tensors import FileReport, Piece, PieceFiles
from shoal.checkpoint.layout.manifest import FILE, FileFacts, Logical, Manifest, Slice, seal, unseal
from shoal.checkpoint.layout.region import Region
from shoal.checkpoint.layout.shard_file import (
    DTYPES,
    NAMES,
    PAGE,
    Slot,
    checksum,
    head,
    place,
    write_block,
    write_file,
)
from shoal.checkpoint.layout.write_plan import Holding, Write, assign
from shoal.errors import ConfigError
from shoal.world.shm.memory import put
from shoal.world.world import World

State = Sequence[tuple[Holding, torch.Tensor]]
"""What a rank holds, and the numbers themselves."""

_Listed: TypeAlias = "tuple[str, list[int], int, list[list[int]], int, int, str, bool]"
"""A holding as ranks tell each other: path, shape, its region (four fields), type, whether others hold it too."""

_PATIENCE = 600.0
"""Seconds that rank 0 waits for the files of the others."""
_GRACE = 2.0
"""And once the run has failed."""


@dataclass(frozen=True)
class Facts:
    """What a manifest says beside its tensors."""

    name: str
    step: int
    plan: str
    state: Mapping[str, Any]


class Saver:
    """Writes checkpoints of one run into one folder. Every rank has one and calls it alike."""

    def __init__(
        self,
        world: World,
        root: Path,
        after: Callable[[Path], None] = lambda _: None,
        peers: Peers | None = None,
    ) -> None:
        """`after` is called on rank 0, in its thread, with each checkpoint that is complete."""
        self._world = world
        self._root = root
        self._after = after
        self._peers = peers
        self._token = world.gather_values(f"{time.time_ns():x}-{os.getpid():x}")[0]
        self._turn = 0
        self._known: list[Holding] | None = None
        self._writes: list[Write] = []
        self._slots: list[Slot] = []
        self._targets: list[torch.Tensor] = []
        """Where in the block each write is copied to."""
        self._begin = self._end = 0
        """Where the tensors are in the block."""
        self._block = torch.empty(0, dtype=torch.uint8)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, self._jobs.put, None)
        self._committed = threading.Event()
        self._idle = threading.Event()
        self._committed.set()
        self._idle.set()
        self._error: BaseException | None = None
        self._deadline = math.inf
        self._threaded = False

    def save(self, state: State, facts: Facts, urgent: bool = False, pieces: Iterable[Piece] = ()) -> None:
        """Begin a checkpoint of what all ranks hold. Returns as soon as the state may change again.

        An urgent one is written here and now; others by a thread that leaves the processor to the training. Pieces,
        which memory need not hold, go to their files at once.
        """
        folders.check_target(self._root, facts.name)
        self.rest()
        self._plan([holding for holding, _ in state])
        for write, target in zip(self._writes, self._targets, strict=True):
            put(target, _elements(state[write.holding][1], write))
        self._turn += 1
        written = folders.temporary(self._root, facts.name, f"{self._token}-{self._turn}")
        paths = [state[write.holding][0].path for write in self._writes]
        files = PieceFiles(written, self._world.rank)
        try:
            files.write(pieces)
        except OSError as error:  # the next call of `wait` raises it
            self._error = error
            self._tell_of(error, written)
            return
        self._committed.clear()
        self._idle.clear()
        if urgent:
            self._work(written, paths, facts, files)
        else:
            self._start()
            self._jobs.put(lambda: self._work(written, paths, facts, files))

    def wait(self) -> None:
        """Until the last save is on disk; raises what went wrong with it."""
        self._committed.wait()
        if self._error is not None:
            error = self._error
            self._error = None
            raise ConfigError(
                f"a checkpoint could not be written to {self._root} ({getattr(error, 'strerror', None) or error}); "
                "free some space, or choose another folder."
            ) from error

    def rest(self) -> None:
        """Until nothing is left to do; raises what went wrong."""
        self._idle.wait()
        self.wait()

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
        """Agree on who writes what, if that has changed since the last time."""
        changed = self._world.gather_numbers([float(mine != self._known)])
        if not changed.any():
            return
        self._known = mine
        listed = [[h.path, list(h.region.shape), *h.region.to_json(), NAMES[h.dtype], h.shared] for h in mine]
        everyone = [[_holding(entry) for entry in theirs] for theirs in self._world.gather_values(listed)]
        writes = assign(everyone)[self._world.rank]
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
        try:
            written.mkdir(parents=True, exist_ok=True)
            self._write(written, paths, files)
            manifest = b""
            if self._world.rank == 0:
                manifest = self._commit(written, self._root / facts.name, facts)
            if self._peers is not None:
                self._peers.finish(written.name, facts.name, manifest)
            self._committed.set()
            if self._world.rank == 0:
                self._after(self._root / facts.name)
        except BaseException as error:  # the next call of `wait` raises it
            self._error = error
            self._tell_of(error, written)
        finally:
            self._committed.set()
            self._idle.set()

    def _tell_of(self, error: BaseException, written: Path) -> None:
        """Let rank 0 not wait for a file that will not come; rank 0 removes what has been written."""
        with suppress(OSError):
            if self._world.rank == 0:
                shutil.rmtree(written, ignore_errors=True)
            else:
                self._hand_in(written, {"error": str(getattr(error, "strerror", None) or error)})

    def _hand_in(self, written: Path, report: object) -> None:
        part = written / f".part-{self._world.rank}"
        write_file(part, [seal(report)])
        os.replace(part, written / f"part-{self._world.rank}")

    def _write(self, written: Path, paths: Sequence[str], files: PieceFiles) -> None:
        name = f"rank-{self._world.rank:04}.safetensors"
        block = memoryview(self._block.numpy().data)[: self._end]
        sums = [checksum(block[self._begin + slot.start : self._begin + slot.stop]) for slot in self._slots]
        write_block(written / name, block)
        if self._peers is not None:
            self._peers.put(written.name, name, [block])
        report: FileReport = {
            "file": {"name": name, "bytes": len(block), "head": checksum(block[: self._begin])},
            "slices": [
                (path, NAMES[slot.dtype], list(write.region.shape), slot.key, write.region.to_json(), total)
                for path, write, slot, total in zip(paths, self._writes, self._slots, sums, strict=True)
            ],
        }
        self._hand_in(written, [report, *files.settle(self._peers)])

    def _commit(self, written: Path, final: Path, facts: Facts) -> bytes:
        files: dict[str, FileFacts] = {}
        tensors: dict[str, Logical] = {}
        for rank in range(self._world.size):
            for report in self._reports(written / f"part-{rank}"):
                file = report["file"]
                files[file["name"]] = FileFacts(file["bytes"], file["head"])
                for path, dtype, shape, key, region, total in report["slices"]:
                    piece = Slice(file["name"], key, Region.from_json(shape, region), total)
                    before = tensors[path].slices if path in tensors else ()
                    tensors[path] = Logical(DTYPES[dtype], tuple(shape), (*before, piece))
        manifest = Manifest(
            name=facts.name,
            step=facts.step,
            written=datetime.now(UTC).isoformat(timespec="milliseconds"),
            plan=facts.plan,
            workers=self._world.size,
            tensors=dict(sorted(tensors.items())),
            files=files,
            state=facts.state,
            versions={"shoal": shoal.__version__, "torch": torch.__version__},
        )
        text = manifest.dumps()
        write_file(written / FILE, [text])
        for rank in range(self._world.size):
            (written / f"part-{rank}").unlink()
        folders.commit(written, final)
        return text

    def _reports(self, part: Path) -> list[FileReport]:
        """What a rank says of its files, once it has written them."""
        begin = time.monotonic()
        rank = part.name.removeprefix("part-")
        while not part.exists():
            if time.monotonic() > min(begin + _PATIENCE, self._deadline):
                raise OSError(f"rank {rank} has written no file in {time.monotonic() - begin:.0f} s")
            time.sleep(0.005)
        said = unseal(part.read_bytes())
        if "error" in said:
            raise OSError(f"rank {rank}: {said['error']}")
        reports: list[FileReport] = said
        return reports


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
