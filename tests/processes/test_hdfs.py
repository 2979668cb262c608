"""A store on HDFS: a real NameNode and DataNode, spoken to without Hadoop's own libraries."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hdfs_cluster import hdfs

from shoal.data import Store, flow
from shoal.data.store.build import BuildOptions
from shoal.data.store.places.open_place import open_place
from shoal.data.store.upkeep import collect, copy_store
from shoal.errors import ConfigError


@pytest.mark.all_only
@pytest.mark.timeout(600)
def test_a_store_on_hdfs(tmp_path: Path) -> None:
    pytest.importorskip("hdfs_native", reason="hdfs-native is not installed: scripts/setup spark")
    if shutil.which("java") is None:
        pytest.skip("no java here: scripts/services")
    draw = np.random.default_rng(0)
    made = pa.table(
        {"id": np.arange(5000), "x": draw.standard_normal(5000), "t": [[i, 1] for i in range(5000)]}
    )
    cluster = tmp_path / "cluster"
    cluster.mkdir()
    with hdfs(cluster) as url:
        there = f"{url}/stores/first"
        Store.write(there, made, options=BuildOptions(file_bytes=2**15))
        store = Store(there, cache=tmp_path / "cache")
        ids = np.array([4999, 0, 1234])
        assert store.batch(ids)["id"].tolist() == ids.tolist()
        assert store.batch(ids)["x"].tolist() == made["x"].to_numpy()[ids].tolist()
        assert store.verify() == []
        with flow.session() as data:
            kept = (
                data.rows(pa.Table.from_batches(store.record_batches())).limit(10).write(f"{url}/stores/ten")
            )
        assert len(kept) == 10
        with pytest.raises(ConfigError, match="there is a store at hdfs://"):
            Store.write(there, made)
        Store.write(there, made.slice(0, 9), options=BuildOptions(replace=True))
        assert collect(open_place(there, tmp_path), keep=1)[0] == [1]
        assert len(Store(there, cache=tmp_path / "cache")) == 9
        local = Store.write(tmp_path / "local", made, options=BuildOptions(file_bytes=2**12))
        for number in range(5):  # an upload that is killed counts for nothing, and goes on
            target = f"{url}/stores/copy-{number}"
            child = os.fork()
            if child == 0:
                os.execlp("shoal", "shoal", "data", "copy", str(tmp_path / "local"), target)
            time.sleep(3 + 0.5 * number)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            copy_store(open_place(tmp_path / "local"), open_place(target, tmp_path))
            assert Store(target, cache=tmp_path / "cache").manifest == local.manifest
