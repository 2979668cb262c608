"""The `shoal` command: its verbs, and the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import shoal
from shoal.cli import ckpt, ckpt_convert
from shoal.cli.data_verbs import build as data_build
from shoal.cli.data_verbs import keep as data_keep
from shoal.cli.data_verbs import look as data_look
from shoal.cli.export import export
from shoal.cli.jobs_verbs.look import cancel, jobs, logs
from shoal.cli.jobs_verbs.submit import reserve, submit
from shoal.cli.jobs_verbs.sweep import sweep
from shoal.cli.list import list_choices
from shoal.cli.page import page, trace
from shoal.cli.plan_verb.plan import plan
from shoal.cli.run import run
from shoal.cli.selftest import selftest
from shoal.cli.server import server
from shoal.cli.status import status
from shoal.cli.trials.chaos import chaos
from shoal.cli.trials.doctor import doctor
from shoal.cli.verify import verify
from shoal.errors import ShoalError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# What follows the script belongs to the script, options too.
_SCRIPT_LAST = {"allow_interspersed_args": False}

app.command(context_settings=_SCRIPT_LAST)(run)
app.command()(submit)
app.command()(jobs)
app.command()(logs)
app.command()(cancel)
app.command()(reserve)
app.command()(sweep)
app.command()(verify)
app.command()(export)
app.command()(plan)
app.command()(selftest)
app.command()(doctor)
app.command()(chaos)
app.command()(server)
app.command()(status)
app.command()(page)
app.command()(trace)
app.command("list")(list_choices)

checkpoints = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Look at checkpoints, check, convert and clear them."
)
checkpoints.command("ls")(ckpt.list_checkpoints)
checkpoints.command()(ckpt.show)
checkpoints.command()(ckpt.verify)
checkpoints.command()(ckpt_convert.export)
checkpoints.command("import")(ckpt_convert.import_weights)
checkpoints.command()(ckpt_convert.diff)
checkpoints.command()(ckpt.prune)
checkpoints.command()(ckpt.copy)
app.add_typer(checkpoints, name="ckpt")

stores = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Build stores of training data, look at them, check, copy.",
)
stores.command()(data_build.build)
stores.command()(data_build.sql)
stores.command("ls")(data_look.list_stores)
stores.command()(data_look.show)
stores.command()(data_look.head)
stores.command()(data_look.stats)
stores.command()(data_look.diff)
stores.command()(data_keep.verify)
stores.command()(data_keep.copy)
stores.command()(data_keep.gc)
app.add_typer(stores, name="data")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {shoal.__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
]


@app.callback()
def _options(version: _Version = False) -> None:
    """One training loop, every way to share it."""


def main() -> None:
    """Entry point of `shoal` and `python -m shoal`."""
    try:
        app(prog_name="shoal")
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
