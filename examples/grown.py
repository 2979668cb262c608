"""A model knows digits 0 to 4 and learns 5 to 9: plainly, and with old samples among the new ones.

    python examples/grown.py
    shoal run --workers 2 examples/grown.py

It needs scikit-learn, which brings the digits.
"""

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

import shoal

IMAGES, DIGITS = load_digits(return_X_y=True)
DATA = TensorDataset(torch.tensor(IMAGES, dtype=torch.float32) / 16, torch.tensor(DIGITS))


def some(low: int, high: int, begin: int, end: int) -> Subset:
    """Samples begin to end of the digits low to high."""
    return Subset(DATA, [i for i in range(begin, end) if low <= DIGITS[i] <= high])


OLD, NEW = some(0, 4, 0, 1400), some(5, 9, 0, 1400)
OLD_TEST, NEW_TEST = some(0, 4, 1400, 1797), some(5, 9, 1400, 1797)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def read(output, batch):
    return (output.argmax(1) == batch[1]).sum(), len(batch[1])


def train(what: str, start, data, recipes: str = "", epochs: int = 15) -> nn.Module:
    run = shoal.Run(
        model=start,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
        data=data,
        global_batch=50,
        recipes=recipes,
        log=None,
        progress=False,
    )
    for _ in run.steps(f"{epochs}ep"):
        pass
    old, new = (run.evaluate(test, {"read": read}).metrics["read"] for test in (OLD_TEST, NEW_TEST))
    if run.world.rank == 0:
        print(f"{what:32} old digits {100 * old:5.1f} %   new digits {100 * new:5.1f} %")
    return run.module


knows = train("trained on 0 to 4", model, OLD)
for what, data, recipes in [("plainly", NEW, ""), ("replay(0.4)", [OLD, NEW], "replay(0.4)")]:
    train(f"then 5 to 9, {what}", copy.deepcopy(knows), data, recipes)
