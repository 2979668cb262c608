"""Two recorded runs, number by number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import VerifyFailed


@dataclass(frozen=True)
class ParityDifference:
    """How far two numbers, or the largest of two tensors of numbers, are apart."""

    step: int
    what: str
    absolute: float
    relative: float


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    steps: int
    worst: ParityDifference
    wrong: list[ParityDifference]
    """The first that is too large, and the first parameter of that step if the first is the loss."""

    @property
    def said(self) -> str:
        """What is wrong in the first step that is, in words."""
        return ", then ".join(f"{d.what} by {d.absolute:.3g} ({d.relative:.3g} relative)" for d in self.wrong)


def compare_runs(one: Path, many: Path, allowed: float) -> Comparison:
    """How two recorded runs compare."""
    worst = ParityDifference(0, "nothing", 0.0, 0.0)
    steps = 0
    wrong: list[ParityDifference] = []
    for difference in compare(one, many):
        if wrong and (difference.step > wrong[0].step or wrong[-1].what != "the loss"):
            break
        steps = max(steps, difference.step)
        if not difference.relative <= allowed:
            wrong.append(difference)
        worst = max(worst, difference, key=lambda d: d.relative)
    return Comparison(steps, worst, wrong)


def compare(one: Path, many: Path) -> Iterator[ParityDifference]:
    """Every loss, gradient and parameter of two recorded runs, in the order they were computed."""
    from safetensors.torch import load_file

    # Steps that were dropped (overflow in fp16) leave nothing behind, so numbers may be missing.
    files = [file.name for folder in (one, many) for file in folder.glob("*.loss.json")]
    for step in sorted({int(name.split(".")[0]) for name in files}):
        for folder in (one, many):
            if not (folder / f"{step}.parameters.safetensors").exists():
                raise VerifyFailed(f"DIFFERS: only one of the two runs made step {step + 1}.")
        a, b = (json.loads((folder / f"{step}.loss.json").read_text()) for folder in (one, many))
        yield ParityDifference(step + 1, "the loss", abs(a - b), abs(a - b) / max(abs(a), 1e-12))
        for kind in ("gradients", "parameters"):
            left, right = (load_file(folder / f"{step}.{kind}.safetensors") for folder in (one, many))
            # Numbers far below the largest of their kind are the rest of a cancellation: rounding is all they hold.
            floor = (
                1e-4 * max((float(t.abs().max()) for t in left.values() if t.numel()), default=1.0) + 1e-30
            )
            for name in sorted(left.keys() | right.keys()):
                what = f"{kind.removesuffix('s')} of '{name}'"
                if name not in left or name not in right:
                    yield ParityDifference(
                        step + 1, f"{what} is missing in one run", float("inf"), float("inf")
                    )
                elif left[name].numel():
                    gap = float((left[name] - right[name]).abs().max())
                    yield ParityDifference(
                        step + 1, what, gap, gap / max(float(left[name].abs().max()), floor)
                    )
