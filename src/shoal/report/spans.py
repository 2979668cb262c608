"""What a rank did when: one record for each stretch of work, in a ring of memory that goes to disk in batches.

A record is 24 bytes of a fixed layout, packed into memory that is there already: about a third of a microsecond. The
ring is written where the event log is, twice a second, between two steps. `spans-rank00000.bin` holds the newest 32 MB,
and `spans-rank00000.1.bin` the 32 MB before.

    field      bytes   meaning
    step       4       the step it belongs to, counted from 1; of an anchor the version of this layout
    kind       2       `SpanKind`
    detail     2       number of a bucket; of a micro-batch, plus 1024 times its stage; of an anchor the rank
    begin      8       nanoseconds of the monotonic clock, which all processes of a host share
    duration   8       nanoseconds; of an anchor the wall clock at `begin`, in nanoseconds since 1970
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from time import perf_counter_ns, time_ns

LAYOUT = 1
RECORD = struct.Struct("<IHHqq")
RING = 4096
"""Records: at 20 a step of 2 ms they last for 0.4 seconds."""
ROTATE_BYTES = 32 << 20
SHORT_NS = 5000
"""What took less is no span: nobody would see it, and `exposed` is that short many times a step."""
MICROBATCHES = 1024
"""In `detail` of a pass: below this the micro-batch, above it the stage."""


class SpanKind(IntEnum):
    """What a stretch of time went into."""

    ANCHOR = 0
    """No stretch: one moment on both clocks, at the start of each process."""
    DATA = 1
    COMPUTE = 2
    EXPOSED = 3
    UPDATE = 4
    FORWARD = 5
    """One micro-batch through the model, or through a stage of it; inside COMPUTE."""
    BACKWARD = 6
    WEIGHT = 7
    """The second half of a backward pass, under schedules that take it apart."""
    BUCKET = 8
    """The collective of a bucket, from when it was sent until it had been waited for; beside the others."""
    CHECKPOINT = 9
    RECOVERY = 10
    BETWEEN = 11
    """From one step to the next: the script's own code, logs, checkpoints."""


class Spans:
    """The ring of one process. Without a file it keeps nothing.

    >>> spans = Spans()
    >>> spans.step = 1
    >>> spans.add(SpanKind.FORWARD, 1000, 3000)
    >>> spans.waiting
    1
    """

    __slots__ = ("_at", "_end", "_file", "_pack", "_path", "_rank", "_ring", "_size", "step")

    def __init__(self) -> None:
        self.step = 0
        """The step that is being done."""
        self._ring = bytearray(RING * RECORD.size)
        self._end = len(self._ring)
        self._pack = RECORD.pack_into
        self._at = 0
        self._file = -1
        self._path = Path()
        self._rank = 0
        self._size = 0

    def begin(self, step: int) -> None:
        """This step is being done from now on. If it goes back, a new anchor says so: readers count on the order."""
        if step < self.step:
            self.flush()
            self._anchor()
        self.step = step

    def add(self, kind: int, begin: int, end: int, detail: int = 0) -> None:
        """This went on from `begin` to `end`, of `perf_counter_ns`."""
        at = self._at
        if at == self._end:
            self.flush()
            at = 0
        self._pack(self._ring, at, self.step, kind, detail, begin, end - begin)
        self._at = at + 24

    @contextmanager
    def during(self, kind: SpanKind, detail: int = 0) -> Iterator[None]:
        """What goes on inside is one span."""
        begin = perf_counter_ns()
        try:
            yield
        finally:
            self.add(kind, begin, perf_counter_ns(), detail)

    @property
    def waiting(self) -> int:
        """Records that are not in the file yet."""
        return self._at // RECORD.size

    def open(self, path: Path, rank: int) -> None:
        """From now on spans go to this file, after what is there."""
        self.close()
        self._path = path
        self._rank = rank
        self._open()

    def flush(self) -> None:
        """Hand what waits to the operating system; a disk that takes nothing costs spans, and never the run."""
        waiting = memoryview(self._ring)[: self._at]
        self._at = 0
        if self._file < 0 or not waiting:
            return
        try:
            self._size += os.write(self._file, waiting)
            if self._size > ROTATE_BYTES:
                os.close(self._file)
                self._file = -1
                os.replace(self._path, older(self._path))
                self._open()
        except OSError:
            self._cut_torn_record()

    def close(self) -> None:
        """Write what waits, and let go of the file; twice is harmless."""
        if self._file >= 0:
            self.flush()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o644)
            self._cut_torn_record()
            self._anchor()
        except OSError:
            self._file = -1

    def _anchor(self) -> None:
        if self._file >= 0:
            record = RECORD.pack(LAYOUT, SpanKind.ANCHOR, self._rank & 0xFFFF, perf_counter_ns(), time_ns())
            self._size += os.write(self._file, record)

    def _cut_torn_record(self) -> None:
        if self._file < 0:
            return
        size = os.fstat(self._file).st_size
        self._size = size - size % RECORD.size
        if size != self._size:
            os.ftruncate(self._file, self._size)


def older(path: Path) -> Path:
    """Where the spans before those of `path` are.

    >>> older(Path("run/spans-rank00003.bin")).name
    'spans-rank00003.1.bin'
    """
    return path.with_name(f"{path.stem}.1{path.suffix}")
