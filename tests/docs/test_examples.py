"""The examples, run as a person runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import finish
from warm import Command

from shoal.report import last_pass, read_events

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHOAL = ["-m", "shoal"]


def call(folder: Path, *command: str) -> str:
    """Run `python ...` in a folder of its own; its output, or a failure that shows it."""
    clean = {k: v for k, v in os.environ.items() if not re.match(r"(SHOAL_|RANK$|WORLD_SIZE$|LOCAL_)", k)}
    done = finish(Command(folder, clean | {"OMP_NUM_THREADS": "1"}, command))
    assert done.code == 0, f"{' '.join(command)} ended with {done.code}:\n{done.out}\n{done.err}"
    return done.out


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.MULTILINE)]


def test_first_alone_and_with_two_workers(tmp_path: Path) -> None:
    script = str(EXAMPLES / "first.py")
    alone = losses(call(tmp_path, script))
    shared = losses(call(tmp_path, *SHOAL, "run", "--workers", "2", script))
    assert len(alone) == 3
    assert alone[-1] < 0.5 * alone[0]
    assert shared == pytest.approx(alone, rel=1e-3)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of the demo and three under another strategy, as scripts/demo runs them."""
    folder = tmp_path_factory.mktemp("demo")
    script = str(EXAMPLES / "demo.py")
    call(folder, *SHOAL, "run", "--workers", "2", script, "3")
    other = ["--strategy", "zero2", "--set", "log=demo/zero2", "--set", "progress=false"]
    call(folder, *SHOAL, "run", "--workers", "2", *other, script, "3")
    return folder


def test_the_demo_trains(demo: Path) -> None:
    steps = last_pass(read_events(demo / "demo" / "log" / "events.jsonl"))
    assert [event["step"] for event in steps] == [1, 2, 3]
    first, last = steps[0]["loss"], steps[-1]["loss"]
    assert isinstance(first, float)
    assert isinstance(last, float)
    assert last < first


def test_compare_says_that_losses_are_the_same(demo: Path) -> None:
    said = call(demo, str(EXAMPLES / "compare.py"), "demo/log", "demo/zero2")
    assert "the same losses" in said
    assert "3 steps" in said


def test_compare_notices_other_losses(demo: Path) -> None:
    """The one line at the end of the demo would be worth nothing if it could not say no."""
    log = demo / "demo" / "zero2" / "events.jsonl"
    other = demo / "demo" / "other"
    other.mkdir()
    lines = [re.sub(r'"loss": [\d.]+', '"loss": 9.0', line) for line in log.read_text().splitlines()]
    (other / "events.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, str(EXAMPLES / "compare.py"), "demo/log", "demo/other"]
    done = subprocess.run(command, cwd=demo, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "OTHER losses" in done.stdout


def test_raw_text_to_a_model_in_one_command(tmp_path: Path) -> None:
    """Both workers build; one store comes of it."""
    script = str(EXAMPLES / "store_text.py")
    shared = losses(call(tmp_path, *SHOAL, "run", "--workers", "2", script, "3"))
    assert shared[-1] < 0.97 * shared[0]
    assert len(list((tmp_path / "stores" / "python").glob("v*.json"))) == 1


def test_clicks_with_hashed_categories(tmp_path: Path) -> None:
    said = call(tmp_path, str(EXAMPLES / "store_clicks.py"))
    assert float(said.split()[-1]) < 0.62  # guessing is 0.69


@pytest.mark.all_only
def test_augmented_digits_are_read_better(tmp_path: Path) -> None:
    """The same table alone and with two workers; what varies is read better than what does not."""
    script = str(EXAMPLES / "augmented.py")
    said = call(tmp_path, script)
    plain, moved, mixed = [float(share) for share in re.findall(r"([\d.]+) % read", said)]
    assert min(moved, mixed) > plain + 1
    assert call(tmp_path, *SHOAL, "run", "--workers", "2", script) == said


@pytest.mark.all_only
def test_pruned_digits_are_read_nearly_as_well(tmp_path: Path) -> None:
    script = str(EXAMPLES / "pruned.py")
    said = call(tmp_path, script)
    zero, read = ([float(n) for n in re.findall(rf"([\d.]+) % {word}", said)] for word in ("zero", "read"))
    assert zero == [0, 80, 80, 50]
    assert min(read) > read[0] - 2
    assert read[1] >= read[0] - 1
    assert call(tmp_path, *SHOAL, "run", "--workers", "2", "--strategy", "zero2", script) == said


@pytest.mark.all_only
def test_adapters_read_mirrored_digits(tmp_path: Path) -> None:
    said = call(tmp_path, str(EXAMPLES / "adapted.py"))
    before, full, adapters = [float(n) for n in re.findall(r"([\d.]+) % of mirrored", said)]
    assert before < full - 20
    assert adapters >= full - 1
    assert float(re.findall(r"\( *([\d.]+) %\)", said)[1]) <= 5


@pytest.mark.all_only
def test_an_old_task_is_remembered(tmp_path: Path) -> None:
    said = call(tmp_path, str(EXAMPLES / "remembered.py"))
    (old, _), (plain, _), (held, new) = [
        [float(n) for n in pair] for pair in re.findall(r"([\d.]+) % of the old task read, ([\d.]+)", said)
    ]
    assert plain < old - 20
    assert held >= 0.9 * old
    assert new > 80


@pytest.mark.all_only
def test_a_student_with_a_teacher_is_better(tmp_path: Path) -> None:
    said = call(tmp_path, str(EXAMPLES / "distilled.py"))
    big, alone, taught = [float(share) for share in re.findall(r"([\d.]+) % read", said)]
    assert alone + 1 < taught < big


@pytest.mark.all_only
def test_replay_keeps_what_plain_training_loses(tmp_path: Path) -> None:
    said = call(tmp_path, str(EXAMPLES / "grown.py"))
    before, plain, replayed = [float(share) for share in re.findall(r"old digits +([\d.]+)", said)]
    assert plain < before - 20
    assert replayed >= 0.9 * before


@pytest.mark.all_only
def test_whole_numbers_read_as_well(tmp_path: Path) -> None:
    script = str(EXAMPLES / "served.py")
    call(tmp_path, *SHOAL, "run", "--workers", "2", script)
    said = call(tmp_path, *SHOAL, "export", script, "--quantise", "int8")
    floats, whole = [float(share) for share in re.findall(r"read ([\d.]+)", said)]
    assert abs(floats - whole) <= 0.005
