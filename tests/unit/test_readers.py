"""Data sets of other formats as sources of a flow: the same rows come out."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shoal.data import Store, flow
from shoal.data.readers import TABLE
from shoal.errors import ConfigError

COUNT = 1200
ROWS = [{"n": i, "text": f"row {i} é", "raw": bytes([i % 256]) * (i % 4), "x": i / 2} for i in range(COUNT)]


def write_hf(folder: Path) -> None:
    """As `datasets.Dataset.save_to_disk`: Arrow streams, and what they are called."""
    folder.mkdir()
    table = pa.Table.from_pylist(ROWS)
    names = []
    for number, start in enumerate((0, 500)):
        part = table.slice(start, (500, COUNT)[number])
        names.append({"filename": f"data-{number:05}-of-00002.arrow"})
        with (
            pa.OSFile(str(folder / names[-1]["filename"]), "wb") as out,
            pa.ipc.new_stream(out, part.schema) as w,
        ):
            w.write_table(part, max_chunksize=300)
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_indices_files": None}))
    (folder / "dataset_info.json").write_text("{}")


def write_mds(folder: Path) -> None:
    """As `streaming.MDSWriter`: samples behind a table of offsets."""
    folder.mkdir()
    names, encodings, sizes = (
        ["n", "raw", "text", "x"],
        ["int", "bytes", "str", "float64"],
        [8, None, None, 8],
    )
    samples = []
    for row in ROWS:
        raw, text = row["raw"], str(row["text"]).encode()
        varied = np.array([len(raw), len(text)], np.uint32).tobytes()
        samples.append(
            varied + np.int64(row["n"]).tobytes() + raw + text + np.float64(row["x"]).tobytes()  # type: ignore[operator]
        )
    head = 4 + 4 * (COUNT + 1)
    offsets = head + np.cumsum([0, *map(len, samples)])
    text = np.uint32(COUNT).tobytes() + offsets.astype(np.uint32).tobytes() + b"".join(samples)
    (folder / "shard.00000.mds").write_bytes(text)
    shard = {
        "format": "mds",
        "column_names": names,
        "column_encodings": encodings,
        "column_sizes": sizes,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(text), "hashes": {}},
        "samples": COUNT,
        "zip_data": None,
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


def write_tar(path: Path, rows: list[dict[str, object]]) -> None:
    with tarfile.open(path, "w") as archive:
        for row in rows:
            for ending, value in (("cls", str(row["n"])), ("txt", row["text"]), ("bin", row["raw"])):
                content = value if isinstance(value, bytes) else str(value).encode()
                member = tarfile.TarInfo(f"part/{row['n']:06}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def test_every_reader_gives_the_rows_that_were_written(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf")
    write_mds(tmp_path / "mds")
    write_tar(tmp_path / "a.tar", ROWS[:700])
    write_tar(tmp_path / "b.tar", ROWS[700:])
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy" / "n.npy", np.arange(COUNT))
    np.save(tmp_path / "npy" / "image.npy", np.arange(COUNT * 6, dtype="f4").reshape(COUNT, 2, 3))
    found = {}
    with flow.session(threads=1) as data:
        for name, url in (("hf", "hf"), ("mds", "mds"), ("webdataset", "*.tar"), ("npy", "npy")):
            rows = data.read(tmp_path / url)
            found[name] = rows.write(tmp_path / "stores" / name) if name != "npy" else rows.arrow()
            assert name in TABLE
    for name in ("hf", "mds"):
        assert [{key: row[key] for key in ROWS[0]} for row in pylist(found[name])] == ROWS
        assert len(found[name].manifest.lineage[0]["inputs"]) == (2 if name == "hf" else 1)
    members = [
        {"n": row["cls"], "text": row["txt"], "raw": row["bin"]} for row in pylist(found["webdataset"])
    ]
    assert members == [{key: row[key] for key in ("n", "text", "raw")} for row in ROWS]
    assert found["npy"]["n"].to_pylist() == list(range(COUNT))
    images = np.array(found["npy"]["image"].to_pylist()).reshape(COUNT, 2, 3)
    assert (images == np.arange(COUNT * 6).reshape(COUNT, 2, 3)).all()


def pylist(store: Store) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pa.Table.from_batches(store.record_batches()).to_pylist()
    return rows


def test_what_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds")
    index = tmp_path / "mds" / "index.json"
    body = json.loads(index.read_text())
    (tmp_path / "bad.tar").write_bytes(b"no tar at all")
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object))
    (tmp_path / "two").mkdir()
    np.save(tmp_path / "two" / "a.npy", np.zeros(3))
    np.save(tmp_path / "two" / "b.npy", np.zeros(4))
    body["shards"][0]["column_encodings"][1] = "pkl"
    index.write_text(json.dumps(body))
    with flow.session() as data:
        for url, sentence in (
            ("mds", "column 'raw' .* is encoded as pkl, which is not read here"),
            ("bad.tar", "is no whole tar file"),
            ("object.npy", "cannot be read as numpy arrays"),
            ("two", "have unequal lengths"),
            ("none.tar", "nothing is at"),
        ):
            with pytest.raises(ConfigError, match=sentence):
                data.read(tmp_path / url)
        body["shards"][0]["raw_data"]["basename"] = "../outside"
        index.write_text(json.dumps(body))
        with pytest.raises(ConfigError, match="names no shards of its folder"):
            data.read(tmp_path / "mds")
