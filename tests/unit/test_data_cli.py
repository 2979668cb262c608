"""`shoal data`, as it is typed: what it prints, what it leaves on the disk, how it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.cli import main as cli
from shoal.data import Store

Data = Callable[..., tuple[int, str, str]]

SCRIPT = """
from shoal.data.flow import _

def long_enough(name: str) -> bool:
    return len(name) > 1

def build(data):
    return data.read("in/*.parquet").filter(long_enough).split("id", {"train": 0.8, "test": 0.2})
"""


@pytest.fixture
def data(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Data:
    """`shoal data ...` in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "in").mkdir()
    pq.write_table(rows(0, 300), "in/a.parquet")

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shoal", "data", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def rows(start: int, stop: int, shift: float = 0.0) -> pa.Table:
    draw = np.random.default_rng(start)
    return pa.table(
        {
            "id": np.arange(start, stop),
            "value": draw.standard_normal(stop - start) + shift,
            "name": [f"name {i % 3}" for i in range(start, stop)],
            "x": [[float(i), 1.0] for i in range(start, stop)],
        }
    )


def test_a_store_through_its_life(data: Data, tmp_path: Path) -> None:
    code, out, _ = data("build", "in", "store", "--shape", "x=2", "--file-mb", "1")
    assert (code, out[:32]) == (0, "store: version 1, 300 rows, 13.2"[:32].replace("13.2", out[28:32]))
    assert Store("store")[5]["x"].tolist() == [5.0, 1.0]
    assert data("build", "in", "store", "--shape", "x=2", "--file-mb", "1")[0] == 0  # the same: it is there
    assert data("build", "in", "store")[0] == 2
    code, out, _ = data(
        "sql", "select name, count(*) as n from 'store' group by name order by name", "--limit", "2"
    )
    assert out.splitlines()[:2] == ["name    n", "name 0  100"]
    assert "the first 2 rows" in out
    pq.write_table(rows(300, 900, shift=2.0), "more.parquet")
    assert data("build", "more.parquet", "store", "--append", "--shape", "x=2")[0] == 0
    code, out, _ = data("ls", ".")
    assert code == 0
    assert out.splitlines()[1].split()[:4] == ["store", "2", "900", "2"]
    out = data("show", "store")[1]
    assert "version 2  900 rows, duckdb" in out
    assert "fixed_size_list" in out
    assert data("head", "store", "--rows", "2")[1].splitlines()[2].split()[0] == "1"
    code, out, _ = data("diff", "store")
    assert code == 1
    assert "DRIFT    value: stability index" in out
    assert "name:" not in out
    code, out, _ = data("stats", "store", "--png", "drawn.png")
    assert code == 0
    assert "name 0" in out
    assert (tmp_path / "drawn.png").read_bytes()[:4] == b"\x89PNG"
    assert data("verify", "store")[0] == 0
    assert data("copy", "store", "copy")[0] == 0
    assert Store("copy").manifest == Store("store").manifest
    assert data("copy", "store", "copy")[0] == 0
    code, out, _ = data("gc", "store", "--keep", "1", "--yes")
    assert "removed 1 versions and 0 files" in out
    file = next((tmp_path / "copy" / "data").iterdir())
    text = file.read_bytes()
    file.write_bytes(text[:-9] + b"\0" + text[-8:])
    code, out, _ = data("verify", "copy")
    assert code == 1
    assert f"{file.name} is damaged in bytes 0 to" in out
    code, _, err = data("copy", "copy", "third")
    assert code == 2
    assert "is damaged in bytes" in err
    assert not (tmp_path / "third" / "v00002.json").exists()


def test_a_script_and_its_mistakes(data: Data, tmp_path: Path) -> None:
    script = tmp_path / "prepare.py"
    script.write_text(SCRIPT)
    code, out, err = data("build", "prepare.py", "parts")
    assert (code, err) == (0, "")
    assert [line.partition(":")[0] for line in out.splitlines()] == ["parts/train", "parts/test"]
    assert len(Store("parts/train")) + len(Store("parts/test")) == 300
    for text, sentence in (
        ("x = 1", "has no function build(data)"),
        ("def build(data): return 3", "gave int; it gives a flow"),
        (SCRIPT.replace("in/*", "on/*"), "nothing is at on/*.parquet"),
        (SCRIPT.replace("len(name)", "len(name) / 0"), "raised ZeroDivisionError: division by zero"),
        (SCRIPT.replace("name: str", "nam: str"), "there is no such column; did you mean 'name'?"),
    ):
        script.write_text(text)
        code, _, err = data("build", "prepare.py", "other")
        assert code == 2
        assert err.startswith("shoal: ")
        assert sentence in err
        assert err.count("\n") == 1
        assert not (tmp_path / "other").exists()
    for command, sentence in (
        (("build", "none.parquet", "other"), "nothing is at none.parquet"),
        (("build", "in", "other", "--shape", "x"), "give a column and its sizes"),
        (("build", "in", "other", "--engine", "dask"), "engine='dask'"),
        (("ls", "in"), "there is no store at in"),
        (("diff", "parts/train"), "has one version; name another store"),
        (("sql", "selec 1"), "the query failed"),
        (("show", "in"), "there is no store at in"),
    ):
        code, _, err = data(*command)
        assert code == 2, command
        assert sentence in err
        assert err.count("\n") == 1
