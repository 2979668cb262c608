"""Sentences by topic: a data set, a DataLoader, a model and a loop."""

import os
import random

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
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


class Topics(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Classifier()
        self.right = 0

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def training_step(self, batch, index):
        return F.cross_entropy(self.model(batch["words"], batch["lengths"]), batch["topic"])

    def on_train_batch_end(self, outputs, batch, index):
        loss = self.all_gather(outputs["loss"].detach()).mean()
        self.print(f"step {self.global_step}: loss {loss.item():.5f}")

    def validation_step(self, batch, index):
        self.right += (self.model(batch["words"], batch["lengths"]).argmax(1) == batch["topic"]).sum()

    def on_validation_epoch_end(self):
        self.print(f"right: {self.all_gather(self.right).sum().item() / 90:.5f}")


world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
texts, unseen = Sentences(400, seed=0), Sentences(90, seed=1)
sampler = DistributedSampler(texts, world, rank, shuffle=False)  # its own would shuffle
train = DataLoader(texts, batch_size=32 // world, sampler=sampler, collate_fn=pad, num_workers=2, drop_last=True)
valid = DataLoader(unseen, batch_size=32, sampler=DistributedSampler(unseen, world, rank, False), collate_fn=pad)
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = L.Trainer(
    accelerator="cpu", devices=world, max_epochs=3, gradient_clip_val=1.0, use_distributed_sampler=False,
    strategy="ddp" if world > 1 else "auto", **quiet,
)  # fmt: skip
module = Topics()
trainer.fit(module, train)
trainer.validate(module, valid, verbose=False)
