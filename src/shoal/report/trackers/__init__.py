"""Slot: where a run's numbers go besides its own files. One file a tracker; this table is the list of them."""

from __future__ import annotations

from shoal.report.trackers.base import Tracker
from shoal.report.trackers.mlflow import Mlflow
from shoal.report.trackers.tensorboard import Tensorboard
from shoal.report.trackers.trackio import Trackio
from shoal.report.trackers.wandb import Wandb
from shoal.table import Table

TABLE: Table[type[Tracker]] = Table(
    "tracker",
    {"tensorboard": Tensorboard, "wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio},
)

__all__ = ["TABLE", "Tracker"]
