"""From raw text to a trained model: the standard library's sources -> flow -> store -> packed tokens -> training.

    python examples/store_text.py            builds the store `stores/python`, then trains 60 steps
    shoal run --workers 2 examples/store_text.py 20

Every worker calls `prepare`: one builds, the others wait, and a second start finds the store. What it was made of:
`shoal data show stores/python`.
"""

import sys
from pathlib import Path
from sysconfig import get_path

import torch
import torch.nn.functional as F
from text import GPT, MODULES

import shoal
from shoal.data import PackedTokens, Store, flow

STORE = Path("stores/python")
CONTEXT = 128


def tokens(text: str) -> list[int]:
    """A byte is a token."""
    return list(text.encode())


def prepare() -> None:
    """One row a module; of its tokens the store keeps lists of any length."""
    import pyarrow as pa

    files = [Path(get_path("stdlib")) / f"{name}.py" for name in MODULES.split()]
    table = pa.table(
        {
            "module": [file.stem for file in files if file.exists()],
            "text": [file.read_text() for file in files if file.exists()],
        }
    )
    with flow.session() as data:
        rows = data.rows(table).map({"tokens": tokens}).cast({"tokens": "array<uint8>"})
        rows.select("module", "tokens").write(STORE)


class Packed(torch.utils.data.Dataset):
    """Pieces of CONTEXT + 1 tokens: what is read, and the same one place further on."""

    def __init__(self) -> None:
        self.pieces = PackedTokens(Store(STORE), "tokens", length=CONTEXT + 1)

    def __len__(self) -> int:
        return len(self.pieces) - 1  # the last one is padded

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([i])[0]

    def __getitems__(self, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = self.pieces.batch(torch.tensor(ids).numpy())["tokens"].long()
        return [(piece[:-1], piece[1:]) for piece in found]


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    prepare()
    run = shoal.Run(
        model=GPT,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        data=Packed(),
        global_batch=32,
        log=None,
        progress=False,
    )
    for step in run.steps(steps):
        if step.number in (1, steps):
            print(f"step {step.number}: loss {step.loss:.4f}")
