"""Which benchmarks there are: a name, and the module that measures.

Such a module has a docstring (what it measures, how to call it, its goals) and two functions:

    add_options(parser)       its own options
    measure(options)            yields sections (report/result.py), each when it is measured
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Protocol, cast

from benchmarks.report.result import Section

BENCHMARKS = {
    "exchange": "training",
    "zero3": "training",
    "tensor": "training",
    "pipeline": "training",
    "balance": "training",
    "overhead": "training",
    "checks": "training",
    "see": "training",
    "startup": "training",
    "recipes": "training",
    "collectives": "communication",
    "levels": "communication",
    "compress": "communication",
    "network": "network",
    "server": "server",
    "sparse": "server",
    "simulation": "server",
    "memory": "state",
    "checkpoint": "state",
    "data": "data",
    "stages": "data",
    "recovery": "faults",
    "queue": "jobs",
    "augment": "data",
    "order": "data",
    "padding": "data",
    "plan": "plan",
}
"""Name -> folder."""


class Benchmark(Protocol):
    """A module that measures."""

    __doc__: str | None

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def measure(self, options: argparse.Namespace) -> Iterator[Section]: ...


def find(name: str) -> Benchmark:
    """Its module, which brings torch."""
    return cast(Benchmark, importlib.import_module(f"benchmarks.{BENCHMARKS[name]}.{name}"))
