"""Where the workers of a job meet: a store that all of them reach and no stranger does.

One host meets in a private file. Several hosts meet at an address and port; torch's own TCPStore listens on
every interface, so we bind the socket ourselves, to that one address, and hand it over.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import cast
from urllib.parse import urlparse

from torch.distributed.rendezvous import rendezvous as meet

from shoal.errors import ConfigError
from shoal.torch_private import FileStore, PrefixStore, Store, TCPStore
from shoal.world.interfaces import interface_towards
from shoal.world.launch import Launch


def open_store(launch: Launch, timeout: timedelta) -> Store:
    """The store that `launch.rendezvous` names."""
    if launch.rendezvous == "env://":
        store, _, _ = next(meet("env://", launch.rank, launch.size, timeout=timeout))
        return cast(Store, store)
    target = urlparse(launch.rendezvous)
    if target.scheme == "file":
        return FileStore(target.path, launch.size)
    if target.scheme == "tcp" and target.hostname and target.port:
        return _tcp_store(target.hostname, target.port, launch, timeout)
    raise ConfigError(
        f"cannot meet at '{launch.rendezvous}'; SHOAL_RENDEZVOUS takes file:///path or tcp://address:port."
    )


def in_attempt(launch: Launch, store: Store) -> Store:
    """The part of a store that belongs to this start of the workers: torchrun's own outlives those it starts anew."""
    return PrefixStore(f"attempt{launch.attempt}", store) if launch.attempt else store


def _tcp_store(address: str, port: int, launch: Launch, timeout: timedelta) -> Store:
    if launch.kept:
        return TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    listener = None
    if launch.rank == 0:
        # Bound here to one address and handed over: TCPStore itself would listen at all of them.
        listener = socket.create_server((address, port))
    return TCPStore(
        address,
        port,
        launch.size,
        launch.rank == 0,
        timeout,
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def bind_gloo(launch: Launch) -> None:
    """Keep gloo's own sockets on the interface that leads to the meeting place: loopback on one host."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    target = urlparse(launch.rendezvous)
    if target.scheme == "tcp" and target.hostname:
        name = interface_towards(target.hostname, target.port or 1)
        if not name:
            raise ConfigError(
                f"no network interface of this host leads to {target.hostname}:{target.port or 1}; check --at."
            )
    elif launch.local_size == launch.size:
        # Without this gloo looks up the host name, which may lead to an outside interface or nowhere.
        name = "lo"
    else:
        return  # torchrun over several hosts: its own choice of interface stands
    os.environ["GLOO_SOCKET_IFNAME"] = name
