"""Digits learned with rounding in mind, and what the model is in 8 bits.

    shoal run --workers 2 examples/served.py
    shoal export examples/served.py --quantise int8
    shoal export examples/served.py --quantise int8 --onnx model.onnx    # with pip install 'shoal[export]'

The second command runs this script again, trains nothing, and prints loss, accuracy, size and time of each form of the
model, by the evaluation in the last lines. It needs scikit-learn, which brings the digits.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shoal

IMAGES, DIGITS = load_digits(return_X_y=True)
IMAGES, DIGITS = torch.tensor(IMAGES, dtype=torch.float32) / 16, torch.tensor(DIGITS)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def read(output, batch):
    return (output.argmax(1) == batch[1]).sum(), len(batch[1])


run = shoal.Run(
    model=model,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    data=TensorDataset(IMAGES[:1000], DIGITS[:1000]),
    global_batch=50,
    recipes="qat(int8, begin=100)",
    checkpoint="runs/served",
    checkpoint_every=100,
    progress=False,
)
for _ in run.steps("10ep"):
    pass
found = run.evaluate(TensorDataset(IMAGES[1000:], DIGITS[1000:]), {"read": read})
if run.world.rank == 0:
    print(f"trained with rounding: {100 * found.metrics['read']:.1f} % read")
