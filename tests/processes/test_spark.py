"""The flow of tests/unit/test_flow.py on Spark: the same rows, from the same lines. Spark and Hive run for real."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from shoal.data import Store
from tests.unit.flow_job import events, users

ROOT = Path(__file__).parents[2]

JOB = """
import json, sys
from pathlib import Path
from shoal.data import flow
from shoal.data.flow import _, map_reduce
from shoal.errors import ConfigError
from tests.unit.flow_job import prepare

def words(row):
    return [(word, 1) for word in row["text"].split()]

def total(key, values):
    return sum(values)

def half(value: float) -> float:
    if value > 0.99:
        raise ValueError("too much")
    return value / 2

inputs, engine = Path(sys.argv[1]), sys.argv[2]
hive = None if engine == "duckdb" else str(inputs / "hive")
with flow.session(engine, memory="1GB", hive=hive) as data:
    rows = data.read(inputs / "events")
    prepare(data, inputs).write(inputs / engine)
    map_reduce(rows, words, total, combine=lambda values: [sum(values)]).write(inputs / f"{engine}-words")
    parts = rows.split("user", {"train": 0.7, "test": 0.3})
    fitted = flow.fit(parts["train"], {
        "z": flow.standardise("value"), "bin": flow.bucketise("value", bins=4),
        "slot": flow.hashed("text", buckets=64), "word": flow.vocabulary("kind")})
    fitted.transform(parts["test"]).write(inputs / f"{engine}-test", order="id")
    said = ""
    try:
        rows.map({"h": half}).write(inputs / "none")
    except ConfigError as error:
        said = str(error)
    found = []
    if hive:
        view = data.read(inputs / "users.parquet").table.get_name()
        data.engine._session.sql(f"create table people stored as parquet as select * from {view} where age > 50")
        found = data.read("hive://default.people").order("user").head(100)
    counted = data.sql(f"select kind, count(*) as n from '{inputs}/users.parquet' u join '{inputs}/events' e "
                       "on u.user = e.user group by kind order by kind").head()
    print(json.dumps({"said": said, "hive": found, "counted": counted, "features": fitted.states}))
"""


def run(inputs: Path, engine: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(inputs), engine],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.all_only
@pytest.mark.timeout(600)
def test_a_flow_on_spark_gives_the_rows_of_duckdb(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="PySpark is not installed: scripts/setup spark")
    if shutil.which("java") is None:
        pytest.skip("no java here: scripts/services")
    (tmp_path / "events").mkdir()
    pq.write_table(events(0, 700), tmp_path / "events" / "a.parquet")
    pq.write_table(events(700, 1000), tmp_path / "events" / "b.parquet")
    pq.write_table(users(), tmp_path / "users.parquet")
    said = {engine: run(tmp_path, engine) for engine in ("duckdb", "local[2]")}
    for suffix in ("", "-words", "-test"):
        one, other = (Store(tmp_path / f"{engine}{suffix}") for engine in said)
        assert one.manifest.columns == other.manifest.columns
        assert len(one) == len(other) > 3
        for mine, theirs in zip(one, other, strict=True):
            for name, value in mine.items():
                if one.manifest.columns[name] == "double":
                    assert float(value) == pytest.approx(float(theirs[name]), rel=1e-12, abs=1e-15)
                else:
                    assert value == theirs[name], name
    first, second = said.values()
    assert first["counted"] == second["counted"]
    assert "half(value=0.99" in str(first["said"])
    assert "half(value=0.99" in str(second["said"])
    assert "\n" not in str(second["said"])
    assert (tmp_path / "hive" / "metastore").is_dir()
    assert second["hive"] == [row for row in users().to_pylist() if row["age"] > 50]
    assert first["features"]["word"] == second["features"]["word"]  # type: ignore[index]
    assert first["features"]["bin"] == second["features"]["bin"]  # type: ignore[index]
