"""`shoal ckpt export`, `import` and `diff`: from a checkpoint, to a checkpoint, and between two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.ckpt_find import find_whole
from shoal.cli.text_columns import columns, size_text
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.checkpoint.diff import Difference
    from shoal.checkpoint.layout.manifest import Manifest

Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, or a folder of them: then its latest.", show_default=False)
]


def export(
    checkpoint: Checkpoint,
    target: Annotated[
        Path, typer.Argument(help="A .safetensors file, or a folder to make.", show_default=False)
    ],
    dtype: Annotated[str, typer.Option(help="Convert to fp64, fp32, bf16 or fp16.")] = "",
    shard_size: Annotated[str, typer.Option(help="Folder: the largest size of one file.")] = "5GB",
    config: Annotated[Path | None, typer.Option(help="Folder: becomes its config.json.")] = None,
) -> None:
    """Write the model as one safetensors file, or as a folder that Hugging Face reads.

    \b
    shoal ckpt export runs/first model.safetensors
    shoal ckpt export runs/first/step-300 hub/ --dtype bf16 --config config.json
    """
    from shoal.checkpoint.convert.export import (
        export_file,
        export_folder,
        format_named,
        parse_size,
        state_dict,
    )

    one = target.suffix == ".safetensors"
    if one and config is not None:
        raise ConfigError(f"--config is for a folder; {target} is one file.")
    wanted = format_named(dtype)
    limit = parse_size(shard_size)
    found = find_whole(checkpoint)
    leaves = state_dict(found, wanted)
    try:
        files = export_file(leaves, target) if one else export_folder(leaves, target, limit, config)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror or error}); free some space, or choose another place."
        ) from error
    print(f"{found.folder} -> {len(leaves)} tensors")
    for file in files:
        print(f"  {file}  {size_text(file.stat().st_size)}")


def import_weights(
    source: Annotated[
        Path,
        typer.Argument(
            help="A file of torch.save or safetensors, a Hugging Face folder, or one of torch's DCP.",
            show_default=False,
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(help="The folder of checkpoints it comes into.", show_default=False)
    ],
    name: Annotated[str, typer.Option(help="What the checkpoint is called.")] = "imported",
    step: Annotated[int, typer.Option(help="The step that a run goes on from.")] = 0,
    optimizer: Annotated[
        str, typer.Option(help="Class of the optimizer whose state it holds, as AdamW.")
    ] = "",
) -> None:
    """Make a checkpoint of foreign weights. Nothing in them is run: they are read as data.

    \b
    shoal ckpt import weights.pt runs/second
    shoal ckpt import dcp_folder/ runs/second --step 1000
    """
    from shoal.checkpoint.convert.import_weights import import_checkpoint

    made = import_checkpoint(source, folder, name, step, optimizer)
    for remark in made.remarks:
        print(f"{source}: {remark}")
    kinds = [path.partition("/")[0] for path in made.manifest.tensors]
    counted = ", ".join(f"{kinds.count(kind)} {text}" for kind, text in _KINDS.items())
    ties = made.manifest.state["ties"]
    tied = f" ({len(ties)} names are of tied tensors)" if ties else ""
    print(f"{source} -> {made.folder}: {counted}{tied}, {size_text(made.manifest.nbytes)}")


_KINDS = {"parameter": "parameters", "buffer": "buffers", "optimizer": "tensors of optimizer state"}


def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint, or a folder: its latest.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another.", show_default=False)],
    limit: Annotated[int, typer.Option(help="So many tensors, the largest difference first.")] = 20,
) -> None:
    """Compare two checkpoints, optimizer included. Exit code 0 if they are bit for bit the same, 1 if not.

    \b
    shoal ckpt diff runs/first/step-300 runs/second/step-300
    """
    from shoal.checkpoint.diff import compare

    one, other = find_whole(a), find_whole(b)
    assert one.manifest is not None
    assert other.manifest is not None
    found = sorted(compare(one, other), key=lambda d: d.weight, reverse=True)
    print(f"A: {one.folder}\nB: {other.folder}")
    states = _states(one.manifest, other.manifest)
    if states:
        print(f"beside the tensors, the states differ in: {', '.join(states)}")
    count = len(one.manifest.tensors.keys() | other.manifest.tensors.keys())
    if not found:
        print(f"EQUAL: {count} tensors, not one bit differs")
        return
    rows = [["tensor", "differ", "of", "absolute", "relative", ""], *(_row(d) for d in found[:limit])]
    print(columns(rows, right=[1, 2, 3, 4]))
    if len(found) > limit:
        print(f"and {len(found) - limit} more: --limit {len(found)} shows them")
    print(f"DIFFERS: {len(found)} of {count} tensors")
    raise typer.Exit(1)


def _row(found: Difference) -> list[str]:
    if found.problem:
        return [found.path, "", "", "", "", found.problem]
    return [
        found.path,
        str(found.elements),
        str(found.numel),
        f"{found.absolute:.2e}",
        f"{found.relative:.2e}",
        "",
    ]


def _states(one: Manifest, other: Manifest) -> list[str]:
    keys = sorted(one.state.keys() | other.state.keys())
    return [key for key in keys if one.state.get(key) != other.state.get(key)]
