"""`shoal export`: a trained model in whole numbers and as ONNX, measured on the script's own evaluation."""

from __future__ import annotations

from typing import Annotated

import typer


def export(
    script: Annotated[str, typer.Argument(help="The script that trained the model.", show_default=False)],
    args: Annotated[
        list[str] | None, typer.Argument(help="Passed on to the script.", show_default=False)
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Folder of checkpoints; default: what the script says.")
    ] = "",
    quantise: Annotated[
        str, typer.Option(help="int8: weights and activations of Linear layers in 8 bits.")
    ] = "",
    onnx: Annotated[str, typer.Option(help="Write this ONNX file; with --quantise also one in 8 bits.")] = "",
    weights: Annotated[
        str, typer.Option(help='Which weights: "export" (as recipes hand them over), "ema" or "swa".')
    ] = "export",
) -> None:
    """Make what is served of a trained model, and measure it by the script's own run.evaluate.

    The script runs as it is, in one process; its loop of steps is empty, and it ends after its first evaluation.

    \b
    shoal export train.py --quantise int8
    shoal export train.py --checkpoint runs/first --quantise int8 --onnx model.onnx
    """
    from shoal.cluster.local import Job, check
    from shoal.cluster.recovery.supervise import run_job
    from shoal.train.export.request import ExportRequest

    request = ExportRequest(quantise, onnx, weights)
    overrides: dict[str, int | float | bool | str] = {
        "strategy": "solo",
        "log": "none",
        "progress": False,
        "checkpoint_every": "none",
        "copies": "",
        "trackers": "",
        "profile": "",
        "augment": "",
    }
    if checkpoint:
        overrides["checkpoint"] = checkpoint
    environment = {"SHOAL_EXPORT": request.dumps()}
    job = Job(script, tuple(args or ()), 1, overrides, output="first", environment=environment)
    check(job)
    run_job(job)
