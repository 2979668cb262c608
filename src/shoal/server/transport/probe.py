"""Why nothing is heard from an address: nobody listens there, or whoever does refuses our keys."""

from __future__ import annotations

import contextlib
import time
from typing import Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from shoal.server.transport.keys import JobKeys

Finding = Literal["open", "wrong keys", "nobody"]

_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_DISCONNECTED,
)


def probe(address: str, keys: JobKeys, seconds: float) -> Finding:
    """Connect once more, and see how far that comes within some seconds.

    Somebody who takes the connection and then says nothing counts as nobody: a server answers a handshake at once.
    """
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
    monitor = dealer.get_monitor_socket()
    try:
        dealer.connect(address)
        return _outcome(monitor, time.monotonic() + seconds)
    finally:
        with contextlib.suppress(zmq.ZMQError):
            dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close(linger=0)
        context.term()


def _outcome(monitor: zmq.Socket[bytes], end: float) -> Finding:
    while (left := end - time.monotonic()) > 0:
        if not monitor.poll(max(1, int(left * 1000))):
            break
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return "open"
        if event in _REFUSED:
            return "wrong keys"
    return "nobody"
