"""The table of docs/programs.md: kinds of program × strategies, each cell as the suite has found it.

python tests/programs/table.py              runs every cell and writes the page (some minutes)
python tests/programs/table.py "LSTM,,LBFGS"  runs those rows anew and keeps the rest
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import faces as faces  # its programs go into the table
import updates as updates  # these too

from programs import PROGRAMS

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "programs.md"

STRATEGIES = {
    "alone": "solo",
    "ddp": "ddp",
    "zero2": "zero2",
    "zero3": "zero3",
    "shared": "shared",
    "tp2": "ddp * tp2",
    "pp2": "ddp * pp2(1f1b, microbatches=4)",
    "ps": "ps(servers=1)",
    "local": "local(2)",
}
"""Column, and what it stands for."""

Cell = tuple[str, str]
"""A verdict, and the sentence of a refusal."""


def command(column: str, names: Iterable[str]) -> list[str]:
    """What runs these programs of one column, after `shoal`."""
    workers = "1" if column == "alone" else "2"
    return ["run", "--workers", workers, str(HERE / "suite.py"), STRATEGIES[column], ",,".join(names)]


def launches(column: str, names: Iterable[str]) -> list[list[str]]:
    """Programs that one launch runs one after the other. Servers serve one job, and a lone refusal ends a launch."""
    by_itself = [name for name in names if column == "ps" or column in PROGRAMS[name].alone_in]
    together = [name for name in names if name not in by_itself]
    return [[name] for name in by_itself] + ([together] if together else [])


def parse(out: str) -> dict[str, Cell]:
    """What the suite printed, by program. The sentence of a cell that converges has numbers, which are not kept."""
    found = {}
    for printed in out.splitlines():
        line = printed.lstrip(" |")  # the launcher sets off what a worker that failed has printed
        if line.startswith("{"):
            said = json.loads(line)
            verdict = said["verdict"]
            if found.get(said["program"], ("", ""))[0] == "refused":
                continue  # what the other rank saw of it
            found[said["program"]] = (verdict, "" if verdict in ("EQUAL", "CONVERGES") else said["sentence"])
    return found


def read_page() -> dict[tuple[str, str], Cell]:
    """Program and column -> cell."""
    text = PAGE.read_text()
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    cells = {}
    for line in text.splitlines():
        columns = [part.strip() for part in line.strip("|").split(" | ")]
        name = columns[0].removeprefix("| ").strip()
        if line.startswith("| ") and name in PROGRAMS:
            for column, cell in zip(STRATEGIES, columns[2:], strict=True):
                verdict, _, number = cell.partition(" ")
                cells[name, column] = (verdict, notes[number.strip("()")] if number else "")
    return cells


def write_page(cells: Mapping[tuple[str, str], Cell]) -> None:
    """The page between its markers."""
    sentences = list(dict.fromkeys(sentence for _, sentence in cells.values() if sentence))
    rows = [f"| program | what is special | {' | '.join(STRATEGIES)} |", "|---" * (2 + len(STRATEGIES)) + "|"]
    for name, program in PROGRAMS.items():
        marks = []
        for column in STRATEGIES:
            verdict, sentence = cells.get((name, column), ("?", ""))
            marks.append(f"{verdict} ({sentences.index(sentence) + 1})" if sentence else verdict)
        rows.append(f"| {name} | {program.says} | {' | '.join(marks)} |")
    notes = [f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)]
    made = "\n".join([*rows, "", "The sentences of the refusals:", "", *notes])
    before, _, rest = PAGE.read_text().partition("<!-- table -->\n")
    PAGE.write_text(f"{before}<!-- table -->\n{made}\n<!-- /table -->{rest.partition('<!-- /table -->')[2]}")


def main(names: list[str]) -> None:
    kept = read_page()
    cells = {key: cell for key, cell in kept.items() if key[0] not in names}
    for column in STRATEGIES:
        for some in launches(column, names):
            done = subprocess.run(
                [sys.executable, "-m", "shoal", *command(column, some)],
                capture_output=True,
                text=True,
                check=False,
            )
            found = parse(done.stdout + done.stderr)
            for name in some:
                said = (done.stderr.strip() or "nothing").splitlines()[-1]
                cells[name, column] = found.get(name, ("RAISED", said))
                print(f"{column:8} {name:28} {' '.join(cells[name, column])[:150]}", flush=True)
    write_page(cells)


if __name__ == "__main__":
    main(sys.argv[1].split(",,") if len(sys.argv) > 1 else list(PROGRAMS))
