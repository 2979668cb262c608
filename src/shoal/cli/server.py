"""`shoal server`: servers of a parameter server that stand alone."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer


def server(
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="Where to listen; loopback if nothing is said.")
    ] = "127.0.0.1:7077",
    keys: Annotated[
        str, typer.Option(metavar="FILE", help="The job's keys; made if the file does not exist.")
    ] = "shoal.keys",
    servers: Annotated[int, typer.Option(help="How many servers to run on this host.")] = 2,
    join: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="The coordinator of a job on another host.")
    ] = "",
) -> None:
    """Run servers that outlive their workers, or that workers of several hosts share. They serve one job.

    \b
    shoal server --listen 10.0.0.1:7077 --keys job.keys
    shoal server --listen 10.0.0.2:7077 --keys job.keys --join 10.0.0.1:7077     (on another host; copy the keys)
    shoal run --strategy "ps(at=10.0.0.1:7077, keys=job.keys, servers=4)" train.py
    """
    share = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // max(1, servers)))
    # Libraries start threads as they are loaded, and only a process without threads may be forked.
    os.environ.update({"OMP_NUM_THREADS": share, "OPENBLAS_NUM_THREADS": "1"})
    from shoal.cluster.standalone import run_servers

    import_module("torch._dynamo")  # the first optimizer of a process imports it: once, here, for all servers
    run_servers(listen, join, Path(keys).expanduser().absolute(), servers, share)
