"""Trackio: a small local tracker with the calls of wandb; `trackio show` opens it.

When to use: a local dashboard over all your runs, kept where TRACKIO_DIR says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from shoal.report.trackers.base import Numbers


class Trackio:
    """One run of the project "shoal", or that of TRACKIO_PROJECT."""

    summary: ClassVar[str] = "Trackio, locally: in the run's folder, or where TRACKIO_DIR says"
    needs: ClassVar[str] = "trackio"

    def __init__(self, folder: Path, name: str, settings: Mapping[str, object]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((folder / "trackio").absolute()))
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "shoal")
        self._module: Any = trackio
        self._run: Any = trackio.init(project=project, name=name, config=dict(settings), embed=False)

    def log(self, values: Numbers, step: int) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()
