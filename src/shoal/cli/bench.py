"""`shoal bench`: measurements on this machine that anybody can repeat."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.bench.result import Result


def network(
    rates: Annotated[
        str, typer.Option(help="What the wire carries, with commas between (100mbit,1gbit,10gbit).")
    ] = "",
    steps: Annotated[
        int | None, typer.Option(help="Steps after which losses are compared (400); 0: not at all.")
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(help="Of the model whose steps are timed (20e6).")
    ] = None,
    small: Annotated[
        float | None, typer.Option(help="Parameters of the model whose losses are compared (5e5).")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns of each contestant at each rate (4).")] = None,
    batch: Annotated[int, typer.Option(help="Samples of a worker in each timed step.")] = 2,
    strategies: Annotated[
        str, typer.Option(help='Only these, with commas between, such as "ddp, ddp + int8, torch ddp fp16".')
    ] = "",
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Where network.json and .png go.")] = ".",
    quick: Annotated[
        bool, typer.Option(help="A tiny model and few steps: whether it works, not how fast it is.")
    ] = False,
) -> None:
    """Compare strategies between two hosts at several network rates, beside torch DDP. Takes root.

    \b
    shoal bench network
    shoal bench network --rates 100mbit --strategies "ddp, ddp + int8, local(16)" --out runs/network
    """
    from shoal.bench.contest import Settings, hold_contest
    from shoal.bench.contestants import PEERS, STRATEGIES, contestants
    from shoal.bench.rates import parse_rate
    from shoal.testing.hosts import make_hosts

    default = _QUICK if quick else _FULL
    named = split_names(strategies) if strategies else [*PEERS, *STRATEGIES]
    settings = Settings(
        rates=tuple(parse_rate(rate) for rate in (rates or str(default["rates"])).split(",")),
        steps=int(_chosen("steps", steps, default["steps"], least=0)),
        parameters=_chosen("parameters", parameters, default["parameters"], least=3e4),
        small=_chosen("small", small, default["small"], least=3e4),
        rounds=int(_chosen("rounds", rounds, default["rounds"], least=1)),
        batch=int(_chosen("batch", batch, batch, least=1)),
    )
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    entered = contestants(named)
    with make_hosts(2) as hosts:
        result = hold_contest(hosts, entered, settings, _progress())
    _finish(folder, result)


_FULL: dict[str, float | str] = {
    "rates": "100mbit,1gbit,10gbit",
    "steps": 400,
    "parameters": 20e6,
    "small": 5e5,
    "rounds": 4,
}
_QUICK: dict[str, float | str] = {
    "rates": "100mbit,1gbit",
    "steps": 20,
    "parameters": 5e5,
    "small": 1e5,
    "rounds": 2,
}


def _chosen(name: str, given: float | None, default: float | str, least: float) -> float:
    value = float(default) if given is None else given
    if not least <= value < float("inf"):
        raise ConfigError(f"--{name} {value:g}: it must be at least {least:g}.")
    return value


def split_names(text: str) -> list[str]:
    """Names between commas; those within brackets belong to a name.

    >>> split_names("ddp + topk(0.01, feedback=false), local(16)")
    ['ddp + topk(0.01, feedback=false)', 'local(16)']
    """
    return [name.strip() for name in re.split(r",(?![^(]*\))", text) if name.strip()]


def _progress() -> Callable[[str], None]:
    """A line that tells where it is: one that changes in a terminal, one after the other elsewhere."""
    start, terminal = time.monotonic(), sys.stderr.isatty()

    def say(what: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - start), 60)
        line = f"{minutes:>3}:{seconds:02} {what}"
        print(f"\r\x1b[2K{line[:100]}" if terminal else line, end="" if terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    return say


def _finish(folder: Path, result: Result) -> None:
    from rich.console import Console

    from shoal.bench.plot import save_png
    from shoal.bench.table import show

    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr)
    console = Console()
    show(result, console if console.is_terminal else Console(width=120))
    result.write(folder / "network.json")
    files = "network.json"
    if importlib.util.find_spec("matplotlib") is not None:
        save_png(result, folder / "network.png")
        files += " and network.png"
    else:
        print("no network.png: it needs matplotlib; run `pip install shoal[plots]`.", file=sys.stderr)
    print(f"{files} are in {folder}" if "and" in files else f"{files} is in {folder}")
