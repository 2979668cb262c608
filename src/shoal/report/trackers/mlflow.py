"""MLflow: the server that MLFLOW_TRACKING_URI names, else a file store in the run's folder.

When to use: models go into production by MLflow's registry, or a server of it is there already.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from shoal.report.trackers.base import Numbers

_LONGEST = 500
"""Characters of a parameter that MLflow takes."""


class Mlflow:
    """One run of the experiment "shoal", or that of MLFLOW_EXPERIMENT_NAME."""

    summary: ClassVar[str] = "MLflow: the server of MLFLOW_TRACKING_URI, else files in the run's folder"
    needs: ClassVar[str] = "mlflow"

    def __init__(self, folder: Path, name: str, settings: Mapping[str, object]) -> None:
        given = os.environ.get("MLFLOW_TRACKING_URI")
        if given is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(given or (folder / "mlflow").absolute().as_uri())
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shoal")
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        self._run: str = self._client.create_run(number, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, str(value)[:_LONGEST])

    def log(self, values: Numbers, step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step, synchronous=True)

    def close(self) -> None:
        self._client.set_terminated(self._run)
