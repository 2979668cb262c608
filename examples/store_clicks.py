"""Click-through: events joined with users, features fitted on the training part, hashed categories, SparseEmbedding.

    python examples/store_clicks.py
    shoal run --workers 2 --strategy ps examples/store_clicks.py

The events are made up: whether somebody clicks follows from the item and from the age, and the model has to find that
out. Every worker calls `prepare`: one builds, the others wait, and a second start finds the stores.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.data import Store, flow
from shoal.data.flow import _

STORES = Path("stores/clicks")
BUCKETS = 2**16


def prepare() -> None:
    """Tables, as somebody's log would have them; then two stores, of users that do not meet."""
    import pyarrow as pa

    draw = np.random.default_rng(0)
    ages = draw.integers(10, 80, 2000)
    user, item = draw.integers(0, 2000, 40_000), draw.integers(0, 300, 40_000)
    liked = draw.standard_normal(300)[item] + (ages[user] - 45) / 20
    clicked = (liked + draw.logistic(size=40_000) > 0).astype("f4")
    with flow.session(threads=1) as data:
        people = data.rows(pa.table({"user": np.arange(2000), "age": ages})).filter(_.age >= 18)
        events = data.rows(pa.table({"user": user, "item": [f"item-{i}" for i in item], "clicked": clicked}))
        parts = events.join(people, on="user", unique=True).split("user", {"train": 0.8, "test": 0.2})
        features = {"years": flow.standardise("age"), "slot": flow.hashed("item", BUCKETS)}
        fitted = flow.fit(parts["train"], features)  # on training alone
        for name, part in parts.items():
            fitted.transform(part).select("slot", "years", "clicked").write(STORES / name)


class Clicks(nn.Module):
    """A score for a slot and an age."""

    def __init__(self) -> None:
        super().__init__()
        self.items = shoal.SparseEmbedding(BUCKETS, dim=4, ids=lambda batch: batch["slot"])
        self.out = nn.Linear(5, 1)

    def forward(self, slot: torch.Tensor, years: torch.Tensor) -> torch.Tensor:
        features = torch.cat([self.items(slot), years.float()[:, None]], 1)
        return self.out(features).squeeze(1)


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.binary_cross_entropy_with_logits(output, batch["clicked"], reduction="sum"), len(output)


if __name__ == "__main__":
    prepare()
    run = shoal.Run(
        model=Clicks,
        loss=loss,
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.3),
        inputs=lambda batch: shoal.Call(batch["slot"], batch["years"]),
        data=Store(STORES / "train"),
        global_batch=256,
        strategy="solo",
        log=None,
        progress=False,
    )
    for step in run.steps("2ep"):
        if step.number % 100 == 0:
            print(f"step {step.number}: loss {step.loss:.4f}")
    print(f"test: {run.evaluate(Store(STORES / 'test')).loss:.4f}")
