"""Sentences by topic: a data set, a DataLoader, a model and a loop."""

import random

import torch
from accelerate import Accelerator, DataLoaderConfiguration
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


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
train = DataLoader(Sentences(400, seed=0), batch_size=32, collate_fn=pad, num_workers=2, drop_last=True)
valid = DataLoader(Sentences(90, seed=1), batch_size=32, collate_fn=pad)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
step = 0
for _ in range(3):
    for batch in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["words"], batch["lengths"]), batch["topic"])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.5f}")
model.eval()
right = 0
with torch.no_grad():
    for b in valid:
        hits = model(b["words"], b["lengths"]).argmax(1) == b["topic"]
        right += accelerator.gather_for_metrics(hits).sum().item()
accelerator.print(f"right: {right / len(valid.dataset):.5f}")
accelerator.end_training()
