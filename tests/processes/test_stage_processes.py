"""Preparers and evaluators beside training: they may die and hang, and training computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import commands
import pytest

from shoal.data.store.store import Store
from shoal.report.events import last_pass, read_events

SCRIPT = """
import os, signal, time
from pathlib import Path
import numpy as np, torch, shoal
import torch.nn.functional as F
from shoal.data import PreparedStore

ROWS, SAMPLES = 64, 300  # five parts, the last of them short


def role():
    return os.environ.get("SHOAL_ROLE", "worker").split()[0]


def once(what):
    try:
        Path(what).touch(exist_ok=False)
        return True
    except FileExistsError:
        return False


def prepare(part):
    with open("prepared", "a") as out:
        out.write(f"{role()} {part}\\n")
    if role() == "preparer" and HURTS and part == 2 and once("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if role() == "preparer" and HURTS and part == 3 and once("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    draw = np.random.default_rng(part)
    x = draw.standard_normal((min(ROWS, SAMPLES - part * ROWS), 3)).astype("f4")
    return {"a": x[:, 0], "b": x[:, 1], "y": x.sum(1)}


if HURTS:
    import shoal.data.prepared.parts

    shoal.data.prepared.parts.PATIENCE_SECONDS = 1.0


def loss(output, batch):
    if role() == "evaluator" and HURTS and once("evaluator"):
        os.kill(os.getpid(), signal.SIGKILL)
    return ((output[:, 0] - batch["y"]) ** 2).sum(), len(batch["y"])


class Net(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(torch.stack([batch["a"], batch["b"]], 1))


data = PreparedStore("store", prepare, rows=ROWS, samples=SAMPLES)
run = shoal.Run(model=lambda: Net(2, 1), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), data=data,
                inputs=lambda batch: batch, global_batch=20, checkpoint="runs", checkpoint_every=6, checkpoint_keep=4,
                validation=[dict.fromkeys("aby", torch.tensor(i / 2)) for i in range(10)],
                metrics={"off": lambda output, batch: ((output[:, 0] - batch["y"]).sum(), len(batch["y"]))},
                progress=False)
for step in run.steps("2ep"):
    pass
"""


def the_steps(folder: Path) -> list[tuple[int, float]]:
    return [(e["step"], e["loss"]) for e in last_pass(read_events(folder / "runs" / "events.jsonl"))]  # type: ignore[misc]


def measured(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    lines = (folder / "runs" / name).read_text().splitlines()
    found = [event for event in map(json.loads, lines) if event.get("event") == "log"]
    assert len({event["after"] for event in found}) == len(found)
    return {event["after"]: event["values"] for event in found}


def run(folder: Path, hurts: bool, *command: str) -> commands.Done:
    folder.mkdir()
    (folder / "train.py").write_text(f"HURTS = {hurts}\n{SCRIPT}")
    return commands.finish(commands.start(folder, *command))


def test_stages_die_and_hang_and_training_is_the_same(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", False, "train.py")
    assert alone.code == 0, alone.err
    beside = run(
        tmp_path / "beside",
        True,
        *(
            "-m",
            "shoal",
            "run",
            "--workers",
            "2",
            "--preparers",
            "2",
            "--evaluators",
            "1",
            "--output",
            "all",
            "train.py",
        ),
    )
    assert beside.code == 0, beside.err
    assert "preparer 0 was killed by SIGKILL; another takes its place" in beside.err.replace("r 1", "r 0")
    assert "evaluator 0 was killed by SIGKILL; another takes its place" in beside.err
    assert "part 3 of store takes long; training makes it itself" in beside.err

    one, other = the_steps(tmp_path / "alone"), the_steps(tmp_path / "beside")
    assert len(one) == 30
    assert [step for step, _ in one] == [step for step, _ in other]
    assert [loss for _, loss in other] == pytest.approx([loss for _, loss in one], rel=1e-5)

    store = Store(tmp_path / "beside" / "store")
    assert (len(store), store.version, store.verify()) == (300, 5, [])
    whole = Store(tmp_path / "alone" / "store")
    assert [file.digest for file in store.manifest.files] == [file.digest for file in whole.manifest.files]
    assert not list((tmp_path / "beside" / "store").glob(".build-parts/*.json"))

    between = measured(tmp_path / "alone", "events.jsonl")
    by_evaluator = measured(tmp_path / "beside", "events-evaluator-0.jsonl")
    assert list(between) == sorted(by_evaluator) == [6, 12, 18, 24, 30]
    for step, values in between.items():
        assert by_evaluator[step] == pytest.approx(values, rel=1e-4)
    assert not [path for path in (tmp_path / "beside" / "runs" / ".evaluators").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("flags", "changes", "words"),
    [
        (
            ("--preparers", "1"),
            ("data=data", "data=[{'a': 1.0, 'b': 1.0, 'y': 1.0}] * 40"),
            "a shoal.data.PreparedStore",
        ),
        (("--evaluators", "1"), ("checkpoint_every=6", "checkpoint_every=None"), "give Run validation="),
    ],
)
def test_stages_without_work_are_refused(
    tmp_path: Path, flags: tuple[str, ...], changes: tuple[str, str], words: str
) -> None:
    (tmp_path / "train.py").write_text("HURTS = False\n" + SCRIPT.replace(*changes))
    done = commands.finish(
        commands.start(tmp_path, "-m", "shoal", "run", "--workers", "1", *flags, "train.py")
    )
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err
