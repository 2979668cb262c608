"""Copies of checkpoints at a URL: whatever fsspec can write to, as S3, HDFS or a mounted disk.

    s3://bucket/runs/first/step-300/rank-0000.safetensors, …    first
    s3://bucket/runs/first/step-300/manifest.json               then this: only now it is a checkpoint
    s3://bucket/runs/first/latest                               the name of the newest, last

So an upload that is cut short leaves files, and never a checkpoint. Nothing is believed on the way back either: a
copy comes into a folder under a name of its own, and becomes a checkpoint there once every byte has been checked.
Credentials and endpoints come from where the file system itself looks for them; none of them pass through here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import TypeVar

from shoal.checkpoint.copies.find_newest import Candidate
from shoal.checkpoint.folder import (
    LATEST,
    Unreadable,
    check_name,
    commit,
    flush,
    glance,
    holds_any,
    open_folder,
    point_to,
    step_in,
    temporary,
)
from shoal.checkpoint.layout.head import FILE, NewerFormat, read_head
from shoal.checkpoint.verify import verify
from shoal.errors import ConfigError
from shoal.sealed import seal, unseal, write_file
from shoal.urls import last_name, open_url, reason, title_of, try_again
from shoal.world.world import World

T = TypeVar("T")

_PART = "manifest.part"
_OURS = re.compile(r"rank-[0-9]+\.safetensors|manifest\.part")
_SIGNS = "*?[]"


class Remote:
    """A folder of copies at a URL.

    >>> Remote("memory://nothing-yet").candidates()
    []
    """

    def __init__(self, url: str, waits: Sequence[float] = (0.5, 2.0, 8.0)) -> None:
        """`waits`: seconds to wait before each new try after a failure that may pass."""
        self.title = title_of(url)
        self._waits = waits
        self._files, path = open_url(url, self.title)
        self._path = _literal(path).rstrip("/")

    def check(self) -> None:
        """Whether copies can be written there at all, asked before any time is spent on the first one."""
        probe = f"{self._path}/.probe-{os.getpid()}"
        with self._or_say("written to"):
            self._try(self._files.pipe_file, probe, b"shoal")
            self._try(self._files.rm_file, probe)

    def candidates(self) -> list[Candidate]:
        """The copies there: the latest first, then the others, newest first."""
        with self._or_say("listed"):
            pointer = self._read(LATEST)
            found = [c for name in self._names() if (c := self._candidate(name)) is not None]
        first = None
        with suppress(ValueError):
            first = unseal(pointer) if pointer is not None else None
        found.sort(key=lambda c: (c.name == first, c.step, c.written), reverse=True)
        return [replace(candidate, latest=number == 0) for number, candidate in enumerate(found)]

    def upload(self, folder: Path, tell: Callable[[int, int], None] | None = None) -> None:
        """Copy a checkpoint there and make it the latest; `tell` hears of bytes done and bytes in all."""
        name = _literal(check_name(folder.name))
        found = open_folder(folder)
        if found.manifest is None:
            raise ConfigError(f"{found.problem}; only a whole checkpoint can be copied.")
        text = found.manifest.dumps()
        done = 0
        total = sum(facts.bytes for facts in found.manifest.files.values())
        self.remove(name)  # from here on it is no checkpoint there: files of two could mix
        with self._or_say("written to"):
            for file, facts in found.manifest.files.items():
                self._try(self._files.put_file, str(folder / file), self._at(name, file))
                done += facts.bytes
                if tell is not None:
                    tell(done, total)
            if open_folder(folder).manifest != found.manifest:
                raise ConfigError(f"{folder} changed while it was copied to {self.title}; copy it once more.")
            # Some file systems show a file while it grows. A move shows it whole.
            self._try(self._files.pipe_file, self._at(name, _PART), text)
            self._try(self._files.mv, self._at(name, _PART), self._at(name, FILE))
            self._try(self._files.pipe_file, self._at(LATEST), seal(name))

    def download(self, name: str, root: Path) -> Path:
        """Have a copy as a checkpoint in a local folder, or a refusal. What was the latest there stays the latest."""
        final = root / _literal(check_name(name))
        with self._or_say("read"):
            text = self._try(self._files.cat_file, self._at(name, FILE))
            written = temporary(root, name, f"copy-{time.time_ns():x}")
            written.mkdir(parents=True)
            try:
                self._fetch(name, text, written)
                first = next((found for found, outline in glance(root).items() if outline.latest), name)
                commit(written, final)
                if first != name:
                    point_to(root, first)
            finally:
                shutil.rmtree(written, ignore_errors=True)
        return final

    def remove(self, name: str) -> None:
        """Remove a copy: the manifest first, so that half of one is never taken for a checkpoint."""
        _literal(check_name(name))
        self._files.invalidate_cache()
        with self._or_say("written to"):
            with suppress(FileNotFoundError):
                self._try(self._files.rm_file, self._at(name, FILE))
            with suppress(FileNotFoundError):
                self._try(self._files.rm, self._at(name), True)

    def clean(self) -> None:
        """Remove what uploads that were cut short have left, and nothing else. Nobody may be uploading."""
        with self._or_say("listed"):
            halves = [name for name in self._names() if self._is_half(name)]
        for name in halves:
            self.remove(name)

    def _fetch(self, name: str, text: bytes, into: Path) -> None:
        """The files of a copy, on the disk and checked."""
        write_file(into / FILE, [text])
        found = open_folder(into)
        for file in found.manifest.files if found.manifest is not None else ():
            with suppress(FileNotFoundError):  # then `verify` misses it
                self._try(self._files.get_file, self._at(name, file), str(into / file))
                flush(into / file)
        problem = next(verify(found), None)
        if problem is not None:
            problem = problem.replace(str(into), f"{self.title}/{name}")
            raise ConfigError(f"a copy is damaged ({problem}); use another checkpoint.")

    def _names(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            entries = self._try(self._files.ls, self._path, True)
        except FileNotFoundError:
            return []
        names = [last_name(entry["name"]) for entry in entries if entry["type"] == "directory"]
        return sorted(name for name in names if not name.startswith(".") and not set(name) & set(_SIGNS))

    def _candidate(self, name: str) -> Candidate | None:
        text = self._read(name, FILE)
        if text is None:
            return None
        try:
            head = read_head(text)
        except NewerFormat:
            number = step_in(name)
            return Candidate(name, -1 if number is None else number, False, unreadable=True)
        except ValueError:
            return Candidate(name, -1, False)
        return Candidate(name, head.step, False, head.written, head.keep)

    def _is_half(self, name: str) -> bool:
        """Whether there is nothing but what an upload has left: other people's folders may lie beside ours."""
        names = [last_name(entry) for entry in self._try(self._files.ls, self._at(name), False)]
        return bool(names) and all(_OURS.fullmatch(entry) for entry in names)

    def _read(self, *names: str) -> bytes | None:
        """A file, if it is there."""
        try:
            return self._try(self._files.cat_file, self._at(*names))
        except FileNotFoundError:
            return None

    def _at(self, *names: str) -> str:
        return "/".join([self._path, *names])

    def _try(self, action: Callable[..., T], *given: object) -> T:
        return try_again(lambda: action(*given), self._waits)

    @contextmanager
    def _or_say(self, verb: str) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            kind = ConfigError if isinstance(error, FileNotFoundError) else Unreadable
            raise kind(
                f"{self.title} cannot be {verb} ({reason(error)}); "
                "check the address, the credentials, the network and the space."
            ) from error


class RemotePlace:
    """Copies at a URL as a place to go on from. Rank 0 alone talks to it; every rank sees the same."""

    def __init__(self, world: World, remote: Remote, root: Path) -> None:
        """What is brought comes into `root`, a folder that all ranks see."""
        self._world = world
        self._remote = remote
        self._root = root
        self.title = remote.title

    def candidates(self) -> list[Candidate]:
        listed: list[Candidate] = []
        problem = ""
        nothing = False
        if self._world.rank == 0:
            try:
                listed = self._remote.candidates()
            except ConfigError as error:
                problem = str(error)
                nothing = not holds_any(self._root)
        told, problem, nothing = self._world.gather_values([[astuple(c) for c in listed], problem, nothing])[
            0
        ]
        if nothing:  # to begin anew would bury what may be there
            raise ConfigError(f"there is no checkpoint in {self._root}, and {problem}")
        if problem:
            self._say(problem)
        return [Candidate(*entry) for entry in told]

    def bring(self, name: str) -> Path:
        problem = ""
        closed = False
        if self._world.rank == 0:
            try:
                self._remote.download(name, self._root)
            except ConfigError as error:
                problem = str(error)
                closed = isinstance(error, Unreadable)
        problem, closed = self._world.gather_values([problem, closed])[0]
        if closed:
            raise Unreadable(
                f"{problem} The copy of {name} there is the newest checkpoint, and this run does not go on from an "
                "older one by itself; leave out copies= to do so."
            )
        if not problem:
            return self._root / name
        self._say(problem)
        return Path(f"{self.title}/{name}")  # nothing that could be opened: all ranks go on to the next

    def _say(self, problem: str) -> None:
        if self._world.rank == 0:
            print(f"shoal: {problem}", file=sys.stderr)


def _literal(path: str) -> str:
    """A path that means itself: fsspec reads some signs as patterns, and would remove all that matches."""
    if set(path) & set(_SIGNS):
        raise ConfigError(f"copies: '{path}' has one of the signs * ? [ ] in it; use a name without.")
    return path
