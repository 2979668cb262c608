"""`shoal plan --gpt` and `--replay`: machines and models that are not here."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from shoal.cli.text_columns import columns, size_text
from shoal.errors import ConfigError

_ROWS = 12


def plan_paper(text: str, cluster: str, batch: int, precision: str, as_json: bool, everything: bool) -> None:
    """The best layouts of a transformer on a cluster on paper."""
    from shoal.plan.paper.cluster import read_cluster
    from shoal.plan.paper.gpt import parse_gpt
    from shoal.plan.paper.paper_search import PaperPlan, search_paper

    if not cluster:
        raise ConfigError("--gpt needs --cluster FILE.toml: the machines it would be trained on.")
    if batch < 1:
        raise ConfigError("--gpt needs --global-batch: samples of a step, over all cards.")
    if precision not in ("bf16", "fp8", "fp4"):
        raise ConfigError(f"--precision {precision}: it is bf16, fp8 or fp4.")
    gpt, machines = parse_gpt(text), read_cluster(Path(cluster))
    plans: list[PaperPlan] = search_paper(gpt, machines, batch, precision)
    if as_json:
        typer.echo(json.dumps([_plain(one) for one in plans]))
        return
    shown = plans if everything else [one for one in plans if one.fits][:_ROWS] or plans[:_ROWS]
    typer.echo(
        f"{gpt.parameters / 1e9:.1f} B parameters on {machines.cards} × {machines.name}, global batch {batch}; "
        f"fractions of the peaks: {machines.achieved.source}"
    )
    rows = [["strategy", "micro-batch", "recompute", "step", "", "TFLOP/s a card", "memory a card", "fits"]]
    for one in shown:
        low, high = one.interval
        rows.append(
            [
                one.strategy,
                str(one.layout.micro_batch),
                one.layout.recompute,
                f"{one.time.seconds:.3g} s",
                f"{low:.3g} to {high:.3g} s",
                f"{one.flops_per_card / 1e12:.0f}",
                size_text(sum(one.memory.values())),
                "yes" if one.fits else "no",
            ]
        )
    typer.echo(columns(rows))
    best = shown[0]
    parts = {
        "compute": best.time.compute,
        "sums over the tensor axis": best.time.tensor,
        "waiting of stages": best.time.bubble,
        "the data axis": best.time.data,
        "the update": best.time.update,
    }
    said = ", ".join(f"{name} {value / best.time.seconds:.0%}" for name, value in parts.items() if value > 0)
    typer.echo(f"{best.strategy} is first: {said}." if best.fits else "Nothing fits; the smallest are shown.")


def _plain(one: object) -> dict[str, object]:
    from shoal.plan.paper.paper_search import PaperPlan

    assert isinstance(one, PaperPlan)
    low, high = one.interval
    return {
        "strategy": one.strategy,
        "micro_batch": one.layout.micro_batch,
        "recompute": one.layout.recompute,
        "seconds": {"low": low, "middle": one.time.seconds, "high": high},
        "flops_per_card": one.flops_per_card,
        "memory": one.memory,
        "fits": one.fits,
    }


def show_replay(path: Path, as_json: bool) -> None:
    """Published runs beside what is predicted of them."""
    from shoal.plan.paper.published import read_published
    from shoal.plan.paper.replay import replay

    rows = read_published(path)
    found = replay(rows)
    if as_json:
        runs = [
            {"hardware": one.hardware, "run": run.name, "measured": run.seconds, "predicted": predicted}
            for one in found
            for run, predicted in zip(one.runs, one.predicted, strict=True)
        ]
        typer.echo(json.dumps({"runs": runs, "left_out": dict(rows.left_out)}))
        return
    table = [["hardware", "runs", "mean error", "worst", "held out", "order (tau)"]]
    for one in found:
        held = "" if one.held_out is None else f"{one.held_out:.1%}"
        table.append(
            [
                one.hardware,
                str(len(one.runs)),
                f"{one.mean:.1%}",
                f"{max(one.errors):.1%}",
                held,
                f"{one.order:.2f}",
            ]
        )
    typer.echo(columns(table, right=[1, 2, 3, 4, 5]))
    errors = [error for one in found for error in one.errors]
    if errors:
        typer.echo(f"{len(errors)} runs, mean error {sum(errors) / len(errors):.1%}")
    for why, count in rows.left_out.items():
        typer.echo(f"left out: {count}, because {why}")
