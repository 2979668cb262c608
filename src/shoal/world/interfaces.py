"""The network interfaces of this host."""

from __future__ import annotations

import socket

import psutil


def interface_towards(address: str, port: int) -> str:
    """The interface that leads there; empty if its address belongs to none of this host.

    >>> interface_towards("127.0.0.1", 1)
    'lo'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # a datagram socket: nothing is sent, only the route is looked up
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == mine for entry in addresses):
            return str(name)
    return ""
