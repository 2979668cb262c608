"""`shoal export`: a script is trained, and then asked for what is served of its model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import finish
from warm import Command

SCRIPT = """
import sys, torch, shoal
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
y = (x[:, :4].argmax(1))
loss = lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))
right = lambda output, batch: ((output.argmax(1) == batch[1]).sum(), len(batch[1]))
run = shoal.Run(
    model=lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)), loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), data=TensorDataset(x, y), global_batch=16,
    recipes="qat(int8, begin=6)", checkpoint="run", checkpoint_every=4, progress=False,
)
for step in run.steps(12):
    pass
if len(sys.argv) == 1:
    print("before", run.evaluate(TensorDataset(x, y), {"right": right}).metrics["right"])
    print("the rest of the script")
"""


def call(folder: Path, *command: str) -> tuple[int, str, str]:
    (folder / "train.py").write_text(SCRIPT)
    done = finish(
        Command(folder, {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}, ["-m", "shoal", *command])
    )
    return done.code, done.out, done.err


def test_a_model_in_whole_numbers(tmp_path: Path) -> None:
    code, _, err = call(tmp_path, "export", "train.py", "--quantise", "int8")
    assert code == 2
    assert "there is no checkpoint to export" in err
    code, out, err = call(tmp_path, "run", "--workers", "2", "train.py")
    assert code == 0, err
    before = float(re.findall(r"before ([\d.]+)", out)[0])
    onnx = _has_onnx()
    wanted = ["--quantise", "int8", *(["--onnx", "out/model.onnx"] if onnx else [])]
    code, out, err = call(tmp_path, "export", "train.py", *wanted)
    assert code == 0, err
    assert "step 12, 16 samples a pass" in out
    assert "the rest of the script" not in out, "it ends behind its first evaluation"
    rights = [float(share) for share in re.findall(r"right ([\d.]+)", out)]
    sizes = [float(size) for size in re.findall(r"([\d.]+) MB", out)]
    gaps = [float(gap) for gap in re.findall(r"±(\S+)", out)]
    assert len(rights) == (4 if onnx else 2)
    assert rights[0] == pytest.approx(before, abs=0.05)
    assert max(abs(right - rights[0]) for right in rights) < 0.05
    assert sizes[1] <= sizes[0]
    assert gaps[0] == 0
    if onnx:
        assert gaps[2] < 1e-5, "ONNX Runtime computes what torch does"
        assert {file.name for file in (tmp_path / "out").iterdir()} == {"model.onnx", "model.int8.onnx"}
    code, out, err = call(tmp_path, "export", "train.py", "silent", "--quantise", "int8")
    assert code == 0, err
    assert "called no run.evaluate behind its loop" in err
    assert "int8" in out


def _has_onnx() -> bool:
    """Said where it is not: the rest is tried without."""
    try:
        import onnx
        import onnxruntime
        import onnxscript
    except ImportError as missing:
        print(f"without ONNX: {missing}")
        return False
    return bool(onnx and onnxruntime and onnxscript)


@pytest.mark.parametrize(
    ("asked", "words"),
    [([], "say what to make, as --quantise int8"), (["--quantise", "int3"], "--quantise int3: it is int8")],
)
def test_what_cannot_be_exported(asked: list[str], words: str, tmp_path: Path) -> None:
    code, _, err = call(tmp_path, "export", "train.py", *asked)
    assert code == 2
    assert words in err
