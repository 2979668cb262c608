"""More workers than cores: all of them start, meet, and finish."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import finish, start, write

TRAIN = """
points = torch.randn(640, 5, generator=generator)
data = torch.utils.data.TensorDataset(points, (points.sum(1) > 0).long())
run = shoal.Run(**{**settings, "data": data, "global_batch": 64, "log": None})
for step in run.steps(int(sys.argv[1])):
    pass
print("trained", step.number)
"""


@pytest.mark.parametrize(
    ("strategy", "workers", "steps"),
    [
        ("shared", 12, 50),
        *[pytest.param(name, 32, 200, marks=pytest.mark.all_only) for name in ("ddp", "shared", "ps")],
    ],
)
def test_they_finish(tmp_path: Path, strategy: str, workers: int, steps: int) -> None:
    words = ("run", "--workers", str(workers), "--strategy", strategy, write(tmp_path, TRAIN), str(steps))
    done = finish(start(tmp_path, "-m", "shoal", *words), timeout=300.0)
    # Twelve workers on two cores are not equally fast, and a run says so.
    said = [
        line
        for line in done.err.splitlines()
        if not re.match(r"shoal: rank \d+ (is .* slower|keeps up)", line)
    ]
    assert (done.code, done.out, said) == (0, f"trained {steps}\n", [])
