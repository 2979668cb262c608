"""Sentences by topic: a data set, a DataLoader, a model and a loop."""

import os
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


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
    return {"words": words, "lengths": lengths, "labels": torch.tensor([topic for _, topic in rows])}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, words, lengths, labels=None, **loss_kwargs):
        real = torch.arange(words.shape[1]) < lengths[:, None]
        logits = self.layers((self.embed(words) * real[..., None]).sum(1) / lengths[:, None])
        count = loss_kwargs.get("num_items_in_batch")
        if count is None:
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}
        return {"loss": F.cross_entropy(logits, labels, reduction="sum") / count, "logits": logits}


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step}: loss {float(logs['loss']):.5f}")


world = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
args = TrainingArguments(
    "runs/trainer", num_train_epochs=3, per_device_train_batch_size=32 // world, per_device_eval_batch_size=32,
    max_grad_norm=1.0, lr_scheduler_type="constant", train_sampling_strategy="sequential", use_cpu=True,
    dataloader_num_workers=2, dataloader_drop_last=True, logging_steps=1, disable_tqdm=True, report_to=[],
    save_strategy="no", remove_unused_columns=False,
)  # fmt: skip
trainer = Trainer(
    model, args, data_collator=pad, train_dataset=Sentences(400, seed=0), eval_dataset=Sentences(90, seed=1),
    optimizers=(optimizer, None), callbacks=[Losses()],
    compute_metrics=lambda found: {"right": (found.predictions.argmax(1) == found.label_ids).mean()},
)  # fmt: skip
trainer.train()
args.dataloader_drop_last = False
right = trainer.evaluate()["eval_right"]
if trainer.is_world_process_zero():
    print(f"right: {right:.5f}")
