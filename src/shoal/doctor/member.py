"""One host as host 0 sees it: it answers questions until it is told that there are no more."""

from __future__ import annotations

import socket
import threading
import time
from statistics import median
from typing import cast

from shoal.doctor.finding import Facts, Json, number, text
from shoal.doctor.meet import Channel, NoAnswer

IDLE_SECONDS = 180.0
STREAM_SECONDS = 0.25
PINGS = 40
BLOCK = 1 << 18
CONNECT_SECONDS = 3.0
LISTEN_SECONDS = 8.0


class Member:
    """Answers for this host."""

    def __init__(self, facts: dict[str, Facts], address: str) -> None:
        """`facts`: of each check; `address`: where other hosts reach this one."""
        self._facts = facts
        self._address = address
        self._stream: socket.socket | None = None

    def serve(self, channel: Channel) -> None:
        """Until host 0 says that it is the end, or goes."""
        while True:
            try:
                message = channel.hear(IDLE_SECONDS)
                if message.get("do") == "end":
                    return
                channel.say(self._answer(message))
            except (NoAnswer, OSError):
                return

    def _answer(self, message: Facts) -> Facts:
        try:
            what = text(message, "do")
            if what == "clock":
                return {"now": time.time()}
            if what == "facts":
                return cast(Facts, self._facts)
            if what == "listen":
                return self._listen()
            if what == "stream":
                return stream_to(text(message, "address"), int(number(message, "port")))
        except (KeyError, TypeError, OSError) as error:
            return {"error": str(error)}
        return {"error": f"{what[:40]!r} is nothing that this version of `shoal doctor` can do"}

    def _listen(self) -> Facts:
        """Take one stream, at a port that the answer names."""
        listener = socket.create_server((self._address, 0))
        listener.settimeout(LISTEN_SECONDS)
        threading.Thread(target=take_stream, args=(listener,), daemon=True).start()
        return {"port": listener.getsockname()[1]}


def take_stream(listener: socket.socket) -> None:
    """Echo single bytes, then swallow a stream and say how much it was."""
    try:
        with listener:
            connection, _ = listener.accept()
        with connection:
            connection.settimeout(LISTEN_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                connection.sendall(connection.recv(1))
            buffer, total = memoryview(bytearray(BLOCK)), 0
            while got := connection.recv_into(buffer):
                total += got
            connection.sendall(total.to_bytes(8, "big"))
    except OSError:
        return  # the other side says so


def stream_to(address: str, port: int) -> Facts:
    """Half a round trip, and bytes a second towards who listens there."""
    with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
        connection.settimeout(LISTEN_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips: list[float] = []
        for _ in range(PINGS):
            begun = time.perf_counter()
            connection.sendall(b"1")
            if not connection.recv(1):
                raise OSError("the connection was closed")
            trips.append(time.perf_counter() - begun)
        block, begun = bytes(BLOCK), time.perf_counter()
        while time.perf_counter() - begun < STREAM_SECONDS:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(8, socket.MSG_WAITALL)
        # The last byte has arrived when the other side says how many it has: what waits in buffers counts as sent.
        seconds = time.perf_counter() - begun
    found: dict[str, Json] = {"seconds": median(trips) / 2, "rate": int.from_bytes(answer, "big") / seconds}
    return found
