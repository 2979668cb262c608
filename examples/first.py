"""The smallest real program: a classifier of handwritten-looking blobs, in the shape of the README's example."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def blobs(samples: int = 4096) -> TensorDataset:
    """Four noisy clusters in eight dimensions."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    centres = torch.randn(4, 8, generator=generator)
    return TensorDataset(centres[labels] + 0.7 * torch.randn(samples, 8, generator=generator), labels)


def loss(output, batch):  # a sum and a count: right for any split of the batch
    return F.cross_entropy(output, batch[1], reduction="sum"), batch[1].numel()


def main() -> None:
    run = shoal.Run(
        model=lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        data=blobs(),
        global_batch=256,
        strategy="ddp",
        clip=1.0,
    )
    for step in run.steps("3ep"):
        if step.number % 16 == 0 and run.world.rank == 0:
            print(f"step {step.number}: loss {step.loss:.4f}")


if __name__ == "__main__":
    main()
