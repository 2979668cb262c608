"""A reader of digits learns to read them with their pixels in another order: what is left of what it could read?

    python examples/remembered.py
    shoal run --workers 2 --strategy zero1 examples/remembered.py

Elastic weight consolidation holds on to the weights that the old task needs. It needs scikit-learn, which brings the
digits.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.recipe.ewc import Ewc
from shoal.recipe.start import Start

IMAGES, DIGITS = load_digits(return_X_y=True)
IMAGES = torch.tensor(IMAGES, dtype=torch.float32) / 16
DIGITS = torch.tensor(DIGITS)
ORDER = torch.randperm(64, generator=torch.Generator().manual_seed(0))
OLD, NEW = (
    (TensorDataset(x[:1200], DIGITS[:1200]), TensorDataset(x[1200:], DIGITS[1200:]))
    for x in (IMAGES, IMAGES[:, ORDER])
)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def read(output, batch):
    return (output.argmax(1) == batch[1]).sum(), len(batch[1])


def train(data, recipes, epochs):
    run = shoal.Run(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
        data=data,
        global_batch=60,
        recipes=recipes,
        log=None,
        progress=False,
    )
    for _ in run.steps(f"{epochs}ep"):
        pass
    return run, [100 * run.evaluate(task[1], {"read": read}).metrics["read"] for task in (OLD, NEW)]


first, found = train(OLD[0], "", 15)
first.save("runs/remembered/old")
rows = [("the old task alone", found)]
for name, recipes in (
    ("then the new one", []),
    ("then the new one, with ewc", [Ewc(1e5, data=OLD[0])]),
):
    rows.append((name, train(NEW[0], [Start("runs/remembered"), *recipes], 15)[1]))
if first.world.rank == 0:
    for name, (old, new) in rows:
        print(f"{name:30} {old:.1f} % of the old task read, {new:.1f} % of the new")
