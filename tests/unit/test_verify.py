"""The verdict of `shoal verify` on two recorded runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shoal.cli.verify import _verdict
from shoal.errors import VerifyFailed

Step = tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Loss, gradients, parameters."""


def record(folder: Path, steps: dict[int, Step]) -> None:
    folder.mkdir()
    for number, (loss, gradients, parameters) in steps.items():
        (folder / f"{number}.loss.json").write_text(json.dumps(loss))
        save_file(gradients, folder / f"{number}.gradients.safetensors")
        save_file(parameters, folder / f"{number}.parameters.safetensors")


def step(loss: float = 1.0, **changes: float) -> Step:
    """Two tensors of gradients and parameters; `changes` adds to one of them, as in a_gradient=0.1."""
    kinds = [
        {
            name: torch.arange(1.0, 4.0, dtype=torch.float64) + changes.get(f"{name}_{kind}", 0.0)
            for name in "ab"
        }
        for kind in ("gradient", "parameter")
    ]
    return loss, kinds[0], kinds[1]


def verdict(folder: Path, one: dict[int, Step], many: dict[int, Step]) -> str:
    record(folder / "one", one)
    record(folder / "many", many)
    return _verdict(folder, "zero1 with 2 workers", "fp64", 1e-9)


def test_equal(tmp_path: Path) -> None:
    # Step 1 was dropped in both, as an overflow in fp16 is.
    said = verdict(tmp_path, {0: step(), 2: step()}, {0: step(), 2: step(loss=1.0 + 1e-12)})
    assert said.startswith("EQUAL: zero1 with 2 workers computes what one process computes: 3 steps in fp64")
    assert "1.0e-12 relative (the loss, step 3)" in said


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (step(b_gradient=0.1), "first at step 2, gradient of 'b' by 0.1 (0.0333 relative); 1e-09 is allowed"),
        (step(a_parameter=3.0), "first at step 2, parameter of 'a' by 3 (1 relative); "),
        (step(loss=1.5), "first at step 2, the loss by 0.5 (0.5 relative); "),
        (
            step(loss=1.5, b_gradient=0.3, a_parameter=1.0),
            "first at step 2, the loss by 0.5 (0.5 relative), then gradient of 'b' by 0.3 (0.1 relative); ",
        ),
        (step(loss=float("nan")), "first at step 2, the loss by nan"),
        ((1.0, {"a": step()[1]["a"]}, step()[2]), "gradient of 'b' is missing in one run"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, changed: Step, words: str) -> None:
    with pytest.raises(VerifyFailed) as caught:
        verdict(tmp_path, {0: step(), 1: step(), 2: step()}, {0: step(), 1: changed, 2: step(loss=9.0)})
    assert str(caught.value).startswith("DIFFERS: zero1 with 2 workers does not equal one process: ")
    assert words in str(caught.value)


def test_steps_that_only_one_run_made(tmp_path: Path) -> None:
    with pytest.raises(VerifyFailed, match="only one of the two runs made step 2"):
        verdict(tmp_path, {0: step(), 1: step()}, {0: step()})


def test_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(VerifyFailed, match="the script made no step"):
        verdict(tmp_path, {}, {})
