"""A model that a strategy cannot divide is refused by one process, before any worker starts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from commands import Done, finish, fresh, losses, shoal, start, write

from shoal.cluster import dry_run as ahead
from shoal.cluster.local import Job

MARK = """
with open("marks", "a") as file:
    print(os.getpid(), os.environ["RANK"], os.environ["WORLD_SIZE"], file=file)
print("a line before Run")
print("another, for the errors", file=sys.stderr)
"""
"""Whoever runs the script leaves a line in a file."""

ATTENDS = """
class Attends(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.first = nn.Linear(5, 12)
        self.attention = nn.MultiheadAttention(12, heads, batch_first=True)
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        x = self.first(x).unsqueeze(1)
        return self.last(self.attention(x, x, x, need_weights=False)[0].squeeze(1))

class Skips(Net):
    def forward(self, x):
        first = torch.tanh(self.first(x))
        return self.last(first) + first.sum(1, keepdim=True)
"""

TRAIN = """
run = shoal.Run(**settings)
for step in run.steps(3):
    pass
print("trained", step.number)
"""


def marks(folder: Path) -> list[str]:
    """The ranks of all processes that have run the script, and how many workers each was told of."""
    file = folder / "marks"
    return [line.split(" ", 1)[1] for line in file.read_text().splitlines()] if file.exists() else []


def script(folder: Path, *settings: str) -> str:
    changes = "\n".join(f"settings |= dict({one})" for one in settings)
    return write(folder, MARK + ATTENDS + changes + TRAIN)


def refused_alone(folder: Path, done: Done, workers: int, words: str) -> None:
    """One sentence, one process, and nothing left behind."""
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.startswith("shoal: ")
    assert done.err.count("\n") == 1, done.err
    assert words in done.err
    assert marks(folder) == [f"0 {workers}"], "only the dry run has run the script"
    assert sorted(path.name for path in folder.iterdir()) == ["marks", "tmp", "train.py"]
    assert list((folder / "tmp").glob("shoal-*")) == []


@pytest.mark.parametrize(
    ("workers", "settings", "strategy", "words"),
    [
        (2, "model=lambda: Attends(3)", "ddp * tp2", "3 heads, which tp2 cannot divide"),
        (4, "model=Net", "ddp * pp4(microbatches=4)", "4 stages need 3 places to split the model at, and it has"),
        (2, "model=Skips", "ddp * pp2(split=last)", "the model carries data around 'last'"),
        (2, "model=Net", "ddp * pp2(microbatches=9)", "global_batch=8 cannot be cut into 1 replicas × 9 micro-"),
        (2, "model=nn.Linear(5, 3)", "ddp * tp2", "tp2 finds nothing to cut in this model"),
        (2, "recompute='blocks'", "ddp * pp2(zerobubble)", "recompute='blocks' under ddp * pp2(zerobubble)"),
        (2, "optimizer=lambda p: torch.optim.Muon([p[1]])", "zero1 * pp2(microbatches=2)", "Muon is not known"),
    ],
)  # fmt: skip
def test_a_strategy_of_the_command(
    tmp_path: Path, workers: int, settings: str, strategy: str, words: str
) -> None:
    done = shoal(
        tmp_path, "run", "--workers", str(workers), "--strategy", strategy, script(tmp_path, settings)
    )
    refused_alone(tmp_path, done, workers, words)


def test_a_strategy_of_the_script(tmp_path: Path) -> None:
    name = script(tmp_path, "model=lambda: Attends(3)", "strategy=f'ddp * tp{2}'")
    refused_alone(tmp_path, shoal(tmp_path, "run", "--workers", "2", name), 2, "3 heads, which tp2")


def test_verify_has_a_dry_run_too(tmp_path: Path) -> None:
    name = script(tmp_path, "model=lambda: Attends(3)", "strategy='ddp * tp2'")
    refused_alone(tmp_path, shoal(tmp_path, "verify", name, "--workers", "2"), 2, "3 heads, which tp2")


def test_a_model_that_will_do(tmp_path: Path) -> None:
    name = script(tmp_path, "model=lambda: Attends(4)", "strategy='ddp * tp2'")
    done = shoal(tmp_path, "run", "--workers", "2", name, start=fresh)
    assert (done.code, done.out) == (0, "a line before Run\ntrained 3\n"), (
        "what the dry run prints is not shown"
    )
    assert done.err == "another, for the errors\n"
    assert sorted(marks(tmp_path)) == ["0 2", "0 2", "1 2"]
    assert len(losses(tmp_path)) == 3


def test_nobody_else_pays_for_it(tmp_path: Path) -> None:
    for settings, *options in (
        ("strategy='ddp'",),
        ("strategy='ddp * tp2'", "--strategy", "zero1"),
        ("model=lambda: Attends(4), strategy='ddp * tp2'", "--no-dry-run"),
    ):
        done = shoal(tmp_path, "run", "--workers", "2", *options, script(tmp_path, settings))
        assert done.code == 0, done.err
        assert sorted(marks(tmp_path)) == ["0 2", "1 2"]
        (tmp_path / "marks").unlink()


def test_without_it_the_workers_refuse(tmp_path: Path) -> None:
    name = script(tmp_path, "model=lambda: Attends(3)", "strategy='ddp * tp2'")
    done = shoal(tmp_path, "run", "--workers", "2", "--no-dry-run", name)
    assert done.code == 2
    assert "3 heads, which tp2 cannot divide" in done.err
    assert sorted(marks(tmp_path)) == ["0 2", "1 2"]


def test_the_name_of_before_is_taken_with_a_note(tmp_path: Path) -> None:
    name = script(tmp_path, "model=lambda: Attends(3)", "strategy='ddp * tp2'")
    done = shoal(tmp_path, "run", "--workers", "2", "--no-scout", name)
    assert "--no-scout is now called --no-dry-run" in done.err
    assert sorted(marks(tmp_path)) == ["0 2", "1 2"], "there was no dry run"


def test_what_the_script_does_wrong_is_for_the_workers_to_show(tmp_path: Path) -> None:
    name = write(tmp_path, MARK + "{}['missing']\n" + TRAIN)
    done = shoal(tmp_path, "run", "--workers", "2", "--strategy", "ddp * tp2", name)
    assert done.code == 1
    assert "worker 0 of 2 (host " in done.err
    assert done.err.count("KeyError: 'missing'") == 1
    assert sorted(marks(tmp_path)) == ["0 2", "0 2", "1 2"]


def test_an_interrupt_ends_the_dry_run(tmp_path: Path) -> None:
    name = write(tmp_path, MARK + "import time; time.sleep(600)\n" + TRAIN)
    process = start(tmp_path, "-m", "shoal", "run", "--workers", "2", "--strategy", "ddp * tp2", name)
    deadline = time.monotonic() + 30
    while not marks(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130
    assert marks(tmp_path) == ["0 2"]
    assert not Path(f"/proc/{(tmp_path / 'marks').read_text().split()[0]}").exists()


def test_a_script_that_waits_for_peers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "SECONDS", 1.0)
    file = tmp_path / "train.py"
    file.write_text("import time, os\nprint(os.getpid(), file=open('pid', 'w'), flush=True)\ntime.sleep(600)")
    monkeypatch.chdir(tmp_path)
    begun = time.monotonic()
    ahead.try_model(Job(str(file), workers=2, overrides={"strategy": "ddp * tp2"}))
    assert time.monotonic() - begun < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Run(strategy='ddp * tp2')", True),
        ("Run(strategy='zero1*pp4(1f1b, microbatches=8)')", True),
        ("Run(strategy=f'ddp * tp{n}')", True),
        ("Run(strategy='ddp' + ' * tp2')", True),
        ("'''Start it with --strategy 'ddp * tp2'.'''\nRun(strategy='ddp')  # ddp * tp2", False),
        ("get('http://host/app2', 'cpp', 'tp', 'ftp2')\nRun(strategy='zero3')", True),
        ("get('http://host/app2', 'cpp', 'ftp2')\nRun(strategy='zero3')", False),
        ("Run(strategy=", False),
    ],
)
def test_which_scripts_may_divide_a_model(tmp_path: Path, text: str, expected: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(text)
    assert ahead.may_divide(Job(str(file), workers=2)) is expected
    assert ahead.may_divide(Job(str(file), ("--strategy=ddp * tp2",), workers=2))
    assert not ahead.may_divide(Job(str(file), workers=2, overrides={"strategy": "ddp * tp1"}))
