"""Errors of the user's own code, and a batch for too many workers: the cause, and where it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import Done, finish, python, shoal, start, torchrun, write

TRAIN = """
import sys
what = sys.argv[1]

class Data:
    def __len__(self):
        return 26
    def __getitem__(self, i):
        if what.startswith("data") and i == 17:
            raise KeyError("broken")
        return x[i], y[i]

class Stream:
    def __iter__(self):
        for i in range(26):
            if i == 17:
                raise KeyError("broken")
            yield x[i], y[i]

evaluating = False  # the first step looks at the model in eval mode too

class Mine(Net):
    def __init__(self):
        super().__init__()
        if what == "making" and rank == 1:
            torch.empty(1 << 44)
    def forward(self, x):
        if what == "evaluating" and evaluating and rank == 1:
            torch.empty(1 << 44)
        if what == "model" and rank == 1:
            raise ValueError("broken")
        if what == "torch" and rank == 1:
            x = torch.empty(1 << 44)
        if what == "python" and rank == 1:
            x = [0] * (1 << 44)
        return super().forward(x)

def mine(output, batch):
    if what == "loss" and rank == 1:
        raise ValueError("broken")
    return loss(output, batch)

def collate(samples):
    if what == "collate" and rank == 1:
        raise TypeError("broken")
    return torch.utils.data.default_collate(samples)

workers = 1 if what == "data-processes" else 0
settings |= dict(model=Mine, loss=mine, data=Stream() if what == "stream" else Data(), collate=collate, log=None,
                 shuffle=False, loader_workers=workers)
run = shoal.Run(**settings)
for step in run.steps(6):
    if what == "evaluating":
        evaluating = True
        run.evaluate([(x[i], y[i]) for i in range(12)], batch=12)
"""

# Samples 16 to 23 are in step 3: sample 17 is the first worker's.
CAUSES = {
    "data": ("__getitem__", "KeyError: 'broken'", "this was in data[17].", "in step 3, on rank 0."),
    "data-processes": ("__getitem__", "KeyError: 'broken'", "this was in data[17].", "in step 3, on rank 0."),
    "stream": (
        "__iter__",
        "KeyError: 'broken'",
        "in sample 17 of epoch 0 of the stream.",
        "in step 3, on rank ",
    ),
    "collate": (
        "collate",
        "TypeError: broken",
        "with the batch of samples 4, 5, 6, 7.",
        "in step 1, on rank 1.",
    ),
    "model": ("forward", "ValueError: broken", "", "in step 1, on rank 1."),
    "loss": ("mine", "ValueError: broken", "", "in step 1, on rank 1."),
    "torch": (
        "forward",
        "you tried to allocate 70368744177664 bytes",
        "; 70368744177664 bytes were asked for, and ",
        "accumulate=2 (2 samples at a time instead of 4), or by recompute='blocks'",
        "or by zero3 (each worker keeps 1/2 of 484 bytes of parameters)",
        "memory ran out in step 1, on rank 1",
    ),
    "making": (
        "__init__",
        "memory ran out while the run was made, on rank 1; 70368744177664 bytes were asked for, and ",
        "Less is taken by zero3 (each worker keeps 1/2 of the parameters), or by a smaller model.",
    ),
    "evaluating": (
        "forward",
        "memory ran out in run.evaluate after step 1, on rank 1; 70368744177664 bytes were asked for, and ",
        "Less is taken by batch=6 (3 samples at a time on each worker instead of 6), or by a smaller model.",
    ),
    "python": (
        "forward",
        "MemoryError",
        "memory ran out in step 1, on rank 1",
        "GB are free on this host. Less",
    ),
}
"""By what is broken: the function of the script in which the traceback begins, and what is said."""


def test_errors_of_a_script(tmp_path: Path) -> None:
    script = write(tmp_path, TRAIN)
    words = ("-m", "shoal", "run", "--workers", "2", script)
    begun = {what: start(tmp_path, *words, what) for what in CAUSES}
    for what, process in begun.items():
        done = finish(process)
        function, *said = CAUSES[what]
        assert done.code == 1, done.err
        for word in said:
            assert word in done.err, (what, word, done.err)
        begins(done, function, exact=what != "data-processes")


def begins(done: Done, function: str, exact: bool) -> None:
    """The traceback begins at this function; one from another process has that process's frames before it."""
    frames = re.findall(r'File "(.*)", line \d+, in (.*)', done.err)
    own = [name for file, name in frames if file.endswith("train.py")]
    assert own[-1] == function, done.err
    assert not exact or frames[0][1] == function, done.err


BORROWS = """
class Borrows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.layers[0].weight
data = torch.utils.data.TensorDataset(torch.ones(16, 6))
run = shoal.Run(model=Borrows, loss=lambda o, b: (o.square().sum(), len(o)), data=data, global_batch=4, log=None,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1), progress=False)
list(run.steps(2))
"""


def test_a_weight_used_outside_of_its_layer(tmp_path: Path) -> None:
    done = shoal(tmp_path, "run", "--workers", "2", "--strategy", "zero3", write(tmp_path, BORROWS))
    assert done.code == 1
    begins(done, "forward", exact=True)
    assert (
        "shoal: zero3 has shards in the place of a layer's parameters except while that layer runs"
        in done.err
    )


def test_errors_of_a_script_alone(tmp_path: Path) -> None:
    done = python(tmp_path, write(tmp_path, TRAIN), "data")
    begins(done, "__getitem__", exact=True)
    assert done.err.endswith(
        "KeyError: 'broken'\nshoal: this was in data[17].\nshoal: this was in step 3, on rank 0.\n"
    )


@pytest.mark.parametrize("named", ["", "--set"])
def test_too_many_workers_for_the_batch_start_nobody(tmp_path: Path, named: str) -> None:
    text = "open(f'rank-{rank}', 'a').write('')\nrun = shoal.Run(**settings)\nprint('made')\n"
    script = write(
        tmp_path, text if named else text.replace("**settings", "**{**settings, 'global_batch': 3}")
    )
    options = ("--set", "global_batch=3") if named else ()
    done = shoal(tmp_path, "run", "--workers", "4", *options, script)
    words = "shoal: global_batch=3 cannot be cut into 4 workers × 1 micro-batches = 4 parts; use global_batch=4 or"
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.startswith(words)
    assert done.err.count("\n") == 1
    assert [path.name for path in tmp_path.glob("rank-*")] == ["rank-0"], "only the dry run was"


@pytest.mark.all_only  # the sentence is tested under `shoal run`, and what torchrun shows of one in test_bad_input.py
def test_too_many_workers_under_torchrun(tmp_path: Path) -> None:
    script = write(tmp_path, "run = shoal.Run(**{**settings, 'global_batch': 1})\n")
    done = torchrun(tmp_path, script)
    said = [line for line in done.err.splitlines() if line.startswith("shoal: ")]
    assert done.code != 0
    assert len(said) == 1, done.err
    assert said[0].startswith(
        "shoal: global_batch=1 cannot be cut into 2 workers × 1 micro-batches = 2 parts"
    )
    assert 'train.py", line' not in done.err
