"""One worker of `shoal plan --calibrate`: measures with the others; the first keeps what was found."""

from __future__ import annotations

import sys
from dataclasses import replace

from shoal.plan.cache import keep, machine_key
from shoal.plan.machine import Machine
from shoal.train.planning.calibrate import calibrate
from shoal.world.launch import from_environment
from shoal.world.world import World

TABLES = "machines"


def key_of(workers: int) -> str:
    """Names this machine with so many workers at work."""
    return f"{machine_key()}-{workers}"


def main() -> None:
    """Measure, and keep it."""
    launch = from_environment()
    world = World.open(replace(launch, dry_run=""))
    found: Machine = calibrate(world, servers=bool(launch.launcher))
    if world.rank == 0 and not keep(TABLES, key_of(world.size), {"machine": found.to_json()}):
        print("shoal: the tables cannot be kept: the cache folder cannot be written.", file=sys.stderr)
    world.barrier()


if __name__ == "__main__":
    main()
