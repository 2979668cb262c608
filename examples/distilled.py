"""A small model that learns digits from 150 samples: with labels alone, and with a teacher that has seen 1,000.

    python examples/distilled.py
    shoal run --workers 2 examples/distilled.py

It needs scikit-learn, which brings the digits.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.recipe.teacher.distil import Distil

IMAGES, DIGITS = load_digits(return_X_y=True)
IMAGES = torch.tensor(IMAGES, dtype=torch.float32) / 16
DIGITS = torch.tensor(DIGITS)
MANY = TensorDataset(IMAGES[:1000], DIGITS[:1000])
FEW = TensorDataset(IMAGES[:150], DIGITS[:150])
OTHERS = TensorDataset(IMAGES[1000:], DIGITS[1000:])


def big() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def read(output, batch):
    return (output.argmax(1) == batch[1]).sum(), len(batch[1])


def train(what: str, model, data: TensorDataset, epochs: int, recipes="") -> shoal.Run:
    run = shoal.Run(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        data=data,
        global_batch=50,
        recipes=recipes,
        augment="noise(0.3)",
        log=None,
        progress=False,
    )
    for _ in run.steps(f"{epochs}ep"):
        pass
    found = run.evaluate(OTHERS, {"read": read})
    if run.world.rank == 0:
        weights = sum(p.numel() for p in model().parameters())
        print(f"{what:32} {weights:6} weights   {100 * found.metrics['read']:.1f} % read")
    return run


teacher = train("teacher, 1,000 samples", big, MANY, 20)
train("student, 150 samples", small, FEW, 150)
train("student, 150 and the teacher", small, FEW, 150, [Distil(teacher.module, alpha=0.9, temperature=3.0)])
