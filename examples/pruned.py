"""Digits read with all weights, and with 80 % of them zero: how many of 597 others are read.

    python examples/pruned.py
    shoal run --workers 2 --strategy zero2 examples/pruned.py

The second command prunes the same weights as the first. It needs scikit-learn, which brings the digits.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shoal

IMAGES, DIGITS = load_digits(return_X_y=True)
IMAGES = torch.tensor(IMAGES, dtype=torch.float32) / 16
DIGITS = torch.tensor(DIGITS)
LEARNED = TensorDataset(IMAGES[:1200], DIGITS[:1200])
OTHERS = TensorDataset(IMAGES[1200:], DIGITS[1200:])
RECIPES = [
    "",
    "prune(0.8, begin=100, end=450)",
    "prune(0.8, begin=100, end=450, scope=layer, kind=movement)",
    "prune(0.5, begin=100, pattern='2:4')",
]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def read(output, batch):
    return (output.argmax(1) == batch[1]).sum(), len(batch[1])


for recipes in RECIPES:
    run = shoal.Run(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
        data=LEARNED,
        global_batch=60,
        recipes=recipes,
        log=None,
        progress=False,
    )
    for _ in run.steps("30ep"):
        pass
    found = run.evaluate(OTHERS, {"read": read})
    weights = [value for value in run.state_dict().values() if value.dim() > 1]  # on the first worker
    if run.world.rank == 0:
        zero = sum(int((value == 0).sum()) for value in weights) / sum(value.numel() for value in weights)
        print(
            f"{recipes or 'all weights':60} {100 * zero:3.0f} % zero  {100 * found.metrics['read']:.1f} % read"
        )
