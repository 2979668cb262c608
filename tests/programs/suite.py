"""Runs programs of the table under one strategy and compares each with its plain loop: one line of JSON a program.

shoal run --workers 2 tests/programs/suite.py "zero3" "classifier,,LSTM"
"""

from __future__ import annotations

import json
import sys

import faces
import torch
import updates as updates  # its programs go into the table

import shoal
from programs import PROGRAMS, Program, Weights
from shoal.errors import PeerLost, ShoalError
from shoal.plan.check import promise_of
from shoal.types import Promise

EQUAL = 1e-9
"""How far weights may be apart: what sums in another order come to in float64."""
CONVERGES = 0.5
"""Under a strategy that only converges, the share of what the plain loop has learned that may be lost."""
REFUSED = 2
"""The exit code of a refusal."""
LONG = 6
"""So many times longer is a program run there: there is something to learn, and averages are taken often."""


def found(program: Program, strategy: str) -> dict[str, object]:
    """What became of a program: EQUAL, CONVERGES, DIFFERS, or refused with a sentence."""
    vars(faces).pop("run", None)
    torch.manual_seed(11)  # what draws outside of the keyed streams draws alike on both sides
    try:
        settings = {
            "shuffle": False,
            "precision": "fp64",
            "log": None,
            "progress": False,
            **program.settings(),
        }
        run = shoal.Run(**settings, strategy=strategy)
        vars(faces)["run"] = run  # losses call run.gather
        exact = promise_of(run.plan) is Promise.EXACT
        steps = program.steps if exact else LONG * program.steps
        for _ in run.steps(steps):
            if program.drive is not None:
                program.drive(run)
        held = run.state_dict() if program.weights is None else program.weights(run)
    except PeerLost:  # the other rank says why
        return {}
    except ShoalError as refused:
        return {"verdict": "refused", "sentence": " ".join(str(refused).split())}
    if run.world.rank > 0:
        return {}
    torch.manual_seed(11)
    wanted = program.plain(steps)
    return compare(held, wanted) if exact else compare_learned(program, held, wanted)


def compare(held: Weights, wanted: Weights) -> dict[str, object]:
    """Weights beside weights."""
    if missing := wanted.keys() - held.keys():
        return {"verdict": "DIFFERS", "sentence": f"{sorted(missing)} are missing"}
    gaps = {
        name: float((held[name].double() - w.double()).abs().max()) for name, w in wanted.items() if w.numel()
    }
    worst = max(gaps, key=lambda name: gaps[name])
    gap = {"gap": gaps[worst]}
    return (
        {"verdict": "EQUAL", **gap}
        if gaps[worst] <= EQUAL
        else {"verdict": "DIFFERS", "sentence": worst, **gap}
    )


def compare_learned(program: Program, held: Weights, wanted: Weights) -> dict[str, object]:
    """Loss over all samples beside loss over all samples."""
    before, after, plain = (program.measure(w) for w in (None, held, wanted))
    lost = (after - plain) / (before - plain)
    verdict = "CONVERGES" if lost <= CONVERGES else "DIFFERS"
    return {"verdict": verdict, "sentence": f"loss {before:.3f} -> {after:.3f}, plain {plain:.3f}"}


if __name__ == "__main__":
    strategy, names = sys.argv[1], sys.argv[2]
    for name in names.split(",,"):
        try:
            result = found(PROGRAMS[name], strategy)
        except Exception as error:  # what no cell may be: the table shows it, and the test is red
            result = {"verdict": "RAISED", "sentence": f"{type(error).__name__}: {error}"[:300]}
        if result:
            print(json.dumps({"program": name, "strategy": strategy, **result}), flush=True)
        if len(names.split(",,")) == 1 and result.get("verdict") == "refused":
            sys.exit(REFUSED)  # the other rank may wait for this one
