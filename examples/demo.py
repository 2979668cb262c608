"""The demo: two workers teach a small transformer to write Python, on the Python standard library's own sources.

shoal run --workers 2 examples/demo.py            (scripts/demo does this, and sets everything up first)
"""

import sys
from pathlib import Path

import torch
from text import GPT, Corpus, generate, loss

import shoal
from shoal.report import Times, draw, save_png, time_split

FOLDER = Path("demo")


def main(stop: int = 300) -> None:
    run = shoal.Run(
        model=GPT,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        data=Corpus(),
        global_batch=32,
        strategy="shared",
        schedule="cosine(warmup=20)",
        clip=1.0,
        log=str(FOLDER / "log"),
    )
    reports = []
    for step in run.steps(300):  # the loop is yours: log, evaluate, or break when you have seen enough
        reports.append(step)
        if step.number == stop:
            break
    if run.world.rank == 0 and step.number == 300:
        show(run, reports)


def show(run: shoal.Run, reports: list[shoal.StepReport]) -> None:
    """What a person would rather look at than read."""
    losses = [step.loss for step in reports]
    print(f"\n{draw(losses, title=f'loss, {run.plan} with {run.world.size} workers')}")
    picture = FOLDER / "loss.png"
    save_png(picture, {"loss": losses}, title="A transformer learns to write Python")
    print(f"\nthe same curve as a picture: {picture}")
    print("\nwhat it writes after 'def ':\n")
    for line in generate(run.module.eval(), "def ", length=240).splitlines():
        print(f"    {line}")
    print(f"\nwhere the time of a step goes:\n    {time_split(Times.of(reports[1:]))}")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:2]))
