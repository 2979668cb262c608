"""Flows on DuckDB: what they compute, what they refuse, and what they keep. Spark: tests/processes/test_spark.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import shoal
from shoal.data import flow
from shoal.data.flow import Fitted, _, map_reduce
from shoal.data.flow.sessions import Session
from shoal.data.store.build import BuildOptions
from shoal.errors import ConfigError
from tests.unit.flow_job import events, prepare, users


@pytest.fixture
def data() -> Session:
    with flow.session(threads=2) as made:
        yield made


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "events").mkdir()
    pq.write_table(events(0, 700), tmp_path / "events" / "a.parquet")
    pq.write_table(events(700, 1000), tmp_path / "events" / "b.parquet")
    pq.write_table(users(), tmp_path / "users.parquet")
    return tmp_path


def by_hand() -> dict[tuple[str, str], list[float]]:
    """The flow of `prepare`, in plain Python."""
    ages = {row["user"]: row for row in users().to_pylist()}
    groups: dict[tuple[str, str], list[float]] = {}
    last: dict[int, float] = {}
    for row in sorted(events(0, 1000).to_pylist(), key=lambda row: (row["user"], row["id"])):
        if row["kind"] == "skip":
            continue
        delta = row["value"] - last[row["user"]] if row["user"] in last else 0.0
        last[row["user"]] = row["value"]
        user = ages.get(row["user"])
        if user is not None and user["age"] >= 18:
            group = groups.setdefault((user["country"], row["kind"]), [0, 0, 0.0, 0])
            group[0] += 1
            group[1] = max(group[1], row["value"] * 2 + 1)
            group[2] += delta
            group[3] += len(row["text"].split())
    return groups


def test_a_flow_computes_what_python_does(data: Session, inputs: Path) -> None:
    store = prepare(data, inputs).write(inputs / "store")
    wanted = by_hand()
    assert len(store) == len(wanted) > 5
    for sample in store:
        n, high, delta, words = wanted[sample["country"], sample["kind"]]
        assert (int(sample["n"]), int(sample["words"])) == (n, words)
        assert float(sample["high"]) == high
        assert float(sample["delta"]) == pytest.approx(delta, rel=1e-12)
    (entry,) = store.manifest.lineage
    assert [fact["bytes"] > 0 for fact in entry["inputs"]] == [True] * 3
    assert "def words_in" in entry["code"][0]


def test_equal_inputs_make_equal_bytes(inputs: Path) -> None:
    """On one thread: several add floats up in the order in which they come by."""
    names = []
    for number in range(2):
        with flow.session(threads=1) as data:
            store = prepare(data, inputs).write(inputs / f"store-{number}")
        names.append([file.name for file in store.manifest.files])
    assert names[0] == names[1]


LIMIT = 2


def cut_short(text: str) -> str:
    return text[:LIMIT]


def test_another_input_or_function_is_another_build(
    data: Session, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same is found built; what only looks the same is refused."""
    rows = data.rows(pa.table({"text": ["abcd", "efgh"]}))
    made = rows.map({"text": cut_short}).write(inputs / "short")
    assert rows.map({"text": cut_short}).write(inputs / "short").manifest == made.manifest
    monkeypatch.setattr(f"{__name__}.LIMIT", 3)
    with pytest.raises(ConfigError, match="there is a store at"):
        rows.map({"text": cut_short}).write(inputs / "short")
    monkeypatch.setattr(f"{__name__}.LIMIT", 2)
    other = data.rows(pa.table({"text": ["abcd", "xxxx"]}))
    with pytest.raises(ConfigError, match="there is a store at"):
        other.map({"text": cut_short}).write(inputs / "short")


def test_splits_are_by_key_and_samples_grow(data: Session, inputs: Path) -> None:
    rows = data.read(inputs / "events")
    parts = rows.split("user", {"train": 0.6, "valid": 0.2, "test": 0.2}, seed=1)
    found = {name: set(part.arrow()["user"].to_pylist()) for name, part in parts.items()}
    assert sorted(found["train"] | found["valid"] | found["test"]) == list(range(50))
    assert sum(map(len, found.values())) == 50
    assert 20 <= len(found["train"]) <= 40
    assert sum(part.count() for part in parts.values()) == 1000
    small, large = (set(rows.sample(share, "id").arrow()["id"].to_pylist()) for share in (0.1, 0.3))
    assert small < large
    assert 240 < len(large) < 360
    assert set(rows.order("value").sample(0.1, "id").arrow()["id"].to_pylist()) == small


def test_rows_keep_their_order_and_a_store_is_a_source(data: Session, inputs: Path) -> None:
    store = (
        data.read(inputs / "events")
        .filter(_.value > 0)
        .write(inputs / "kept", options=BuildOptions(file_bytes=4096))
    )
    assert len(store.manifest.files) > 3
    ids = store.tensor("id").tolist()
    assert ids == sorted(ids)
    assert data.read(inputs / "kept").count() == len(ids)
    query = f"select kind, count(*) as n from '{inputs}/events/*.parquet' group by kind order by kind"
    assert [row["n"] for row in data.sql(query).head()] == [
        events(0, 1000)["kind"].to_pylist().count(kind) for kind in ("buy", "skip", "view")
    ]


def test_map_reduce_with_a_combiner(data: Session, inputs: Path) -> None:
    rows = data.read(inputs / "events")
    wanted: dict[str, int] = {}
    for text in events(0, 1000)["text"].to_pylist():
        for word in text.split():
            wanted[word] = wanted.get(word, 0) + 1
    for combine in (None, lambda values: [sum(values)]):
        counted = map_reduce(
            rows,
            lambda row: [(word, 1) for word in row["text"].split()],
            lambda _key, values: sum(values),
            combine=combine,
        )
        assert {row["key"]: row["value"] for row in counted.arrow().to_pylist()} == wanted
    with pytest.raises(
        ConfigError, match=r"map_reduce failed: failing\(row=\{.*'id': 0,.*raised ZeroDivisionError"
    ):
        map_reduce(rows, failing, first_value)


def failing(row: dict[str, int]) -> list[tuple[str, int]]:
    return [("", row["id"] // 0)]


def first_value(key: str, values: list[int]) -> int:
    return values[0] + len(key)


def test_features_are_fitted_once_and_kept(data: Session, inputs: Path) -> None:
    parts = data.read(inputs / "events").split("user", {"train": 0.7, "test": 0.3})
    fitted = flow.fit(
        parts["train"],
        {
            "z": flow.standardise("value"),
            "bin": flow.bucketise("value", bins=4),
            "slot": flow.hashed("text", buckets=64),
            "word": flow.vocabulary("kind", size=2),
        },
    )
    values = np.array(parts["train"].arrow()["value"])
    state = fitted.states["z"]
    assert state["mean"] == pytest.approx(values.mean(), rel=1e-12)
    assert state["deviation"] == pytest.approx(values.std(), rel=1e-12)
    bins = np.bincount(fitted.transform(parts["train"]).arrow()["bin"])
    assert np.ptp(bins) <= 2
    store = fitted.transform(parts["test"]).write(inputs / "test")
    kept = Fitted.load(json.loads(json.dumps(store.manifest.features)))
    for sample in store:
        plain = {"value": float(sample["value"]), "text": sample["text"], "kind": sample["kind"]}
        made = kept.row(plain)
        assert made["z"] == pytest.approx(float(sample["z"]), rel=1e-12)
        assert [made[name] for name in ("bin", "slot", "word")] == [
            int(sample[name]) for name in ("bin", "slot", "word")
        ]
    assert {int(sample["word"]) for sample in store} == {0, 1, 2}


def half(value: float) -> float:
    if value > 0.99:
        raise ValueError("too much")
    return value / 2


def nameless(value):  # type: ignore[no-untyped-def]
    return value


def test_refusals_are_one_sentence(data: Session, inputs: Path) -> None:
    rows = data.read(inputs / "events")
    people = data.read(inputs / "users.parquet")
    refused = {
        r"there is no column 'knd'; did you mean 'kind'\?": lambda: rows.filter(_.knd == "a"),
        r"there is no column 'usr'": lambda: rows.join(people, "usr"),
        r"nothing is at .*none\.parquet": lambda: data.read(inputs / "none.parquet"),
        r"says nothing of its kind": lambda: data.read(__file__),
        r"the flow cannot do this \(unsupported operand": lambda: rows.map({"x": _.value + "a"}),
        r"function 'nameless' does not say what it gives": lambda: rows.map({"x": nameless}),
        r"function 'half' takes 'value', and there is no such column": lambda: people.map({"x": half}),
        r"the parts make 0\.9": lambda: rows.split("user", {"train": 0.5, "test": 0.4}),
        r"column 'value', which is float64; a key is": lambda: rows.sample(0.5, "value"),
        r"and the flow expects string": lambda: data.read(inputs / "events", schema={"user": "string"}),
        r"engine='dask'": lambda: flow.session("dask"),
        r"the query failed: .*nope": lambda: data.sql(f"select nope from '{inputs}/users.parquet'"),
        r"the flow failed: half\(value=0\.99\d+\) raised ValueError: too much": lambda: rows.map(
            {"h": half}
        ).write(inputs / "out"),
        r"there are no rows to write": lambda: rows.filter(_.value > 9).write(inputs / "out"),
        r"the join wants unique keys, and \d+ rows have user=\d+": lambda: people.join(
            rows, "user", unique=True
        ).write(inputs / "out"),
        r"column 'user' is string in .*c\.parquet and int64 in": lambda: mixed(data, inputs),
    }
    for sentence, call in refused.items():
        with pytest.raises(ConfigError, match=sentence) as error:
            pytest.fail(f"{sentence}: {call()}")
        assert "\n" not in str(error.value)
    assert not (inputs / "out").exists()


def mixed(data: Session, inputs: Path) -> None:
    pq.write_table(pa.table({"id": [1], "user": ["x"]}), inputs / "events" / "c.parquet")
    data.read(inputs / "events")


def test_a_file_that_vanishes_is_a_sentence(data: Session, inputs: Path) -> None:
    rows = data.read(inputs / "events")
    (inputs / "events" / "b.parquet").unlink()
    with pytest.raises(ConfigError, match=r"the flow failed: .*b\.parquet"):
        rows.write(inputs / "out")
    assert not (inputs / "out").exists()


def test_csv_and_json_lines(data: Session, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,name\n1,ann\n2,bob\n")
    (tmp_path / "a.jsonl").write_text('{"id": 1, "score": 0.5}\n{"id": 2, "score": 1.5}\n')
    both = data.read(tmp_path / "a.csv").join(data.read(tmp_path / "a.jsonl"), "id")
    assert both.order("id").head() == [
        {"id": 1, "name": "ann", "score": 0.5},
        {"id": 2, "name": "bob", "score": 1.5},
    ]
    left = data.read(tmp_path / "a.csv").join(
        data.read(tmp_path / "a.jsonl").filter(_.id == 2), "id", how="outer"
    )
    assert left.order("id").head()[0] == {"id": 1, "name": "ann", "score": None}


def test_what_is_missing_is_so_in_training_and_in_serving(data: Session) -> None:
    """Null, NaN and the empty text are three things, and a single row in Python sees what a flow sees."""
    table = pa.table({"x": [1.0, None, float("nan"), 4.0, 5.0], "word": ["a", None, "", "", "b"]})
    rows = data.rows(table)
    features = {
        "z": flow.standardise("x"),
        "bin": flow.bucketise("x", 3),
        "id": flow.vocabulary("word"),
        "hash": flow.hashed("word", 1000),
    }
    fitted = flow.fit(rows, features)
    assert fitted.states["z"]["mean"] == pytest.approx(10 / 3)
    found = fitted.transform(rows).head()
    assert [row["z"] is None for row in found] == [False, True, True, False, False]
    assert [row["bin"] for row in found] == [0, None, None, 1, 2]
    assert [row["id"] for row in found] == [2, 0, 1, 1, 3]
    for made, given in zip(found, table.to_pylist(), strict=True):
        served = fitted.row(given)
        for name in features:
            assert made[name] == (pytest.approx(served[name]) if name == "z" else served[name])


def test_values_that_do_not_fit_are_a_sentence(data: Session, tmp_path: Path) -> None:
    rows = data.rows(pa.table({"x": [2**62, 2**62, 2**62], "k": [1, 2, 3]}))
    assert rows.group((), {"n": _.count()}).head() == [{"n": 3}]
    with pytest.raises(ConfigError, match="Integer value out of bounds"):
        rows.group((), {"sum": _.x.sum()}).arrow()
    with pytest.raises(ConfigError, match=r"join\(how='sideways'\); it is inner, left"):
        rows.join(rows, "k", how="sideways")
    (tmp_path / "short.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(ConfigError, match="begins with 'a,b', and its lines do not all have as many values"):
        data.read(tmp_path / "short.csv")


def test_a_checkpoint_keeps_the_features_it_was_trained_on(
    data: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(folder: str, numbers: list[float]) -> None:
        rows = data.rows(pa.table({"x": numbers}))
        fitted = flow.fit(rows, {"z": flow.standardise("x")})
        store = fitted.transform(rows).select("z").write(tmp_path / folder)
        run = shoal.Run(
            model=lambda: torch.nn.Linear(1, 1),
            loss=lambda output, _: (output.sum(), len(output)),
            inputs=lambda batch: batch["z"].float()[:, None],
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=store,
            global_batch=2,
            strategy="solo",
            checkpoint=str(tmp_path / "runs"),
            checkpoint_every=2,
            progress=False,
        )
        assert list(run.steps("2ep")) or folder == "again"

    train("first", [1.0, 2.0, 3.0, 6.0])
    fitted = Fitted.of_checkpoint(tmp_path / "runs" / "step-4")
    assert fitted.row({"x": 3.0})["z"] == 0.0
    assert "was fitted in another way" not in capsys.readouterr().err
    train("again", [1.0, 2.0, 3.0, 8.0])
    assert (
        "feature 'z' of data= was fitted in another way than what the checkpoint" in capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match="is no manifest of a checkpoint"):
        Fitted.of_checkpoint(tmp_path)
