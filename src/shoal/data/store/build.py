"""Building a version of a store: rows in, files out, and last the manifest.

While it lasts, the folder `.build-<name>` beside the manifests holds a journal of the files that are finished. The name
follows from what is being built, so the same build, started again after it was killed, finds them and goes on behind
them. Rows are made in order by one producer; threads write and check files meanwhile.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import xxhash

from shoal.data.store.arrow import RecordBatch, Schema, arrow, stored_schema
from shoal.data.store.cut import cut
from shoal.data.store.manifest import BLOCK, StoreFile, StoreManifest, version_name
from shoal.data.store.places.place import Place
from shoal.data.store.versions import read_manifest
from shoal.errors import ConfigError
from shoal.sealed import seal, unseal

_JOURNAL = "journal"
_LOCK = "lock"
FILE_BYTES = 128 * 2**20
"""A file takes so much memory while it is made, and with it each thread."""

Rows = Callable[[int], Iterable[RecordBatch]]
"""The rows of a build from a number on, in the same order each time."""


@dataclass(frozen=True)
class BuildOptions:
    """How files are made."""

    file_bytes: int = FILE_BYTES
    """About so many bytes in a file."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Columns of lists that all have one length, and their shape: then rows are tensors of it."""
    threads: int = 2
    """They write files while rows are made."""
    append: bool = False
    """Add the rows to the present version, as a new one."""
    replace: bool = False
    """Make a new version of these rows alone, where there is one already."""


def build(
    place: Place,
    schema: Schema,
    rows: Rows,
    lineage: Mapping[str, object],
    options: BuildOptions | None = None,
    features: Mapping[str, object] | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> StoreManifest:
    """A new version of the store at a place. `tell` hears how many rows and bytes are written.

    `lineage` says what is built; the same build goes on where it was killed.
    """
    options = options or BuildOptions()
    stored = stored_schema(schema, dict(options.shapes))
    base = _newest(place) if options.append or options.replace else None
    name = _name(lineage, stored, options, base)
    with _stage(place, name) as stage:
        before = _newest(place)
        if before is not None and before.lineage and before.lineage[-1].get("build") == name:
            return before  # by another worker of the same job, or earlier
        _check_place(place, before, base, stored, options)
        files = Journal(stage).read(place.data_files())
        for file in _write_all(place, stage, stored, rows, [*files], options):
            files.append(file)
            if tell is not None:
                tell(sum(one.rows for one in files), sum(one.bytes for one in files))
        if not files:
            raise ConfigError(f"there are no rows to write; nothing is written to {place.title}.")
        return _commit(place, stored, before, files, {"build": name, **lineage}, options, features or {})


def _newest(place: Place) -> StoreManifest | None:
    versions = place.versions()
    return read_manifest(place, versions[-1]) if versions else None


def _check_place(
    place: Place,
    before: StoreManifest | None,
    base: StoreManifest | None,
    stored: Schema,
    options: BuildOptions,
) -> None:
    """Refuse where the new version does not fit to the one before."""
    if before is None:
        return
    if not (options.append or options.replace):
        raise ConfigError(
            f"there is a store at {place.title}, of {before.rows} rows; append to it (append=True), make a version of "
            "other rows (replace=True), or give another place."
        )
    if base is None or base.version != before.version:
        raise ConfigError(
            f"version {before.version} of {place.title} was made by another process meanwhile; build once more."
        )
    if options.append:
        check_schema(dict(before.columns), columns_of(stored))


def check_schema(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Refuse to append rows of other columns.

    >>> check_schema({"age": "int64"}, {"age": "string"})
    Traceback (most recent call last):
    shoal.errors.ConfigError: column 'age' is string in the new rows and int64 in the store; cast it, or make a \
version of its own with replace=True.
    """
    for name in (*old, *new):
        if old.get(name) != new.get(name):
            raise ConfigError(
                f"column '{name}' is {new.get(name, 'missing')} in the new rows and {old.get(name, 'missing')} in the "
                "store; cast it, or make a version of its own with replace=True."
            )


def columns_of(stored: Schema) -> dict[str, str]:
    """Each column's type in words."""
    return {entry.name: str(entry.type) for entry in stored}


def _name(
    lineage: Mapping[str, object], stored: Schema, options: BuildOptions, before: StoreManifest | None
) -> str:
    """Of the folder of a build: the same for the same build."""
    made = asdict(options) | {"threads": 0}
    text = json.dumps(
        [lineage, columns_of(stored), made, before and before.version], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _stage(place: Place, name: str) -> Iterator[Path]:
    """The folder of a build, held by one process at a time; removed when the build is finished."""
    stage = place.stage(name)
    new = [folder for folder in (stage.parent, *stage.parent.parents) if not folder.exists()]
    lock = _lock(stage)
    try:
        yield stage
    except BaseException:
        if not (stage / _JOURNAL).exists():  # nothing to go on from
            shutil.rmtree(stage, ignore_errors=True)
            with suppress(OSError):
                for folder in new:
                    folder.rmdir()
        raise
    else:
        shutil.rmtree(stage, ignore_errors=True)
    finally:
        os.close(lock)


def _lock(stage: Path) -> int:
    """The lock of a build. Who builds the same at the same time waits here, and then finds it built."""
    while True:
        stage.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # removed meanwhile by the one that was first
            lock = os.open(stage / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (stage / _LOCK).exists() and os.path.samestat(os.fstat(lock), os.stat(stage / _LOCK)):
                return lock
            os.close(lock)


def is_held(stage: Path, name: str = _LOCK) -> bool:
    """Whether a process is at work on a build."""
    try:
        with open(stage / name) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class Journal:
    """The finished files of a build, one line each. A line that a crash has cut short does not count."""

    def __init__(self, stage: Path) -> None:
        self._path = stage / _JOURNAL

    def read(self, there: Mapping[str, int]) -> list[StoreFile]:
        """Those before the first line that is not whole, or whose file is not `there` with its size."""
        found: list[StoreFile] = []
        if not self._path.exists():
            return found
        whole = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            try:
                file = StoreFile(**unseal(line))
            except (ValueError, TypeError):
                break
            if there.get(file.name) != file.bytes:
                break
            found.append(file)
            whole += len(line)
        os.truncate(self._path, whole)
        return found

    def add(self, file: StoreFile) -> None:
        """See a line on the disk."""
        with open(self._path, "ab") as out:
            out.write(seal(asdict(file)))
            out.flush()
            os.fsync(out.fileno())


def _write_all(
    place: Place, stage: Path, stored: Schema, rows: Rows, done: list[StoreFile], options: BuildOptions
) -> Iterator[StoreFile]:
    """The files that are still to be written, in order."""
    journal = Journal(stage)
    number = len(done)
    produced = cut(rows(sum(file.rows for file in done)), stored, options.file_bytes)
    waiting: deque[Future[StoreFile]] = deque()
    with ThreadPoolExecutor(options.threads) as pool:
        try:
            for batch in produced:
                waiting.append(pool.submit(write_rows, place, stage, batch, number))
                number += 1
                if len(waiting) > options.threads:  # memory for one more than are being written
                    yield _note(journal, waiting)
            while waiting:
                yield _note(journal, waiting)
        finally:
            for future in waiting:
                future.cancel()


def _note(journal: Journal, waiting: deque[Future[StoreFile]]) -> StoreFile:
    file = waiting.popleft().result()
    journal.add(file)
    return file


def write_rows(place: Place, stage: Path, batch: RecordBatch, number: int) -> StoreFile:
    """One file: written, flushed, checked sum by sum, and brought in."""
    pa = arrow()
    path = stage / f"part-{number:06}"
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, batch.schema) as writer:
        writer.write_batch(batch)
    digest, blocks = checksums(path)
    with open(path, "rb") as written:
        os.fsync(written.fileno())
    size = path.stat().st_size
    place.bring_in(path, f"{digest}.arrow")
    return StoreFile(f"{digest}.arrow", batch.num_rows, size, digest, blocks, _nulls(batch), _lengths(batch))


def checksums(path: Path) -> tuple[str, str]:
    """The checksum of a file, and those of its blocks."""
    whole = xxhash.xxh3_128()
    blocks = []
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            whole.update(block)
            blocks.append(xxhash.xxh3_64_hexdigest(block))
    return whole.hexdigest(), "".join(blocks)


def _nulls(batch: RecordBatch) -> dict[str, int]:
    found = {name: batch.column(name).null_count for name in batch.schema.names}
    return {name: count for name, count in found.items() if count}


def _lengths(batch: RecordBatch) -> dict[str, list[int]]:
    pa = arrow()
    found = {}
    for entry in batch.schema:
        if pa.types.is_list(entry.type):
            ends = pa.compute.min_max(
                pa.compute.fill_null(pa.compute.list_value_length(batch.column(entry.name)), 0)
            )
            found[entry.name] = [ends["min"].as_py(), ends["max"].as_py()]
    return found


def _commit(
    place: Place,
    stored: Schema,
    before: StoreManifest | None,
    files: list[StoreFile],
    lineage: Mapping[str, object],
    options: BuildOptions,
    features: Mapping[str, object],
) -> StoreManifest:
    """The manifest: from now on the version is there."""
    version = before.version + 1 if before is not None else 1
    grown = before if options.append else None
    everything = (*(grown.files if grown else ()), *files)
    entry = {"version": version, "rows": sum(file.rows for file in everything), **lineage}
    kept = (*(grown.lineage if grown else ()), entry)
    features = {**(grown.features if grown else {}), **features}
    made = StoreManifest(version, columns_of(stored), everything, kept, features)
    try:
        place.create(version_name(version), made.dumps())
    except FileExistsError as error:
        raise ConfigError(
            f"version {version} of {place.title} was made by another process meanwhile; build once more."
        ) from error
    return made
