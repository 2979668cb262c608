"""How the launchers of several hosts agree on a start: a process beside each, that talks to the others through a store.

Host 0's process holds the store, at `--at`, so that it outlives the workers. In it stands the number of the present
start. Whoever loses a worker makes it one more, and every launcher that sees a higher number than its own starts its
workers again under that number. Each host counts up a beat; one whose beat stands still is lost, and waited for. A
launcher that cannot reach the store ends its workers: so where the network is cut, only the side of host 0 may go on.

The launcher itself waits for nobody: a store may block for long, and then the process beside it is what blocks. No
clock of another host is read.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn

from shoal.cluster.watch import Interrupts, say
from shoal.cluster.worker import STOP_SIGNALS, die_with
from shoal.errors import Loss, WorkerFailed

BEAT_SECONDS = 0.25
SILENT_SECONDS = 5.0
"""So long without a beat, and a host is lost; so long without a word from the store, and this one is."""
RETURN_SECONDS = 600.0
"""So long a host that is lost is waited for."""
FOLLOWS = "another host"
_PREFIX = "shoal/launchers/"
_TIMEOUT = timedelta(seconds=5)
_MOST = 1 << 16
"""Bytes of one word between a launcher and the process beside it."""
_EXIT_CODE = 4


@dataclass(frozen=True)
class News:
    """What is known of the job on all hosts."""

    start: int = -1
    """The number of the present start; -1: nobody was reached yet."""
    lost: tuple[int, ...] = ()
    """Hosts without a beat."""
    done: int = 0
    """How many hosts have come to their end."""
    over: str = ""
    """Why the job has ended on another host; empty while it goes on."""


class Liaison:
    """The launcher's end."""

    def __init__(self, host: int, hosts: int, address: tuple[str, int], closes: Sequence[int]) -> None:
        """Starts the process; `closes`: descriptors that it may not hold."""
        self._hosts = hosts
        mine, theirs = socket.socketpair()
        launcher = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            mine.close()
            for descriptor in closes:
                os.close(descriptor)
            _serve(host, hosts, address, theirs, launcher)
        theirs.close()
        self._line = mine
        self._line.setblocking(False)
        self._partial = b""
        self._heard = time.monotonic()
        self.alone: Callable[[], bool] = lambda: False
        """Whether the workers of this host need none of another's: they meet at servers only."""
        self.news = News()
        self.generation = 0
        """The start that this launcher's workers belong to."""

    @property
    def descriptor(self) -> int:
        """Readable when there are news."""
        return self._line.fileno()

    def hear(self) -> None:
        """Take in the news; raises `WorkerFailed` where the workers have to end because of them."""
        self._read()
        news = self.news
        if news.over:
            raise WorkerFailed(f"the job has ended on another host: {news.over}", _EXIT_CODE)
        if self.alone():
            self.generation = max(self.generation, news.start)
            return
        if news.start > self.generation:
            raise _lost("another host has lost a worker", FOLLOWS)
        if news.lost:
            hosts = ", ".join(map(str, news.lost))
            raise _lost(f"host {hosts} has not been heard from for {SILENT_SECONDS:g} s", "a lost host")
        self.look()

    def look(self) -> None:
        """Once a second: raises where the store has not answered for a while."""
        if time.monotonic() - self._heard > SILENT_SECONDS and not self.alone():
            raise _lost(f"the store of host 0 has not answered for {SILENT_SECONDS:g} s", "a lost store")

    def begin(self, interrupts: Interrupts) -> int:
        """Wait until all hosts can start, and return under which number."""
        deadline = time.monotonic() + RETURN_SECONDS
        told = False
        began = time.monotonic()
        while True:
            # Again and again: a word may be lost with its store, and another store knows nothing of this start.
            self._send({"wants": self.generation})
            self._read()
            news = self.news
            heard = time.monotonic() - self._heard < SILENT_SECONDS
            if news.over:
                raise WorkerFailed(f"the job has ended on another host: {news.over}", _EXIT_CODE)
            if (heard and news.start >= self.generation and not news.lost) or self.alone():
                self.generation = max(self.generation, news.start)
                return self.generation
            if not told and time.monotonic() - began > 2.0:
                told = True
                who = f"host {', '.join(map(str, news.lost))}" if news.lost else "host 0"
                say(f"waiting for {who}, for {RETURN_SECONDS:g} s at most.")
            if time.monotonic() > deadline:
                raise WorkerFailed(f"a host was waited for in vain, for {RETURN_SECONDS:g} s.", _EXIT_CODE)
            interrupts.pause(BEAT_SECONDS)
            interrupts.obey()

    def again(self) -> None:
        """The workers of this host are lost: the next start is one more than the present one."""
        self.generation += 1

    def end(self, over: str = "") -> None:
        """This host has come to its end; `over`: because of this. Host 0 stays until the others have, too."""
        with suppress(OSError):
            self._send({"over": over[:2000]} if over else {"done": True})
            deadline = time.monotonic() + (1.0 if over else SILENT_SECONDS)
            while time.monotonic() < deadline and not (self.news.over or self.news.done >= self._hosts):
                time.sleep(0.05)
                self._read()
            if over:
                time.sleep(4 * BEAT_SECONDS)  # the others look there
        self.close()

    def close(self) -> None:
        """End the process."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
            self._line.close()

    def _send(self, word: dict[str, object]) -> None:
        with suppress(OSError):  # it is gone, which `look` notices
            self._line.sendall(json.dumps(word).encode() + b"\n")

    def _read(self) -> None:
        with suppress(OSError):
            while data := self._line.recv(_MOST):
                *lines, self._partial = (self._partial + data).split(b"\n")
                for line in lines:
                    self.news = _news(line) or self.news
                    self._heard = time.monotonic()


def _lost(sentence: str, cause: str) -> WorkerFailed:
    return WorkerFailed(f"{sentence}.", _EXIT_CODE, loss=Loss(f"{sentence}.", -1, cause))


def _news(line: bytes) -> News | None:
    try:
        found = json.loads(line)
        lost = tuple(int(host) for host in found["lost"])
        return News(int(found["start"]), lost, int(found["done"]), str(found["over"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


# From here on in the process beside the launcher.


def _serve(host: int, hosts: int, address: tuple[str, int], line: socket.socket, launcher: int) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the launcher says when it is over
        die_with(launcher)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # torch prints each failure to connect, with all of its C++ frames
            os.dup2(nowhere, stream)
        line.setblocking(False)
        beside = _Beside(host, hosts, line)
        listener = socket.create_server(address).detach() if host == 0 else None
        while True:
            # Another host's store may come back, as another one.
            with suppress(RuntimeError, OSError, ValueError):
                beside.talk(_store(address, listener))
            time.sleep(BEAT_SECONDS)
    finally:
        os._exit(1)


def _store(address: tuple[str, int], listener: int | None) -> object:
    from shoal.torch_private import PrefixStore, TCPStore

    options: dict[str, Any] = {"wait_for_workers": False, "timeout": _TIMEOUT}
    if listener is not None:
        options["master_listen_fd"] = listener
    return PrefixStore(_PREFIX, TCPStore(*address, None, listener is not None, **options))


class _Beside:
    """Carries words between a launcher and the store."""

    def __init__(self, host: int, hosts: int, line: socket.socket) -> None:
        self._host = host
        self._hosts = hosts
        self._line = line
        self._partial = b""
        self._beats: dict[int, tuple[int, float]] = {}
        self._store = b""
        """The name of the store that was talked to last."""
        self._start = 0
        """The highest start that was ever seen."""

    def talk(self, store: Any) -> None:
        """Until the store is gone."""
        store.compare_set("start", "", "0")
        before = self._store
        self._store = store.compare_set("name", "", os.urandom(8).hex())
        if before not in (b"", self._store):  # the host of the store was lost, and with it its workers
            _raise_to(store, self._start + 1)
        if store.add(f"joined/{self._host}", 1) > 1:  # this host was here before, and is another one now
            _raise_to(store, int(store.get("start")) + 1)
        while True:
            for word in self._words():
                if "wants" in word:
                    _raise_to(store, int(word["wants"]))
                if "over" in word:
                    store.set("over", str(word["over"]))
                if "done" in word:
                    store.set(f"done/{self._host}", "1")
            store.add(f"beat/{self._host}", 1)
            self._line.send(json.dumps(asdict(self._look(store))).encode() + b"\n")
            time.sleep(BEAT_SECONDS)

    def _look(self, store: Any) -> News:
        now, lost, done = time.monotonic(), [], 0
        for host in range(self._hosts):
            if store.check([f"done/{host}"]):
                done += 1
            elif host != self._host and store.check([f"beat/{host}"]):
                beat = int(store.add(f"beat/{host}", 0))
                before, since = self._beats.get(host, (-1, now))
                self._beats[host] = (beat, now if beat != before else since)
                if now - self._beats[host][1] > SILENT_SECONDS:
                    lost.append(host)
        over = store.get("over").decode() if store.check(["over"]) else ""
        self._start = max(self._start, int(store.get("start")))
        return News(self._start, tuple(lost), done, over)

    def _words(self) -> list[dict[str, Any]]:
        try:
            data = self._line.recv(_MOST)
        except BlockingIOError:
            return []
        if not data:
            os._exit(0)  # the launcher has ended
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [word for line in lines if isinstance(word := json.loads(line), dict)]


def _raise_to(store: Any, wanted: int) -> None:
    """Make the present start at least this one, whoever else does the same."""
    while (now := int(store.get("start"))) < wanted:
        store.compare_set("start", str(now), str(wanted))
