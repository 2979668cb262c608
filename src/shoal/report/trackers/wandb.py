"""Weights & Biases: online where its own settings say so (WANDB_MODE), else offline in the run's folder.

When to use: you have an account there. `wandb sync RUN/wandb/offline-run-...` uploads what was written offline.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from shoal.report.trackers.base import Numbers


class Wandb:
    """One run; offline unless WANDB_MODE says otherwise."""

    summary: ClassVar[str] = "Weights & Biases; offline unless WANDB_MODE=online"
    needs: ClassVar[str] = "wandb"

    def __init__(self, folder: Path, name: str, settings: Mapping[str, object]) -> None:
        import wandb

        online = os.environ.get("WANDB_MODE") == "online"
        mode: Literal["online", "offline"] = "online" if online else "offline"
        quiet = wandb.Settings(console="off", silent=True)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shoal"),
            name=name,
            dir=str(folder),
            mode=mode,
            config=dict(settings),
            settings=quiet,
        )

    def log(self, values: Numbers, step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
