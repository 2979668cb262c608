"""One run at a time in a folder: who works there writes host, process and start time into `.lock`.

Whoever finds a lock asks whether its owner still lives. On the same machine the process itself tells: its number, and
when it was started, for numbers come again. From another machine nobody can see that; but an owner touches its lock
every few seconds, so a lock that stays as it is for a while has none. No clock is compared with another, and no file
system has to know about locks. So nobody is locked out by what a crash has left, on whatever host.

An owner may have slept so long that another has taken over. It looks before each checkpoint gets its name, and ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from shoal.errors import ConfigError
from shoal.sealed import read_file
from shoal.world.failure import is_interactive

NAME = ".lock"
BEAT = 3.0
"""Seconds between two signs of life."""
WATCH = 12.0
"""Seconds without one, as seen from another machine, after which an owner is gone: file systems may show it late."""
PATIENCE = 3.0
"""Seconds that an owner on this machine, who may just be ending, is waited for."""
_SETTLE = 0.3
"""Seconds after which one of two who take over at the same moment sees that it was the other."""


class FolderTaken(ConfigError):
    """Another run works in this checkpoint folder."""


@dataclass(frozen=True)
class Owner:
    """A process, on whatever machine."""

    host: str
    machine: str
    """Which start of which machine, and what of it this process sees: equal where process numbers mean the same."""
    pid: int
    started: int
    """When the process was started, in ticks of its machine."""
    since: str
    token: str = ""

    @staticmethod
    def me(token: str) -> Owner:
        """This process."""
        pid = os.getpid()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return Owner(socket.gethostname(), _machine(), pid, _started(pid) or 0, since, token)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unknown host'}, since {self.since[:19].replace('T', ' ')} UTC"

    def is_same(self, other: Owner) -> bool:
        """Whether the two are one process."""
        return (self.machine, self.pid, self.started) == (other.machine, other.pid, other.started)

    @property
    def lives(self) -> bool:
        """For one of this machine: whether its process is there."""
        return _started(self.pid) == self.started


class FolderLock:
    """A run's right to write into a folder of checkpoints. `take` and `release` may come in turns."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._path = root / NAME
        self._owner: Owner | None = None
        self._stop = threading.Event()
        self._finalizer: weakref.finalize | None = None  # type: ignore[type-arg]

    @property
    def held(self) -> bool:
        """Whether it is ours, as far as we know."""
        return self._owner is not None

    def take(self) -> None:
        """Have the folder, or raise `FolderTaken`; OSError where nothing can be written there."""
        if self.held:
            return
        me = Owner.me(os.urandom(8).hex())
        self.root.mkdir(parents=True, exist_ok=True)
        while not self._create(me):
            found = self._read()
            if found is None:
                continue  # it has just gone
            self._wait_for_end(found, me)
            if self._take_over(found, me):
                gone = "an earlier Run of this session" if found.is_same(me) else f"{found}, which is gone"
                text = f"{self.root} was in use by {gone}; this run takes over its lock"
                print(f"shoal: {text}.", file=sys.stderr, flush=True)
                break
        self._owner = me
        self._stop = threading.Event()
        self._finalizer = weakref.finalize(self, _remove, self._path, me)
        beat = threading.Thread(target=_beat, args=(self._path, me, self._stop), name="lock", daemon=True)
        beat.start()

    def check(self) -> None:
        """Raise `FolderTaken` if it is not ours any more."""
        if self._owner is None:
            return
        found = self._read()
        if found is None:  # somebody has removed the file, or all of the folder
            self.root.mkdir(parents=True, exist_ok=True)
            if self._create(self._owner):
                return
            found = self._read()
        if found is not None and found.token != self._owner.token:
            raise FolderTaken(
                f"{self.root} has been taken over by {found}: this run was not heard from for {WATCH:.0f} s, or was "
                "made anew, and writes nothing more; give each run a checkpoint folder of its own."
            )

    def release(self) -> None:
        """Others may have it."""
        self._stop.set()
        if self._finalizer is not None:
            self._finalizer()
        self._owner = None

    def _create(self, me: Owner) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, json.dumps(asdict(me)).encode())
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return True

    def _read(self) -> Owner | None:
        """Who has it; None where nobody has."""
        try:
            return Owner(**json.loads(read_file(self._path)))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            if not self._path.is_file():
                raise ConfigError(f"{self._path} is no lock of a run ({error}); remove it.") from error
            return Owner("", "", 0, 0, "?")  # being written, or of another version

    def _wait_for_end(self, found: Owner, me: Owner) -> None:
        """Return once the owner is gone; raise `FolderTaken` if it is not."""
        here = found.machine == me.machine != ""
        if found.is_same(me):
            if is_interactive():  # whoever makes a Run once more means the new one
                return
            raise FolderTaken(
                f"{self.root} is in use by another Run of this script; give each Run a checkpoint folder of its own, "
                "or let the loop of the first come to its end."
            )
        before = self._touched()
        if not here:
            text = f"{self.root} was last used by {found}; looking for {WATCH:.0f} s whether that run is still there"
            print(f"shoal: {text}.", file=sys.stderr, flush=True)
        end = time.monotonic() + (PATIENCE if here else WATCH)
        while found.lives if here else self._touched() == before:
            if self._read() != found:
                return  # released, or somebody else has been quicker
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        if found.lives if here else self._touched() != before:
            raise FolderTaken(
                f"{self.root} is in use by {found}; wait until that run has ended, stop it, or choose another "
                "checkpoint folder."
            )

    def _touched(self) -> int:
        """When there was a sign of life. Opened first: a shared file system then asks its server."""
        try:
            with open(self._path, "rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return 0

    def _take_over(self, found: Owner, me: Owner) -> bool:
        if self._read() != found:
            return False
        mine = self._path.with_name(f"{NAME}.{me.token}")
        mine.write_text(json.dumps(asdict(me)))
        os.replace(mine, self._path)
        time.sleep(_SETTLE)
        return self._read() == me


def _beat(path: Path, me: Owner, stop: threading.Event) -> None:
    """Signs of life, until the lock is released or another's."""
    token = me.token.encode()
    while not stop.wait(BEAT):
        with suppress(OSError, ValueError):  # a file system that is away for a while is no reason to end
            if token not in read_file(path):
                return
            os.utime(path)


def _remove(path: Path, me: Owner) -> None:
    """Remove a lock that is still ours. A fork of its owner has none."""
    with suppress(OSError, ValueError):
        if os.getpid() == me.pid and me.token.encode() in read_file(path):
            path.unlink()


def _started(pid: int) -> int | None:
    """When a process was started; None if it is not there, or waits to be buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _machine() -> str:
    """Empty where the system does not say."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""
