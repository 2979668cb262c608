"""Trackers: real ones where they are installed, and that none of them can hold up or end a run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ConfigError
from shoal.report.profile import profile_steps
from shoal.report.trackers import TABLE
from shoal.report.trackers import send as sending
from shoal.report.trackers.send import Sending, tracker_names
from shoal.types import StepReport

REPORT = StepReport(1, 0, 2.5, 32, 32.0, 0.04, 0.001, 0.03, 0.005, 0.004, 1000, 1 << 20, 1e-3)


class Kept:
    """Keeps what it gets."""

    summary = "keeps what it gets, in memory"
    needs = "nothing"
    gate = threading.Event()
    seen: list[tuple[dict[str, float], int]]

    def __init__(self, folder: Path, name: str, settings: Mapping[str, object]) -> None:
        Kept.seen = []
        self.given = (folder, name, settings)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.gate.wait(20)
        self.seen.append((dict(values), step))

    def close(self) -> None:
        self.seen.append(({"closed": 1.0}, 0))


class Broken(Kept):
    """Raises."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise RuntimeError(f"the server is away at step {step} with {len(values)}")


def run_with(folder: Path | None, trackers: str, profile: str = "") -> shoal.Run:
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    return shoal.Run(
        model=lambda: nn.Linear(4, 1),
        loss=lambda output, batch: (((output - batch[1]) ** 2).sum(), batch[1].numel()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=data,
        global_batch=8,
        strategy="solo",
        log=str(folder) if folder is not None else None,
        progress=False,
        trackers=trackers,
        profile=profile,
    )


def test_a_slow_tracker_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "STEP_SECONDS", 0.0)
    Kept.gate.clear()
    one = Sending(["kept"], tmp_path, {"settings": {"seed": 1}}, {"kept": Kept})
    begun = time.perf_counter()
    for number in range(1, 2001):
        one.step(replace(REPORT, number=number))
    one.log(2000, {"accuracy": 0.5, "note": "text", "bad": float("nan")})
    assert time.perf_counter() - begun < 1.0
    assert one.lost >= 2000 - sending.QUEUE - 1
    Kept.gate.set()
    one.drain()
    one.close()
    steps = [step for _, step in Kept.seen[:-1]]
    assert steps == sorted(steps)
    assert Kept.seen[0][0]["loss"] == 2.5
    assert Kept.seen[-1][0] == {"closed": 1.0}


def test_one_that_raises_is_named_once_and_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Kept.gate.set()
    one = Sending(["broken", "kept"], tmp_path, {}, {"broken": Broken, "kept": Kept})
    for number in (1, 2, 3):
        one.log(number, {"accuracy": number / 10})
    one.close()
    said = "tracker broken gets no more of this run; RuntimeError: the server is away at step 1 with 1."
    assert capsys.readouterr().err.count(said) == 1
    assert [step for _, step in Kept.seen] == [1, 2, 3, 0]


def test_what_is_not_installed_costs_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = [name for name, kind in TABLE.items() if importlib.util.find_spec(kind.needs) is None]
    if not missing:
        pytest.skip("all trackers are installed")
    run = run_with(tmp_path, missing[0])
    assert [step.number for step in run.steps(2)] == [1, 2]
    assert f"pip install {TABLE[missing[0]].needs}" in capsys.readouterr().err


def test_names_and_steps_are_checked_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        tracker_names("tensorboard, wanbd")
    for text in ("10:13", "steps=0:3", "steps=5:3", "steps=1:", "steps=1:2; rm"):
        with pytest.raises(ConfigError, match="profile="):
            profile_steps(text)
    with pytest.raises(ConfigError, match="log=None"):
        run_with(None, "tensorboard")


def test_tensorboard_and_a_profile(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    run = run_with(tmp_path, "tensorboard", "steps=2:3")
    for step in run.steps(4):
        run.log({"accuracy": step.number / 10})
    (file,) = (tmp_path / "tensorboard").iterdir()
    found: dict[str, list[tuple[int, float]]] = {}
    for event in loader.LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert [step for step, _ in found["accuracy"]] == [1, 2, 3, 4]
    assert found["accuracy"][3][1] == pytest.approx(0.4)
    assert {"loss", "lr", "samples_per_second"} <= found.keys()
    trace = json.loads((tmp_path / "profile-rank00000.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert names.count("aten::addmm") == 2


PROGRAM = """
import sys, torch, shoal
from torch import nn
run = shoal.Run(model=lambda: nn.Linear(4, 1), loss=lambda o, b: (((o - b[1]) ** 2).sum(), len(o)), progress=False,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=8, strategy="solo", log="run",
                data=torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), trackers=sys.argv[1])
for step in run.steps(3):
    run.log({"accuracy": step.number / 10})
"""


@pytest.mark.all_only
@pytest.mark.parametrize("name", [name for name in TABLE if name != "tensorboard"])
def test_other_trackers_offline(tmp_path: Path, name: str) -> None:
    pytest.importorskip(TABLE[name].needs, reason=f"{name} is not installed: pip install shoal[trackers]")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "gets no more" not in done.stderr
    folder = tmp_path / "run" / name
    written = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    assert b"accuracy" in written or any("accuracy" in str(file) for file in folder.rglob("*"))
