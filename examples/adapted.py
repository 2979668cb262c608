"""A reader of digits adapted to mirrored ones: all of it trained again, or low-rank adapters alone.

    python examples/adapted.py
    shoal run --workers 2 --strategy zero3 examples/adapted.py

It needs scikit-learn, which brings the digits.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shoal

IMAGES, DIGITS = load_digits(return_X_y=True)
IMAGES = torch.tensor(IMAGES, dtype=torch.float32).reshape(-1, 8, 8) / 16
DIGITS = torch.tensor(DIGITS)
UPRIGHT = TensorDataset(IMAGES[:1200].flatten(1), DIGITS[:1200])
MIRRORED = TensorDataset(IMAGES[:1200].flip(2).flatten(1), DIGITS[:1200])
OTHERS = TensorDataset(IMAGES[1200:].flip(2).flatten(1), DIGITS[1200:])


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def read(output, batch):
    return (output.argmax(1) == batch[1]).sum(), len(batch[1])


def train(data, recipes, epochs, rate):
    run = shoal.Run(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=rate),
        data=data,
        global_batch=60,
        recipes=recipes,
        log=None,
        progress=False,
    )
    for _ in run.steps(f"{epochs}ep"):
        pass
    return run, run.evaluate(OTHERS, {"read": read}).metrics["read"]


upright, before = train(UPRIGHT, "", 10, 2e-3)
upright.save("runs/adapted/upright")
everything = 2 * 512 + 64 * 512 + 512 * 512 + 10 * 512 + 10
if upright.world.rank == 0:
    print(f"{'as it was':46} {0:7} weights learn           {100 * before:.1f} % of mirrored digits read")
for name, recipes, rate in (
    ("all of it", "start(runs/adapted)", 2e-3),
    ("adapters", "start(runs/adapted) & lora(4, train=4)", 5e-3),
):
    run, found = train(MIRRORED, recipes, 15, rate)
    learns = sum(v.numel() for n, v in run.state_dict().items() if ".lora_" in n or n.startswith("4."))
    learns = learns if "lora" in recipes else everything
    share = f"({100 * learns / everything:5.1f} %)"
    if run.world.rank == 0:
        print(f"{name:46} {learns:7} weights learn {share} {100 * found:.1f} % of mirrored digits read")
