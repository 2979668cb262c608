"""Sentences by topic: a data set, a DataLoader, a model and a loop."""

import os
import random

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    """Words as numbers, and the topic most of them belong to."""

    def __init__(self, count: int, seed: int) -> None:
        draw = random.Random(seed)
        self.rows = []
        for _ in range(count):
            topic = draw.randrange(4)
            length = draw.randrange(3, 12)
            words = [draw.randrange(25) + 25 * (topic if draw.random() < 0.6 else 0) for _ in range(length)]
            self.rows.append((words, topic))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        return self.rows[index]


def pad(rows):
    """A batch, as long as its longest sentence."""
    longest = max(len(words) for words, _ in rows)
    words = torch.tensor([words + [0] * (longest - len(words)) for words, _ in rows])
    lengths = torch.tensor([len(words) for words, _ in rows])
    return {"words": words, "lengths": lengths, "topic": torch.tensor([topic for _, topic in rows])}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, words, lengths):
        real = torch.arange(words.shape[1]) < lengths[:, None]
        return self.layers((self.embed(words) * real[..., None]).sum(1) / lengths[:, None])


world = int(os.environ.get("WORLD_SIZE", "1"))
fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
fabric.launch()
torch.manual_seed(0)
train = DataLoader(Sentences(400, seed=0), batch_size=32 // world, collate_fn=pad, num_workers=2, drop_last=True)
valid = DataLoader(Sentences(90, seed=1), batch_size=32, collate_fn=pad)
train, valid = fabric.setup_dataloaders(train, valid)
model = Classifier()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
step = 0
for _ in range(3):
    for batch in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["words"], batch["lengths"]), batch["topic"])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        step += 1
        fabric.print(f"step {step}: loss {fabric.all_reduce(loss.detach()).item():.5f}")
model.eval()
with torch.no_grad():
    right = sum((model(b["words"], b["lengths"]).argmax(1) == b["topic"]).sum() for b in valid)
fabric.print(f"right: {fabric.all_reduce(right, reduce_op='sum').item() / len(valid.dataset):.5f}")
