"""Programs that benchmarks start: they find `benchmarks` wherever they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from benchmarks.report.origin import ROOT


def python(module: str, *words: str) -> list[str]:
    """The words that run one of our modules."""
    return [sys.executable, "-m", module, *words]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, with the repository on the path: the package is installed, the benchmarks are not."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", **(extra or {}), "PYTHONPATH": os.pathsep.join(paths)}
