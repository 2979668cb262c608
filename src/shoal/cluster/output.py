"""Where the printed lines of the workers go.

"first"  the first worker of this host prints straight to the terminal, the others into private files
"all"    every worker prints through pipes, and each line arrives whole with the worker's rank before it
"none"   every worker prints into a file, and has nothing to read
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

Output = Literal["first", "all", "none"]

TAIL_LINES = 20
_TAIL_BYTES = 16384
_READ_BYTES = 65536


class Relay:
    """Carries whole lines from a worker's pipe to one of the launcher's own streams, with a prefix."""

    def __init__(self, source: int, sink: int, prefix: str) -> None:
        self.source = source
        self._sink = sink
        self._sink_open = True
        self._prefix = prefix.encode()
        self._partial = b""
        os.set_blocking(source, False)

    def pump(self) -> bool:
        """Pass on what the pipe holds now; False if it holds nothing."""
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._write(b"".join(self._prefix + line + b"\n" for line in lines))
        return bool(data)

    def finish(self) -> None:
        """Pass on the rest, and do not wait until the pipe closes: a child of the worker may hold it open for ever."""
        while self.pump():
            pass
        if self._partial:
            self._write(self._prefix + self._partial + b"\n")
        os.close(self.source)

    def _write(self, data: bytes) -> None:
        while data and self._sink_open:
            try:
                data = data[os.write(self._sink, data) :]
            except BrokenPipeError:
                self._sink_open = False  # `shoal run ... | head` has seen enough; the training goes on


@dataclass(frozen=True)
class OutputStreams:
    """File descriptors of the launcher that become a worker's stdin, stdout and stderr."""

    stdin: int
    stdout: int
    stderr: int
    relays: tuple[Relay, ...] = ()
    """The launcher's ends, where the output comes through pipes."""

    def close(self) -> None:
        """Give up the worker's ends: it has its own copies now."""
        for descriptor in {self.stdin, self.stdout, self.stderr} - {0, 1, 2}:
            os.close(descriptor)


def open_streams(output: Output, folder: str, rank: int, first: bool, reads: bool = True) -> OutputStreams:
    """The streams of worker `rank`. The first worker of a host gets the terminal's stdin, if its output is shown.

    `reads`: whether a worker may have stdin at all; not where the launcher reads from it itself.
    """
    stdin = 0 if first and reads and output != "none" else os.open(os.devnull, os.O_RDONLY)
    if output == "all":
        out, stdout = os.pipe()
        err, stderr = os.pipe()
        prefix = f"[{rank}] "
        return OutputStreams(stdin, stdout, stderr, (Relay(out, 1, prefix), Relay(err, 2, prefix)))
    if output == "first" and first:
        return OutputStreams(stdin, 1, 2)
    log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return OutputStreams(stdin, log, log)


def tail(folder: str, rank: int) -> str:
    """The last lines that worker `rank` printed into its file; empty if it has none."""
    try:
        with open(_log(folder, rank), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(_without_our_frames(lines)[-TAIL_LINES:])


def _without_our_frames(lines: list[str]) -> list[str]:
    """faulthandler prints the frames of a crash, innermost first: leave out those of the launcher."""
    ours = (i for i, line in enumerate(lines) if line.endswith("in _run_script") and "worker.py" in line)
    return lines[: next(ours, len(lines))]


def _log(folder: str, rank: int) -> str:
    return os.path.join(folder, f"worker-{rank}.log")
