"""The parts of a store that is being prepared: which are done, who makes which, and how far training has come.

    store/v00007.json                  version 7: the first seven parts
    store/.build-parts/00007.lock      held by the process that makes part 7
    store/.build-parts/00007.json      its files are written; it is committed when all parts before it are
    store/.build-parts/00007.asked     training waits for it, or has read it

Whoever finds the next part made commits it. A version's manifest is created once and never replaced, so each part is in
the store exactly once, whoever makes it and however often.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.data.flow.functions import source_of
from shoal.data.store.arrow import RecordBatch, arrow, stored_schema
from shoal.data.store.build import BuildOptions, check_schema, columns_of, is_held, write_rows
from shoal.data.store.cut import cut
from shoal.data.store.manifest import StoreFile, StoreManifest, version_name
from shoal.data.store.places.place import LocalPlace
from shoal.data.store.versions import read_manifest
from shoal.errors import ConfigError
from shoal.sealed import checksum, read_file, seal, unseal, write_file

Prepare = Callable[[int], Any]
"""The number of a part -> its rows: an Arrow table, a flow, or a dict of columns."""

LOOK_SECONDS = 0.02
PATIENCE_SECONDS = 10.0
"""So long training waits for a part that another process makes, or three times the longest part; then it makes it."""


GRACE_SECONDS = 2.0
"""So long training leaves a part that nobody makes to preparers, if there are any: one may just be starting."""


@dataclass(frozen=True)
class Division:
    """How a store is divided into parts."""

    rows: int
    """In each part; the last has what is left."""
    samples: int
    ahead: int = 4
    """So many parts are made before training asks for them."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.samples < 1 or self.ahead < 1:
            raise ConfigError(
                f"rows={self.rows}, samples={self.samples}, ahead={self.ahead}; each is at least 1."
            )

    @property
    def parts(self) -> int:
        """How many there are.

        >>> Division(rows=4, samples=10).parts, Division(4, 10).rows_of(2)
        (3, 2)
        """
        return -(-self.samples // self.rows)

    def rows_of(self, part: int) -> int:
        """In one part."""
        return min(self.rows, self.samples - part * self.rows)


class Parts:
    """The parts of one store."""

    def __init__(
        self, folder: Path, prepare: Prepare, division: Division, options: BuildOptions, grace: float = 0.0
    ) -> None:
        """`grace`: so long a part that nobody makes is left to others."""
        self._grace = grace
        self.place = LocalPlace(folder)
        self._prepare = prepare
        self._division = division
        self._options = options
        self._stage = self.place.stage("parts")
        text = f"{source_of(prepare)} {division.rows} {division.samples} {dict(options.shapes)}"
        self._sign = checksum(text.encode())
        self._done = 0
        self._held = 0
        """The process that holds the folder: a copy in another one does not."""
        self._check()

    def committed(self) -> int:
        """How many parts are in the store; commits what is ready."""
        while self._done < self._division.parts:
            versions = self.place.versions()
            self._done = versions[-1] if versions else 0
            made = self._made(self._done)
            if made is None:
                break
            self._commit(self._done, made)
        return self._done

    def need(self, part: int) -> None:
        """Return when a part is in the store: another process makes it, or this one does."""
        if part < self._done or part < self.committed():
            return
        self._note(part, "asked")
        since, waits_for = time.monotonic(), -1
        while (first := self.committed()) <= part:
            if first != waits_for:
                since, waits_for = time.monotonic(), first
            if time.monotonic() - since >= self._grace:
                with self._claim(first) as mine:
                    if mine:
                        self.make(first)
                        continue
            if time.monotonic() - since > self._patience():
                print(
                    f"shoal: part {first} of {self.place.title} takes long; training makes it itself.",
                    file=sys.stderr,
                )
                self.make(first)
            time.sleep(LOOK_SECONDS)

    def make_ahead(self, over: Callable[[], bool]) -> None:
        """Make parts, never more than `ahead` of what training has asked for, until all are there or it is `over`."""
        while not over() and self.committed() < self._division.parts:
            last = min(self._asked() + self._division.ahead, self._division.parts - 1)
            if not any(self._make_if_free(part) for part in range(self._done, last + 1)):
                time.sleep(LOOK_SECONDS)

    def make(self, part: int) -> None:
        """Make a part, whoever else does."""
        began = time.monotonic()
        batches, schema = self._rows(part)
        stored = stored_schema(schema, dict(self._options.shapes))
        if self._done:
            check_schema(dict(read_manifest(self.place, self._done).columns), columns_of(stored))
        try:
            self._write(part, batches, stored, began)
        except FileNotFoundError:  # another was faster, and has tidied up behind the last part
            if self.committed() <= part:
                raise

    def _write(self, part: int, batches: Sequence[RecordBatch], stored: Any, began: float) -> None:
        self._enter()
        with tempfile.TemporaryDirectory(
            dir=self._stage, prefix=f"{part:05}-", ignore_cleanup_errors=True
        ) as folder:
            pieces = enumerate(cut(batches, stored, self._options.file_bytes))
            files = [write_rows(self.place, Path(folder), batch, number) for number, batch in pieces]
            body = {
                "columns": columns_of(stored),
                "files": [asdict(file) for file in files],
                "seconds": time.monotonic() - began,
            }
            write_file(Path(folder) / "made", [seal(body)])
            with suppress(FileExistsError, FileNotFoundError):  # made by another, or even in the store by now
                os.link(Path(folder) / "made", self._stage / f"{part:05}.json")
        self.committed()

    def _make_if_free(self, part: int) -> bool:
        if (self._stage / f"{part:05}.json").exists():
            return False
        with self._claim(part) as mine:
            if mine:
                self.make(part)
            return mine

    def _rows(self, part: int) -> tuple[Sequence[RecordBatch], Any]:
        """What the user's function gives, checked."""
        from shoal.data.flow.flow import Flow

        pa, wanted = arrow(), self._division.rows_of(part)
        try:
            made = self._prepare(part)
            if isinstance(made, Flow):
                made = made.arrow()
            elif isinstance(made, Mapping):
                made = pa.table(dict(made))
        except ConfigError as error:
            raise ConfigError(f"prepare({part}) was refused: {error}") from error
        except Exception as error:
            raise ConfigError(f"prepare({part}) raised {type(error).__name__}: {error}") from error
        if isinstance(made, pa.RecordBatch):
            made = pa.Table.from_batches([made])
        if not isinstance(made, pa.Table):
            raise ConfigError(
                f"prepare({part}) gave {type(made).__name__}; it gives an Arrow table, a flow, or a dict of columns."
            )
        if made.num_rows != wanted:
            raise ConfigError(
                f"prepare({part}) gave {made.num_rows} rows, and part {part} has {wanted}: of "
                f"samples={self._division.samples} each part has rows={self._division.rows}, the last what is left."
            )
        return made.to_batches(), made.schema

    def _check(self) -> None:
        """Refuse a store that was made in another way; remove what killed processes have left."""
        versions = self.place.versions()
        if versions:
            last = read_manifest(self.place, versions[-1])
            if last.lineage[-1].get("prepared") != self._sign or versions[-1] > self._division.parts:
                raise ConfigError(
                    f"the store at {self.place.title} was made by another function or with other constants, rows= or "
                    "samples= (all processes must see the same ones); give another folder, or remove it."
                )
        for folder in self._stage.glob("*-*"):
            if not is_held(self._stage, f"{folder.name[:5]}.lock"):
                shutil.rmtree(folder, ignore_errors=True)

    def _made(self, part: int) -> dict[str, Any] | None:
        """What was made of a part; None if nothing is, or its files are gone."""
        path = self._stage / f"{part:05}.json"
        try:
            made: dict[str, Any] = unseal(read_file(path))
        except FileNotFoundError:
            return None
        except ValueError:  # of an older start, before a power cut
            path.unlink(missing_ok=True)
            return None
        there = self.place.data_files()
        if all(there.get(file["name"]) == file["bytes"] for file in made["files"]):
            return made
        path.unlink(missing_ok=True)
        return None

    def _commit(self, part: int, made: dict[str, Any]) -> None:
        """One more version: all parts before this one, and this one."""
        before = read_manifest(self.place, part) if part else None
        files = tuple(StoreFile(**facts) for facts in made["files"])
        everything = (*(before.files if before else ()), *files)
        entry: dict[str, Any] = {"version": part + 1, "rows": sum(file.rows for file in everything)}
        entry |= {"engine": f"part {part}", "prepared": self._sign}
        if before is None:
            entry["code"] = [source_of(self._prepare)]
        lineage = (*(before.lineage if before else ()), entry)
        version = StoreManifest(part + 1, made["columns"], everything, lineage)
        with suppress(FileExistsError):  # another process was first, with the same part
            self.place.create(version_name(part + 1), version.dumps())
        if part + 1 == self._division.parts:
            shutil.rmtree(self._stage, ignore_errors=True)

    def _asked(self) -> int:
        """The last part that training has asked for."""
        try:
            names = os.listdir(self._stage)
        except FileNotFoundError:
            names = []
        return max((int(name[:5]) for name in names if name.endswith(".asked")), default=0)

    def _note(self, part: int, what: str) -> None:
        self._enter()
        (self._stage / f"{part:05}.{what}").touch()

    def _enter(self) -> None:
        """See that the folder is there, and that nobody collects it while this process lives."""
        self._stage.mkdir(parents=True, exist_ok=True)
        if self._held != os.getpid():
            self._held = os.getpid()
            lock = os.open(self._stage / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_SH)  # never closed: the kernel lets go of it when the process ends

    def _patience(self) -> float:
        found = [PATIENCE_SECONDS]
        for path in self._stage.glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                found.append(3 * float(unseal(read_file(path))["seconds"]))
        return max(found)

    @contextmanager
    def _claim(self, part: int) -> Iterator[bool]:
        """Whether this process may make a part now; the kernel lets go of the claim when it ends."""
        self._enter()
        lock = os.open(self._stage / f"{part:05}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            done = (self._stage / f"{part:05}.json").exists() or self.committed() > part
            yield not done
        finally:
            os.close(lock)
