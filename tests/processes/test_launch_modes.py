"""One script, three ways to start it, the same losses; and `shoal verify` tells right from wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import fresh, losses, python, shoal, torchrun, write
from commands import start as warm

TRAIN = """
run = shoal.Run(**settings, precision="fp64", accumulate=2 // int(os.environ.get("WORLD_SIZE", "1")))
for step in run.steps("2ep"):
    pass
print(f"rank {run.world.rank} of {run.world.size} {step.loss!r} {len(run.state_dict())}\\n", end="")  # in one piece
"""


def test_three_ways_to_start_one_script(tmp_path: Path, everything: bool) -> None:
    start = fresh if everything else warm
    script = write(tmp_path, TRAIN)
    found = {}
    for name, begin in (
        ("python", lambda: python(tmp_path, script, start=start)),
        (
            "shoal",
            lambda: shoal(
                tmp_path,
                "run",
                "--workers",
                "2",
                "--strategy",
                "zero1",
                "--output",
                "all",
                script,
                start=start,
            ),
        ),
        ("torchrun", lambda: torchrun(tmp_path, script, start=start, forked=not everything)),
    ):
        done = begin()
        assert done.code == 0, done.err
        found[name] = losses(tmp_path)
        (tmp_path / "log" / "events.jsonl").unlink()
        ranks = sorted(re.findall(r"rank (\d) of (\d) (\S+) (\d+)", done.out))
        size = 1 if name == "python" else 2
        assert [(int(r[0]), int(r[1])) for r in ranks] == [(rank, size) for rank in range(size)], done.out
        assert len({loss for _, _, loss, _ in ranks}) == 1, "the same loss on every rank"
        assert [int(count) for *_, count in ranks] == [5, 0][:size], "the whole model is on rank 0"
    assert len(found["python"]) == 8
    assert found["shoal"] == pytest.approx(found["python"], rel=1e-12)
    assert found["torchrun"] == pytest.approx(found["python"], rel=1e-12)
    assert found["python"][0] != found["python"][1]


TIED = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(26, 6)
        self.head = nn.Linear(6, 26, bias=False)
        self.head.weight = self.embed.weight
        self.drop = nn.Dropout(0.3)
        self.bent = nn.Parameter(torch.randn(6, 4).t())  # not contiguous

    def forward(self, tokens):
        return self.head(self.drop(torch.tanh(self.embed(tokens) + self.bent.sum(0))))

class Drawing:  # augments, as data sets do
    def __len__(self): return 26
    def __getitem__(self, i): return (i + int(torch.randint(0, 5, ()))) % 26, i

torch.seed()  # a model made before the run, of nobody knows which seed
settings.update(model=Tied(), data=Drawing())
run = shoal.Run(**settings, clip=0.5, schedule="cosine(warmup=2)", checkpoint="kept", checkpoint_every=2)
for step in run.steps(100):
    pass
run.save("elsewhere/final")
"""


def test_verify_says_equal(tmp_path: Path) -> None:
    done = shoal(
        tmp_path, "verify", write(tmp_path, TIED), "--strategy", "zero2", "--workers", "2", "--steps", "4"
    )
    assert done.code == 0, done.err
    verdict = done.out.splitlines()
    assert len(verdict) == 1
    assert verdict[0].startswith(
        "EQUAL: zero2 with 2 workers computes what one process computes: 4 steps in fp64"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "tmp"}, (
        "a rehearsal leaves nothing behind"
    )


WRONG_GRADIENT = """
run = shoal.Run(**settings)
if run.world.size > 1 and rank == 1:
    run.module.last.bias.register_hook(lambda g: g * 1.01)
for step in run.steps(100):
    pass
"""


def test_verify_names_what_differs(tmp_path: Path) -> None:
    script = write(tmp_path, WRONG_GRADIENT)
    done = shoal(tmp_path, "verify", script, "--strategy", "shared", "--steps", "2", "--workers", "2")
    assert (done.code, done.out) == (1, "")
    verdict = done.err.splitlines()[-1]
    assert verdict.startswith("shoal: DIFFERS: shared with 2 workers does not equal one process: ")
    words = r"first at step 1, gradient of 'last.bias' by \S+ \(\S+ relative\); 1e-09 is allowed in fp64\."
    assert re.search(words, verdict), verdict
    assert "Traceback" not in done.err
