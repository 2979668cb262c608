"""Digits learned from 200 samples, without augmentation and with: how many of 1,597 others are read.

    python examples/augmented.py
    shoal run --workers 2 examples/augmented.py

The second command prints the same table: what a sample becomes depends on the seed, the epoch and the sample, and on
nothing else. It needs scikit-learn, which brings the digits.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shoal

IMAGES, DIGITS = load_digits(return_X_y=True)
IMAGES = torch.tensor(IMAGES, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
DIGITS = torch.tensor(DIGITS)
FEW = TensorDataset(IMAGES[:200], DIGITS[:200])
OTHERS = TensorDataset(IMAGES[200:], DIGITS[200:])
CHAINS = ["", "affine(15, scale=0.1, shift=0.1)", "affine(15, scale=0.1, shift=0.1) & mixup(0.2, classes=10)"]


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def read(output, batch):
    return (output.argmax(1) == batch[1]).sum(), len(batch[1])


for chain in CHAINS:
    run = shoal.Run(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
        data=FEW,
        global_batch=50,
        augment=chain,
        log=None,
        progress=False,
    )
    for _ in run.steps("100ep"):
        pass
    found = run.evaluate(OTHERS, {"read": read})
    if run.world.rank == 0:
        print(f"{chain or 'as they are':60} {100 * found.metrics['read']:.1f} % read")
