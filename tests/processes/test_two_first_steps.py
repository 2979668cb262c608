"""What two workers would compute otherwise than one process: said by the first worker, or refused on both."""

from __future__ import annotations

from pathlib import Path

from commands import shoal

SCRIPT = """
import json, os, random, sys
import torch, shoal
from torch import nn
from torch.nn import functional as F

x, y = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3

class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    def forward(self, x):
        x = self.net(x)
        return x - x.mean(0)

class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.more = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    def forward(self, x):
        return self.more(x + self.net(x) * (random.random() < 0.5))

class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Unflatten(1, (2, 3)), nn.Flatten())
        self.blocks, self.head = nn.ModuleList([block(), block()]), nn.Linear(6, 3)
    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return self.head(x)

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), nn.Linear(6, 3)
    def forward(self, x):
        for layer in self.layers:
            x = layer(F.dropout(x + torch.rand_like(x), 0.5))
        return self.head(x)

class Looking(nn.Module):
    def __init__(self, **more):
        super().__init__()
        self.rows, self.head = nn.Embedding(9, 6, **more), nn.Linear(6, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.rows(x.abs().long()).mean(1)))

class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.largest = nn.Linear(6, 3), nn.Parameter(torch.zeros(1), requires_grad=False)
    def forward(self, x):
        with torch.no_grad():
            self.largest.copy_(x.abs().max())
        return self.net(x)

def weighted(output, batch):
    return F.cross_entropy(output, batch[1], weight=torch.tensor([1.0, 9.0, 0.1]))

def mean(output, batch):
    return F.cross_entropy(output, batch[1])

calls = 0

def counting(output, batch):
    global calls
    calls += 1
    return mean(output, batch)

def with_weights(output, batch):
    return mean(output, batch) + 0.1 * sum(p.square().sum() for p in plain.parameters())

class Arc(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))
    def forward(self, output, batch):
        return mean(output @ self.weight, batch)

PP = "ddp * pp2(1f1b, microbatches=2)"
EIGHT = "ddp * pp2(1f1b, microbatches=8)"  # of one sample each
for name, strategy, model, loss in [
    ("meet", "ddp", Centred, mean), ("meet", "zero3", Centred, mean), ("meet", PP, Centred, mean),
    ("in place", "zero3", InPlace, mean),
    ("draws", "ddp * tp2", Dropping, mean), ("max_norm", "shared", lambda: Looking(max_norm=1.0), mean),
    ("moves", "ddp", Scaling, mean), ("weights", "ddp", None, with_weights),
    ("weights", "zero3", None, with_weights), ("again", "ddp", None, mean),
    ("weights", "ddp * tp2", None, with_weights),
    ("weights", PP, None, with_weights), ("counts", PP, None, counting), ("learns", PP, None, Arc()),
    ("again", PP, None, mean), ("noisy", "zero3", Noisy, mean), ("noisy", PP, Noisy, mean),
    ("weighted", EIGHT, None, weighted),
    ("norm", "ddp", lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), mean),
]:
    if name != "again":
        plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    print("CASE", name, strategy.split("(")[0], file=sys.stderr, flush=True)
    try:
        run = shoal.Run(model=model or plain, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                        data=torch.utils.data.TensorDataset(x, y), global_batch=8, strategy=strategy, log=None,
                        progress=False)
        list(run.steps(1))
    except shoal.errors.ConfigError as refused:
        print("REFUSED", refused, file=sys.stderr, flush=True)
"""

EXPECTED = {
    "meet ddp": "shoal: the model gives other outputs for 2 samples than for the same among 4",
    "meet zero3": "shoal: the model gives other outputs for 2 samples than for the same among 4",
    "meet ddp * pp2": "shoal: the model gives other outputs for 2 samples than for the same among 4",
    "in place zero3": "REFUSED the backward pass wants parameters that zero3 has freed",
    "draws ddp * tp2": "REFUSED the model or its loss draws from Python's or numpy's generator",
    "max_norm shared": "REFUSED 'rows' has max_norm=1",
    "moves ddp": "REFUSED forward passes change parameter 'largest' by the samples that they see",
    "weights ddp": "",
    "weights zero3": "REFUSED the loss, or a layer, uses a parameter of another layer",
    "again ddp": "REFUSED another Run has cut the model's parameters",
    "weights ddp * tp2": "REFUSED the loss, or a layer, uses a parameter of another layer",
    "weights ddp * pp2": "REFUSED loss= uses parameter '2.bias' of the model",
    "counts ddp * pp2": "shoal: the model or its loss counts in 'calls' (0 before the first step, 2 after it)",
    "learns ddp * pp2": "shoal: loss= depends on 1 learning parameters that are not the model's",
    "again ddp * pp2": "REFUSED another Run has divided the model into stages",
    "noisy zero3": "",
    "noisy ddp * pp2": "",
    "weighted ddp * pp2": "loss= depends on how the batch is cut: over 8 samples it is",
    "norm ddp": "shoal: batch normalisation sees one of a step's 2 parts at a time",
}


def test_two_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = shoal(tmp_path, "run", "--workers", "2", "train.py")
    assert done.code == 0, done.err
    found = {}
    for case in done.err.split("CASE ")[1:]:
        name, _, rest = case.partition("\n")
        found[name] = rest
    assert found.keys() == EXPECTED.keys()
    for name, words in EXPECTED.items():
        assert found[name].startswith(words), f"{name}: {found[name]}"
        assert bool(found[name].strip()) == bool(words), f"{name}: {found[name]}"
