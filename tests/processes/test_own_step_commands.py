"""A step of the user's own through the real commands: run, resume, verify."""

from __future__ import annotations

from pathlib import Path

from commands import python, shoal, write

GAN = """
def bce(logits, real):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real), reduction="sum")

def adam(params):
    return torch.optim.Adam(params, lr=0.01)

def step(ctx, batch):
    x, n = batch[0], len(batch[0])
    fake = ctx["gen"](draw(ctx, n, 3))
    ctx.backward("disc", bce(ctx["disc"](x), 1.0) + bce(ctx["disc"](fake.detach()), 0.0), n)
    ctx.update("disc")
    ctx.backward("gen", bce(ctx["disc"](fake), 1.0), n)
    ctx.update("gen")

def draw(ctx, *shape):
    return ctx.randn(*shape)

settings = dict(models={"gen": lambda: nn.Linear(3, 5), "disc": lambda: nn.Linear(5, 1)}, data=data, global_batch=8,
                optimizers={"gen": adam, "disc": adam}, step=step, log=None, progress=False)
"""
TRAIN = """
run = shoal.Run(**settings, checkpoint="saved", checkpoint_every=3)
for report in run.steps(6):
    pass
if rank == 0:
    print("did", report.number, *[f"{name} {value:.5f}" for name, value in report.metrics.items()])
"""


def test_verify_follows_it(tmp_path: Path) -> None:
    script = write(tmp_path, GAN + TRAIN)
    done = shoal(tmp_path, "verify", script, "--strategy", "zero2", "--workers", "3", "--steps", "4")
    assert done.code == 0, done.err
    assert done.out.startswith("EQUAL: zero2 with 3 workers")
    done = shoal(tmp_path, "verify", script, "--strategy", "zero3", "--workers", "2")
    assert done.code == 2
    assert "zero3 cannot follow a step of your own" in done.err


def test_a_word_about_draws_that_depend_on_the_workers(tmp_path: Path) -> None:
    plain = GAN.replace("return ctx.randn(*shape)", "return torch.randn(*shape).to(ctx['gen'].weight.dtype)")
    script, words = write(tmp_path, plain + TRAIN), "shoal: step= draws from torch's own generator"
    done = shoal(tmp_path, "verify", script, "--workers", "2", "--steps", "2")
    assert done.code == 1
    assert "DIFFERS" in done.err
    assert shoal(tmp_path, "run", "--workers", "2", script).err.count(words) == 1
    assert words not in python(tmp_path, script).err


def test_it_resumes_with_other_workers(tmp_path: Path) -> None:
    """A run of six steps ends alike, whether it began with two workers or went through alone."""
    script = write(tmp_path, GAN + TRAIN)
    begun = shoal(tmp_path, "run", "--workers", "2", "--strategy", "zero1", "--steps", "3", script)
    assert begun.out.startswith("did 3 "), begun.err
    resumed = python(tmp_path, script)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    through = python(elsewhere, write(elsewhere, GAN + TRAIN))
    assert resumed.out == through.out
    assert through.out.startswith("did 6 loss/disc ")


def test_verify_refuses_two_runs(tmp_path: Path) -> None:
    script = write(tmp_path, GAN + "first, second = shoal.Run(**settings), shoal.Run(**settings)\n")
    done = shoal(tmp_path, "verify", script, "--workers", "2")
    assert done.code == 2
    assert "the script makes a second Run, and verify compares one" in done.err
