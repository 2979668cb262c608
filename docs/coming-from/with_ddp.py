"""Sentences by topic: a data set, a DataLoader, a model and a loop."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


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


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
texts, unseen = Sentences(400, seed=0), Sentences(90, seed=1)
sampler = DistributedSampler(texts, shuffle=False, drop_last=True)
train = DataLoader(texts, batch_size=32 // world, sampler=sampler, collate_fn=pad, num_workers=2, drop_last=True)
valid = DataLoader(unseen, batch_size=32, sampler=DistributedSampler(unseen, shuffle=False), collate_fn=pad)
model = DistributedDataParallel(Classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["words"], batch["lengths"]), batch["topic"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step}: loss {shown.item():.5f}")
model.eval()
with torch.no_grad():
    right = sum((model(b["words"], b["lengths"]).argmax(1) == b["topic"]).sum() for b in valid)
dist.all_reduce(right)
if rank == 0:
    print(f"right: {right.item() / len(unseen):.5f}")
dist.destroy_process_group()
