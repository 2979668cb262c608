"""What a run tells about itself: one `StepReport` per step, shown live, kept in a log, drawn as a curve.

meter.py     where the time of one step went, and how much memory it took
events.py    the event log: one line of JSON per step, whole even after `kill -9`
console.py   a progress bar on a terminal, plain lines anywhere else
chart.py     curves as text and as PNG, and the one-line bar of a step's time

`scripts/bench overhead` measures what all of it costs a step: little, so it is always on.
"""

from shoal.report.chart import draw, save_png, time_split
from shoal.report.console import Console
from shoal.report.events import Event, EventLog, last_pass, read_events
from shoal.report.meter import PHASES, Meter, Phase, Times, peak_memory

__all__ = [
    "PHASES",
    "Console",
    "Event",
    "EventLog",
    "Meter",
    "Phase",
    "Times",
    "draw",
    "last_pass",
    "peak_memory",
    "read_events",
    "save_png",
    "time_split",
]
