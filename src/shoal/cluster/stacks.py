"""The Python stack of a worker that does not answer: asked for by a signal, written by faulthandler into a file.

The handler is C code and needs no lock of the interpreter, so it answers in the middle of a computation too.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
from dataclasses import dataclass
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMAX - 3
"""A real-time signal: scripts and schedulers use SIGUSR1 and SIGUSR2."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TORCH = os.path.join(sysconfig.get_path("purelib"), "torch") + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_WAITS = (
    *(_PACKAGE + name + os.sep for name in ("world", "exchange", "server", "pipeline", "checkpoint")),
    _TORCH + "distributed" + os.sep,
)
"""Code in which a worker is when it waits for others."""
_COMPILES = (_TORCH + "_dynamo" + os.sep, _TORCH + "_inductor" + os.sep)
_DEBUGS = tuple(os.path.join(_PYTHON, f"{name}.py") for name in ("pdb", "bdb", "code"))
_LINES = 8
_MOST = 1 << 20
"""Characters of an answer that are looked at."""


def register(folder: str, rank: int) -> None:
    """In a worker: answer the signal from now on."""
    # The file stays open for as long as the process lives.
    file = open(_path(folder, rank), "a")  # noqa: SIM115
    faulthandler.register(STACK_SIGNAL, file, all_threads=False)


@dataclass(frozen=True)
class Stack:
    """Frames of the main thread, innermost first."""

    frames: tuple[tuple[str, int, str], ...]

    @property
    def waits(self) -> bool:
        """Whether the worker waits for others: it is in code of ours or torch's that talks to them."""
        files = [file for file, _, _ in self.frames if not _is_python(file)]
        return bool(files) and files[0].startswith(_WAITS)

    @property
    def compiles(self) -> bool:
        """Whether torch is compiling the model."""
        return any(file.startswith(_COMPILES) for file, _, _ in self.frames)

    @property
    def debugs(self) -> bool:
        """Whether it waits for somebody at a prompt."""
        return any(file.startswith(_DEBUGS) for file, _, _ in self.frames)

    def __str__(self) -> str:
        return "\n".join(
            f'  | File "{file}", line {line}, in {name}' for file, line, name in self.frames[:_LINES]
        )


def ask(pid: int, folder: str, rank: int) -> None:
    """Have a worker write its stack down."""
    with open(_path(folder, rank), "a") as file:
        file.truncate(0)
    os.kill(pid, STACK_SIGNAL)


def read(folder: str, rank: int) -> Stack | None:
    """What a worker has answered; None if it has not."""
    try:
        with open(_path(folder, rank), errors="replace") as file:
            text = file.read(_MOST)
    except OSError:
        return None
    found = [(m["file"], int(m["line"]), m["name"]) for m in map(_FRAME.match, text.splitlines()) if m]
    own = next(
        (i for i, (file, _, name) in enumerate(found) if name == "_run_script" and file.startswith(_PACKAGE)),
        len(found),
    )
    script = [frame for frame in found[:own] if not frame[0].startswith("<frozen runpy")]
    return Stack(tuple(script)) if script else None


def _is_python(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_PYTHON) and "site-packages" not in file)


def _path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"stack-{rank}")
