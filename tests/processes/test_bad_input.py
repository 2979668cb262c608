"""Bad input through the real command: one clear sentence, the right exit code, no traceback, no hang."""

from __future__ import annotations

import re
from pathlib import Path

from commands import Done, fresh, losses, python, shoal, start, torchrun, write

TRAIN = """
run = shoal.Run(**settings)
for step in run.steps(6):
    pass
print("trained", step.number)
"""


def one_sentence(done: Done, *words: str, code: int = 2) -> None:
    """It failed with this code, and all it said is one line that has these words."""
    assert "Traceback" not in done.err, done.err
    assert (done.code, done.out) == (code, ""), done.err
    assert done.err.startswith("shoal: ")
    assert done.err.count("\n") == 1, done.err
    for word in words:
        assert word in done.err


def test_names_that_do_not_exist(tmp_path: Path, everything: bool) -> None:
    script = write(tmp_path, TRAIN)
    run = ("run", "--workers", "2")
    done = shoal(tmp_path, *run, "--strategy", "zero4", script, start=fresh if everything else start)
    one_sentence(done, "unknown exchange 'zero4'", "'zero3'?")
    # The script itself asks, so two workers have started when it turns out.
    done = shoal(tmp_path, *run, "--set", "clipp=0.5", script)
    one_sentence(done, "--set clipp=0.5: Run has no such setting; did you mean 'clip'?")


def test_numbers_that_cannot_work(tmp_path: Path) -> None:
    script = write(tmp_path, TRAIN.replace("**settings", '**{**settings, "global_batch": 27}'))
    words = "the data set has 26 samples, fewer than one global_batch of 27; use global_batch=26 or less."
    one_sentence(python(tmp_path, script), words)
    script = write(tmp_path, TRAIN.replace("**settings", "**settings, accumulate=5"))
    done = shoal(tmp_path, "run", "--workers", "2", script)
    one_sentence(done, "global_batch=8 cannot be cut into 2 workers × 5 micro-batches = 10 parts; use")


LATE_NAN = """
def spoiled(output, batch):
    total, count = loss(output, batch)
    if rank == 1 and not hasattr(loss, "calls"):
        loss.calls = 0
    if rank == 1 and torch.is_grad_enabled():  # the first step's look at whether it splits is no training
        loss.calls += 1
    return (total * float("nan") if rank == 1 and loss.calls == 4 else total), count
settings["loss"] = spoiled
"""


def test_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    script = write(tmp_path, LATE_NAN + TRAIN)
    done = shoal(tmp_path, "run", "--workers", "2", "--strategy", "shared", script)
    one_sentence(done, "the loss of step 4 is nan (count 2)", "on_nan='skip'")
    assert len(losses(tmp_path)) == 3, "the steps before are in the log"
    done = shoal(tmp_path, "run", "--workers", "2", "--set", "on_nan=skip", script)
    assert (done.code, done.out) == (0, "trained 6\n"), done.err
    found = losses(tmp_path)
    assert [number for number, value in enumerate(found, 1) if value is None] == [4]


MODEL_BY_RANK = """
class Other(Net):
    def __init__(self):
        super().__init__()
        if rank == 1:
            self.last = nn.Linear(13, 4)
settings["model"] = Other
"""


def test_ranks_that_disagree_on_the_model(tmp_path: Path) -> None:
    words = (
        "ranks disagree on the model: rank 0 has 'last.weight' [3, 13] float32, rank 1 has 'last.weight' [4"
    )
    one_sentence(shoal(tmp_path, "run", "--workers", "2", write(tmp_path, MODEL_BY_RANK + TRAIN)), words)
    done = torchrun(tmp_path, write(tmp_path, MODEL_BY_RANK + TRAIN))
    assert done.code != 0
    said = [line for line in done.err.splitlines() if line.startswith("shoal: ")]
    assert any(words in line for line in said), done.err
    assert "Other" not in done.err, "no traceback of the script"


RAISES = """
import time
run = shoal.Run(**settings)
for step in run.steps(1000):
    if rank == 1 and step.number == 3:
        print("at", time.time(), file=open("when", "w"), flush=True)
        {}["missing"]
"""


def test_a_script_that_raises_on_one_rank(tmp_path: Path) -> None:
    script = write(tmp_path, RAISES)
    for begin in (
        lambda: torchrun(tmp_path, script),
        lambda: shoal(tmp_path, "run", "--workers", "2", script),
    ):
        done = begin()
        late = done.ended - float((tmp_path / "when").read_text().split()[1])
        assert done.code == 1
        assert "KeyError: 'missing'" in done.err
        # Nobody waits for a deadline of the others' collectives; a busy machine may take its time to end processes.
        assert late < 20.0, f"it took {late:.1f} s to end all"
    lines = done.err.splitlines()
    assert re.fullmatch(
        r"shoal: worker 1 of 2 \(host .*, pid \d+\) failed after step 3, in the script's own code:", lines[0]
    )
    assert lines[-2:] == [
        "KeyError: 'missing'",
        "shoal: Nothing was saved: with checkpoint=FOLDER and checkpoint_every=N the same command would go on.",
    ]
    assert re.search(r'File ".*train.py", line \d+, in <module>', done.err)
    assert "PeerLost" not in done.err


NO_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))  # a file in memory is a file too
settings["model"] = lambda: nn.Sequential(nn.Linear(5, 40000), nn.Tanh(), nn.Linear(40000, 3))
"""


def test_no_shared_memory_falls_back_and_says_so(tmp_path: Path) -> None:
    script = write(tmp_path, NO_MEMORY + TRAIN)
    done = shoal(tmp_path, "run", "--workers", "2", "--strategy", "shared", script)
    assert (done.code, done.out) == (0, "trained 6\n"), done.err
    assert "shoal: no shared memory (" in done.err
    assert "File too large" in done.err
    assert "Traceback" not in done.err
    assert all(value is not None for value in losses(tmp_path))
