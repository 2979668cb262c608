"""Run benchmarks, show what they find, write it down.

    scripts/bench order                     measure, print, write benchmarks/results/latest/order.json
    scripts/bench order padding --write     and make that what docs/numbers.md says
    scripts/bench --write                   only write docs/numbers.md again, from benchmarks/results/*.json
    scripts/bench exchange --help           what it measures, its options and goals

Exit code 1: a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if not __package__:  # started as `python benchmarks`, from whatever folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console

from benchmarks.catalogue import BENCHMARKS, find
from benchmarks.report.draw import show
from benchmarks.report.numbers_page import LATEST, publish, write_page
from benchmarks.report.origin import ROOT, find_origin
from benchmarks.report.result import Result
from shoal.errors import ShoalError

FORMATTER = argparse.RawDescriptionHelpFormatter


def main(words: Sequence[str]) -> int:
    """Returns the exit code."""
    names: list[str] = []
    rest = list(words)
    while rest and rest[0] in BENCHMARKS:
        names.append(rest.pop(0))
    if len(names) == 1:
        return _run(names[0], rest)
    parser = argparse.ArgumentParser("scripts/bench", description=__doc__, formatter_class=FORMATTER)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(BENCHMARKS))
    _add_common(parser)
    options = parser.parse_args([*names, *rest])
    if unknown := [word for word in options.names if word not in BENCHMARKS]:
        parser.error(f"there is no benchmark '{unknown[0]}'; there are {', '.join(BENCHMARKS)}")
    if not names:
        if not options.write:
            parser.error(f"say which: {', '.join(BENCHMARKS)}")
        print(f"wrote {write_page()}")
        return 0
    return max([_run(name, rest) for name in names])


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--write", action="store_true", help="publish: benchmarks/results/ and docs/numbers.md"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=LATEST,
        metavar="FOLDER",
        help="where JSON goes (benchmarks/results/latest)",
    )


def parser_of(name: str) -> argparse.ArgumentParser:
    """What one benchmark understands."""
    benchmark = find(name)
    parser = argparse.ArgumentParser(
        f"scripts/bench {name}", description=benchmark.__doc__, formatter_class=FORMATTER
    )
    _add_common(parser)
    benchmark.add_options(parser)
    return parser


def _run(name: str, words: Sequence[str]) -> int:
    from benchmarks.report import picture  # torch comes with it

    parser = parser_of(name)
    options = parser.parse_args(words)
    if options.write and getattr(options, "quick", False):
        parser.error(
            "--quick shows whether it works; its numbers are not for publishing, so leave --write out"
        )
    result, whole = _measure(name, options), not getattr(options, "parts", None)
    files = [options.out / f"{name}.json"]
    result.write(files[0])
    if picture.draws(result):
        drawn = options.out / f"{name}.png"
        if picture.save(result, drawn):
            files.append(drawn)
        else:
            print(f"no {drawn.name}: it needs matplotlib; run `pip install shoal[plots]`.", file=sys.stderr)
    if options.write:
        files += [publish(result, whole), write_page()]
        if picture.draws(result) and picture.save(result, picture.PUBLISHED):
            files.append(picture.PUBLISHED)
    print("\nwrote " + ", ".join(_near(file) for file in files))
    return int(any(section.missed for section in result.sections) and not getattr(options, "quick", False))


def _near(file: Path) -> str:
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)


def _measure(name: str, options: argparse.Namespace) -> Result:
    """Each section is shown when it is there."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    origin = find_origin()
    sections = []
    for section in find(name).measure(options):
        sections.append(replace(section, origin=origin))
        show(sections[-1], console)
        sys.stdout.flush()
    return Result(name, sections)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except ShoalError as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
