"""Commands without their three seconds of import: a process that has torch and Shoal loaded forks, and becomes one.

From there on it is a command as any other: a process with its own id, folder, environment, signals, streams and exit
code, whose children are its own. What only a fresh interpreter shows, such as what is imported when, is tested with
`fresh` commands.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import current_process
from multiprocessing.process import AuthenticationString
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from shoal.testing.spawn import warm


class Command:
    """What tests need of `subprocess.Popen`, for `python ...` in a forked process."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        command: Sequence[str],
        enter: Callable[[], None] | None = None,
    ) -> None:
        """`enter` is called first of all: to be on another host, for one."""
        self.args = [sys.executable, *command]
        self._read: list[bytes] = [b"", b""]
        pipes = [os.pipe() for _ in range(2)]
        start = _Start(folder, dict(environment), list(command), enter, [writer for _, writer in pipes])
        self._process = warm().Process(target=start, daemon=True)
        self._process.start()
        for _, writer in pipes:
            os.close(writer)
        self.pid: int = self._process.pid or 0
        # Read from the beginning, so that nobody ever waits for a full pipe.
        self._readers = [
            threading.Thread(target=self._drain, args=(i, pipes[i][0]), daemon=True) for i in range(2)
        ]
        for reader in self._readers:
            reader.start()

    def _drain(self, index: int, descriptor: int) -> None:
        with open(descriptor, "rb") as stream:
            for line in stream:
                self._read[index] += line

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it printed, once it and all that print to the same places have ended."""
        for waits in (*(reader.join for reader in self._readers), self._process.join):
            waits(timeout)
        if self.poll() is None or any(reader.is_alive() for reader in self._readers):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        out, err = (io.TextIOWrapper(io.BytesIO(read)).read() for read in self._read)
        return out, err

    def first_error(self, timeout: float = 60.0) -> str:
        """The first line that it prints to its errors, once it is there."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._read[1]:
            assert time.monotonic() < deadline, "it has said nothing"
            time.sleep(0.01)
        return self._read[1].decode().splitlines()[0]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass
class _Start:
    """Runs in the forked process."""

    folder: Path
    environment: dict[str, str]
    command: list[str]
    enter: Callable[[], None] | None
    streams: list[Any]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "streams": [DupFd(stream) for stream in self.streams]}

    def __call__(self) -> None:
        for target, given in enumerate(self.streams, 1):
            descriptor = given.detach()
            os.dup2(descriptor, target)
            os.close(descriptor)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        if self.enter is not None:
            self.enter()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        tempfile.tempdir = None  # as the new environment says
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # A script may have children of its own; that it is ended with the tests is for the tests to know.
        config = current_process()._config  # type: ignore[attr-defined]
        config.clear()
        config.update(authkey=AuthenticationString(os.urandom(32)), semprefix="/mp")  # as of a main process
        multiprocessing.set_start_method(None, force=True)  # that of the platform, not ours
        code = _run(self.command)
        sys.stdout.flush()
        os._exit(code)


def _run(command: list[str]) -> int:
    """As the interpreter does: run, wait for threads, call the exit handlers."""
    code = 0
    try:
        if command[0] == "-m":
            sys.argv, sys.path[0] = command[1:], os.getcwd()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = command, str(Path(command[0]).absolute().parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code
