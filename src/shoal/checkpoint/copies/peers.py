"""Copies of the newest checkpoint in the memory of hosts: each keeps its own files and those of the host before it.

A job that was killed goes on from memory, without a disk; a host that was lost has its files on the next one. The
copies lie in a folder of the memory file system, which outlives processes, and only the user can read it. A run that
ends in peace removes them: by then its last checkpoint is on disk.

While a job recovers, every host brings all files into its memory.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from shoal.checkpoint.copies.find_newest import Candidate
from shoal.checkpoint.folder import check_name, clean, look
from shoal.checkpoint.layout.head import FILE
from shoal.errors import ConfigError
from shoal.sealed import write_file
from shoal.world.world import World

MEMORY = Path("/dev/shm")
_NAME = 64
"""Bytes before a file that is sent: its name."""
_NONE = b"-"
"""In the place of a manifest."""


class Peers:
    """This rank's side of the copies in memory. Its thread calls `put` and `finish`, on every rank alike."""

    def __init__(self, world: World, root: Path) -> None:
        """`root`: this host's folder in memory, as `shared_memory` names one."""
        self._world = world
        self._root = root
        self._root.mkdir(exist_ok=True)
        clean(self._root)
        hosts = list(dict.fromkeys(world.hosts))
        self._several = len(hosts) > 1
        self._line = world.wire() if self._several else world
        mine = hosts.index(world.hosts[world.rank])
        self._leads = world.hosts.index(world.hosts[world.rank]) == world.rank
        """Whether this is the first rank of its host."""
        ahead = _ranks_on(world, hosts[(mine + 1) % len(hosts)])
        behind = _ranks_on(world, hosts[mine - 1])
        here = _ranks_on(world, hosts[mine])
        place = here.index(world.rank)
        self._to = ahead[place % len(ahead)]
        self._from = [rank for i, rank in enumerate(behind) if here[i % len(here)] == world.rank]
        self._seconds = 0.0
        """How long files were on their way since that was asked for last."""

    def put(self, turn: str, file: str, parts: Sequence[bytes | memoryview]) -> None:
        """Keep this rank's file in memory, if it is not there yet, and have the next host keep it too."""
        folder = self._root / turn
        if not (folder / file).exists():
            self._keep(folder, file, parts)
        if not self._several:
            return
        began = time.monotonic()
        mine = torch.frombuffer(bytearray().join([file.encode().ljust(_NAME), *parts]), dtype=torch.uint8)
        sent = [self._line.send(part, self._to) for part in (torch.tensor([mine.numel()]), mine)]
        for rank in self._from:
            size = torch.zeros(1, dtype=torch.int64)
            self._line.receive(size, rank).wait()
            theirs = torch.empty(int(size), dtype=torch.uint8)
            self._line.receive(theirs, rank).wait()
            data = memoryview(theirs.numpy().data)
            self._keep(folder, check_name(bytes(data[:_NAME]).decode().strip()), [data[_NAME:]])
        for handle in sent:
            handle.wait()
        self._seconds += time.monotonic() - began

    def gather(self, value: Any) -> list[Any]:
        """What each rank's thread gives."""
        return self._line.gather_values(value)

    def take_seconds(self) -> float:
        """How long files were on their way to other hosts since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def _keep(self, folder: Path, file: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Losing a copy is no reason to end a run: without one of its files, none of them is ever used."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / file, parts)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            text = f"a copy in memory failed ({folder}: {error.strerror}); training goes on without it"
            print(f"shoal: {text}.", file=sys.stderr, flush=True)
            return False
        return True

    def finish(self, turn: str, name: str, manifest: bytes) -> None:
        """All files are there: make them a checkpoint, in place of the one before. Rank 0 knows the manifest.

        Without one, the save has failed: the one before stays.
        """
        if self._several:
            manifest = spread(self._line, manifest or _NONE, 0)
        if self._leads and manifest in (b"", _NONE):
            shutil.rmtree(self._root / turn, ignore_errors=True)
            return
        if not self._leads or not self._keep(self._root / turn, FILE, [manifest]):
            return
        shutil.rmtree(self._root / name, ignore_errors=True)
        os.rename(self._root / turn, self._root / name)
        for entry in self._root.iterdir():
            if entry.name != name and not entry.name.startswith(
                "."
            ):  # others may be writing the next already
                shutil.rmtree(entry, ignore_errors=True)

    def close(self) -> None:
        """The run has ended in peace."""
        if self._leads:
            shutil.rmtree(self._root, ignore_errors=True)

    # As a place to go on from.

    title = "memory"

    def candidates(self) -> list[Candidate]:
        found = {}
        held: dict[str, set[str]] = {}
        for theirs in self._world.gather_values(self._listed()):
            for name, step, written, wanted, files in theirs:
                held.setdefault(name, set()).update(files)
                if wanted:
                    found[name] = (Candidate(name, step, False, written), set(wanted))
        return [candidate for name, (candidate, wanted) in found.items() if wanted <= held[name]]

    def bring(self, name: str) -> Path:
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        held = self._world.gather_values(sorted(file.name for file in folder.iterdir()))
        for file in sorted({file for files in held for file in files}):
            owners = [rank for rank, files in enumerate(held) if file in files]
            if len(owners) == self._world.size:
                continue
            source = owners[0]
            data = (folder / file).read_bytes() if self._world.rank == source else b""
            data = spread(self._world, data, source)
            if self._leads and file not in held[self._world.rank]:
                write_file(folder / check_name(file), [data])
        self._world.barrier()
        return folder

    def _listed(self) -> list[list[object]]:
        """Name, step, time, wanted files and files here, of each checkpoint in this host's memory."""
        listed: list[list[object]] = []
        for found in look(self._root) if self._leads else []:
            manifest = found.manifest
            here = sorted(file.name for file in found.folder.iterdir())
            if manifest is None:
                listed.append([found.name, -1, "", [], here])
            else:
                listed.append([found.name, manifest.step, manifest.written, sorted(manifest.files), here])
        return listed


def spread(world: World, data: bytes, source: int) -> bytes:
    """The bytes that rank `source` has, on every rank. Collective."""
    size = int(world.gather_numbers([float(len(data))])[source, 0])
    room = torch.empty(size, dtype=torch.uint8)
    if world.rank == source:
        room = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    world.broadcast(room, source).wait()
    return room.numpy().tobytes()


def shared_memory(world: World, root: Path, memory: Path = MEMORY) -> Path:
    """Where this host keeps copies of the checkpoints in `root`: it outlives the job."""
    return _private(memory / f"shoal-{os.getuid()}") / _key(world, root)


def _private(folder: Path) -> Path:
    """A folder in a place that all users share, which is ours alone; refuses one that somebody else has made."""
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if folder.is_symlink() or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a folder of your own that nobody else can enter; remove it.")
    return folder


def _key(world: World, root: Path) -> str:
    """A name for a run's copies on one host: workers with other host names have other memory."""
    host = world.hosts[world.rank].split(" ")[0]
    return xxhash.xxh3_64_hexdigest(f"{root.absolute()} {host}".encode())


def _ranks_on(world: World, host: str) -> list[int]:
    return [rank for rank, name in enumerate(world.hosts) if name == host]
