"""A small language model and its text, in plain PyTorch. Nothing in this file knows about Shoal.

The text is one that every machine with Python has: the source code of Python's standard library. The model
reads it byte by byte and learns to say which byte comes next. `python examples/text.py` trains it for about a
minute on one core and lets it write some Python of its own.
"""

from pathlib import Path
from sysconfig import get_path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODULES = """
argparse ast calendar codecs configparser contextlib dataclasses difflib enum fractions functools gzip heapq
inspect ipaddress os pdb pickle platform pprint pydoc random shutil socket ssl statistics subprocess tarfile
tempfile threading tokenize trace traceback typing uuid weakref
"""


class Corpus(torch.utils.data.TensorDataset):
    """The library, cut into pieces. Item i is `context` bytes, and the same bytes one place further on.

    >>> tokens, targets = Corpus(context=128)[0]
    >>> bool((tokens[1:] == targets[:-1]).all())
    True
    """

    def __init__(self, context: int = 128, limit: int = 2_000_000) -> None:
        files = [Path(get_path("stdlib")) / f"{name}.py" for name in MODULES.split()]
        text = b"".join(file.read_bytes() for file in files if file.exists())[:limit]
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()  # a byte is a token, 0 to 255
        pieces = (len(tokens) - 1) // context
        now, following = tokens[: pieces * context], tokens[1 : pieces * context + 1]
        super().__init__(now.view(pieces, context), following.view(pieces, context))


class Block(nn.Module):
    """One layer: each position looks at those before it, then thinks for itself. Both add to the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.shrink(F.gelu(self.expand(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        # From (batch, time, width) to (batch, heads, time, size), three times.
        query, key, value = self.qkv(x).unflatten(-1, (-1, 3 * self.size)).transpose(1, 2).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of numbers by angles that grow with the position, so that attention sees distance (RoPE)."""
    half = x.shape[-1] // 2
    speeds = 1000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), speeds)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class GPT(nn.Module):
    """A decoder-only transformer: bytes in, for each of them the scores of all 256 bytes that could be next.

    >>> GPT()(torch.zeros(2, 128, dtype=torch.int64)).shape
    torch.Size([2, 128, 256])
    """

    def __init__(
        self, vocab: int = 256, layers: int = 2, width: int = 128, heads: int = 4, context: int = 128
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)  # small scores: at first every byte is about as likely

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """The summed surprise at each true next byte, and how many bytes that were."""
    targets = batch[1]
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


@torch.no_grad()
def generate(model: GPT, prompt: str, length: int = 300, temperature: float = 0.7, seed: int = 0) -> str:
    """`prompt` and `length` bytes more, each drawn by the model's scores; lower temperatures dare less."""
    random = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode())
    for _ in range(length):
        scores = model(torch.tensor([tokens[-model.context :]]))[0, -1]
        tokens.append(int(torch.multinomial(F.softmax(scores / temperature, dim=0), 1, generator=random)))
    return bytes(tokens).decode(errors="replace")


def main(steps: int = 300) -> None:
    """Train as one would in plain PyTorch, on one core."""
    torch.manual_seed(0)
    model, data = GPT(), Corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        batch = data[torch.randint(len(data), (32,))]
        total, count = loss(model(batch[0]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        schedule.step()
        if step == 1 or step % 25 == 0:
            print(f"step {step}  loss {total.item() / count:.4f}")
    print(generate(model, "def "))


if __name__ == "__main__":
    main()
