"""Slot: where jobs run. One folder an engine; this table is the list of them."""

from __future__ import annotations

from shoal.jobs.engine import Engine, accept
from shoal.jobs.k8s.engine import Kubernetes
from shoal.jobs.local.engine import Local
from shoal.jobs.slurm.engine import Slurm
from shoal.table import Table

TABLE: Table[type[Engine]] = Table("engine", {"local": Local, "slurm": Slurm, "k8s": Kubernetes})
DEFAULT = "local"
"""Whose jobs are named by their number alone."""

__all__ = ["DEFAULT", "TABLE", "Engine", "accept"]
