"""TensorBoard: event files in the run's folder, for `tensorboard --logdir`.

When to use: curves of many runs in one place, with nothing but a folder. Needs neither TensorFlow nor torch's wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import ClassVar

from shoal.report.trackers.base import Numbers


class Tensorboard:
    """Writes RUN/tensorboard."""

    summary: ClassVar[str] = "event files in the run's folder, for tensorboard --logdir"
    needs: ClassVar[str] = "tensorboard"

    def __init__(self, folder: Path, name: str, settings: Mapping[str, object]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        del name, settings
        self._event = Event
        self._summary = Summary
        self._writer = EventFileWriter(str(folder / "tensorboard"))

    def log(self, values: Numbers, step: int) -> None:
        found = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time(), step=step, summary=self._summary(value=found)))

    def close(self) -> None:
        self._writer.close()
