"""`shoal verify` on losses that are not sums over samples, and on the same programs written right.

Each script runs as a user would write it. What is wrong is wrong in the same way on both sides of the first comparison,
and shows only beside one process that computes each batch at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import shoal

START = """
import torch, shoal
from torch import nn
from torch.nn import functional as F

generator = torch.Generator().manual_seed(1)
x = torch.randn(22, 6, generator=generator)
y = torch.randint(0, 4, (22, 3), generator=generator)
y[torch.rand(22, 3, generator=generator) < torch.linspace(0, 0.9, 22)[:, None]] = -100
data = torch.utils.data.TensorDataset(x, y)
settings = dict(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), data=data, global_batch=8, log=None, progress=False)
hidden = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12))

def padded(logits, batch):
    flat = batch[1].flatten()
    return F.cross_entropy(logits.view(-1, 4), flat, reduction="sum", ignore_index=-100), int((flat >= 0).sum())

class HF(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = hidden()

    def forward(self, batch):
        logits = self.body(batch[0])
        return {"loss": F.cross_entropy(logits.view(-1, 4), batch[1].flatten(), ignore_index=-100), "logits": logits}

def simclr(output, gather):
    rows = F.normalize(gather(output), dim=1)
    alike = (rows @ rows.T / 0.5).masked_fill(torch.eye(len(rows), dtype=torch.bool), -100.0)
    return F.cross_entropy(alike, torch.arange(len(rows)).roll(1))

def triplet(output, labels, gather):
    rows, labels = gather(output), gather(labels)
    apart, same = (rows[:, None] - rows).square().sum(2), labels[:, None] == labels
    return F.relu(apart.masked_fill(~same, -1.0).amax(1) - apart.masked_fill(same, 99.0).amin(1) + 1).mean()

def clip(pair, gather):
    image, text = gather(pair[0]), gather(pair[1])
    logits, wanted = image @ text.T, torch.arange(len(image))
    return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2

class Towers(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.image, self.text = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), nn.Linear(6, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.image(x), self.dropout(self.text(x.flip(1)))

squares = lambda module: 0.1 * sum(p.square().sum() for p in module.parameters())
here = lambda tensor: tensor
"""

END = "\nfor step in run.steps(100): pass\n"

WRONG = {
    "simclr": (
        "model=hidden, loss=lambda o, b: simclr(o, here)",
        "let it see those of all workers with run.gather",
    ),
    "triplet": (
        "model=hidden, loss=lambda o, b: triplet(o, b[1][:, 0], here)",
        "let it see those of all workers with run.gather",
    ),
    "clip": (
        "model=lambda: Towers(0.5), loss=lambda o, b: clip(o, here)",
        "let it see those of all workers with run.gather",
    ),
    "penalty": (
        "model=(net := hidden()), loss=lambda o, b: (padded(o, b)[0] + squares(net), padded(o, b)[1])",
        "such as a penalty on the weights; give it as penalty=",
    ),
    "no count": ("model=hidden, loss=lambda o, b: padded(o, b)[0]", "returned a sum without its count"),
    "output.loss": (
        "model=HF, inputs=lambda b: b, loss=lambda o, b: o['loss']",
        "a mean over something else than samples, such as tokens that are not padding; return (sum, count)",
    ),
    "model": (
        "model=lambda: nn.Sequential(nn.Linear(6, 12), nn.Softmax(dim=0)), loss=lambda o, b: padded(o, b)",
        "Something in the model or in the loss looks at other samples than its own",
    ),
}
"""What is given to Run, and the advice."""

RIGHT = {
    "simclr": ("zero2", "model=hidden, loss=lambda o, b: simclr(o, run.gather)"),
    "triplet": ("zero3", "model=hidden, loss=lambda o, b: triplet(o, b[1][:, 0], run.gather)"),
    "clip": ("ddp", "model=lambda: Towers(0.5), loss=lambda o, b: clip(o, run.gather)"),
    "penalty": ("ddp", "model=hidden, loss=padded, penalty=squares"),
    "count": ("zero1", "model=hidden, loss=padded"),
    "output.logits": ("ddp", "model=HF, inputs=lambda b: b, loss=lambda o, b: padded(o['logits'], b)"),
}
"""The same, right, and a strategy."""


def verify(folder: Path, given: str, strategy: str, *more: str, start: str = START) -> tuple[int, str, str]:
    (folder / "train.py").write_text(f"{start}\nrun = shoal.Run({given}, **settings){END}")
    done = shoal(folder, "verify", "train.py", "--strategy", strategy, "--steps", "3", *more)
    return done.code, done.out, done.err


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_depends_on_the_cut_is_not_equal(name: str, tmp_path: Path) -> None:
    given, advice = WRONG[name]
    code, out, err = verify(tmp_path, given, "ddp")
    assert code == 1, out + err
    assert "EQUAL" not in out
    assert (
        "DIFFERS: the program depends on how a batch is cut: one process that computes each batch at once"
        in err
    )
    assert advice in err


@pytest.mark.parametrize("name", RIGHT)
def test_the_same_written_right_is_equal(name: str, tmp_path: Path) -> None:
    strategy, given = RIGHT[name]
    code, out, err = verify(tmp_path, given, strategy)
    assert code == 0, err
    assert out.startswith(
        f"EQUAL: {strategy} with 2 workers computes what one process computes: 3 steps in fp64"
    )


def test_what_layers_do_once_for_each_micro_batch_is_no_fault_of_the_loss(tmp_path: Path) -> None:
    layers = "nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 12)"
    code, out, err = verify(tmp_path, f"model=lambda: nn.Sequential({layers}), loss=padded", "ddp")
    assert code == 0, err
    assert out.startswith("EQUAL")
    assert "batch normalisation ('1') measures each of 2 micro-batches by itself" in err
    code, out, err = verify(
        tmp_path, "model=lambda: nn.Sequential(hidden(), nn.Dropout(0.3)), loss=padded", "ddp"
    )
    assert code == 0, err
    assert (
        "random numbers are drawn once for each of 2 micro-batches; compared with whole batches in evaluation"
        in err
    )


def test_where_draws_cannot_be_switched_off_nothing_is_claimed(tmp_path: Path) -> None:
    noisy = "loss=lambda o, b: padded(o + torch.randn_like(o), b)"
    code, _, err = verify(tmp_path, f"model=hidden, {noisy}", "ddp")
    assert code == 0, err
    assert (
        "not compared with whole batches: the program, in evaluation mode too, draws random numbers once"
        in err
    )
    data = "class D:\n  def __len__(self): return 22\n  def __getitem__(self, i): return x[i] + torch.randn(6), y[i]\n"
    code, _, err = verify(
        tmp_path, "model=hidden, loss=padded", "ddp", start=f"{START}{data}settings['data'] = D()\n"
    )
    assert code == 0, err
    assert "not compared" not in err, (
        "what a data set draws is keyed by sample: whole batches can be compared"
    )
    code, _, err = verify(
        tmp_path,
        "model=hidden, loss=lambda o, b: simclr(o, here)",
        "ddp",
        start=f"{START}{data}settings['data'] = D()\n",
    )
    assert code == 1, "nor is it an excuse for a loss that does not split"
    assert "let it see those of all workers with run.gather" in err
    masked = """def masked(samples):
  some = torch.utils.data.default_collate(samples)
  return some[0] * (torch.rand(some[0].shape) > 0.2), some[1]
settings["collate"] = masked
"""
    code, _, err = verify(tmp_path, "model=hidden, loss=padded", "ddp", start=f"{START}{masked}")
    assert code == 0, err
    assert "not compared with whole batches: collate= draws random numbers once for each micro-batch" in err


def test_a_strategy_that_promises_less_is_no_excuse(tmp_path: Path) -> None:
    code, _, err = verify(
        tmp_path, "model=hidden, loss=lambda o, b: simclr(o, here)", "local(2)", "--tolerance", "5"
    )
    assert code == 1
    assert "let it see those of all workers with run.gather" in err


def test_a_run_says_it_in_its_first_step_once(tmp_path: Path) -> None:
    given = WRONG["simclr"][0]
    (tmp_path / "train.py").write_text(f"{START}\nrun = shoal.Run({given}, **settings){END}")
    done = shoal(tmp_path, "run", "--workers", "2", "--strategy", "zero3", "--steps", "3", "train.py")
    assert done.code == 0, done.err
    assert done.err.startswith("loss= depends on how the batch is cut: over 4 samples it is ")
    assert done.err.count("run.gather") == 1
    assert done.err.endswith("`shoal verify` compares the run with one process.\n")


def test_what_cannot_be_gathered_is_one_sentence(tmp_path: Path) -> None:
    given = RIGHT["simclr"][1]
    (tmp_path / "train.py").write_text(f"{START}\nrun = shoal.Run({given}, **settings){END}")
    done = shoal(tmp_path, "run", "--workers", "2", "--strategy", "local(2)", "train.py")
    assert done.code == 2
    assert done.err == (
        "shoal: run.gather needs the whole global batch at once: under local(2) workers need not be at the same step; "
        "use ddp, zero1, zero2, zero3 or shared.\n"
    )
