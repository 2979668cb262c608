"""One NameNode and one DataNode of HDFS 2.7 on loopback, from the jars inside PyPI's pyspark 2.4.8 source package."""

from __future__ import annotations

import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

JARS = Path(sys.prefix) / "hdfs-jars"
"""Fetched once: 220 MB."""
_OPENED = """
java.base/java.lang java.base/java.nio java.base/sun.nio.ch java.base/java.util java.base/java.net
java.base/java.lang.reflect java.base/java.util.concurrent java.base/sun.security.util
java.security.jgss/sun.security.krb5
"""
_NODE = "org.apache.hadoop.hdfs.server"


def fetch_jars(folder: Path) -> None:
    """Into the virtual environment, by the name of a package."""
    if any(JARS.glob("hadoop-hdfs-2*.jar")):
        return
    command = [
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(folder),
        "pyspark==2.4.8",
    ]
    subprocess.run(
        [sys.executable, *command], capture_output=True, check=False
    )  # it cannot be built, and need not
    JARS.mkdir(exist_ok=True)
    with tarfile.open(next(folder.glob("pyspark-2.4.8.tar.gz"))) as archive:
        for entry in archive:
            if entry.isfile() and "/deps/jars/" in entry.name:
                entry.name = Path(entry.name).name
                archive.extract(entry, JARS, filter="data")


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write(path: Path, values: dict[str, str]) -> None:
    lines = [
        f"<property><name>{name}</name><value>{value}</value></property>" for name, value in values.items()
    ]
    path.write_text(f"<configuration>{''.join(lines)}</configuration>")


@contextmanager
def hdfs(folder: Path) -> Iterator[str]:
    """The URL of a cluster of its own."""
    fetch_jars(folder)
    ports = [_free_port() for _ in range(5)]
    url = f"hdfs://127.0.0.1:{ports[0]}"
    conf = folder / "conf"
    for name in ("hdfs", "datanode", "static"):
        (conf / "webapps" / name).mkdir(parents=True)
    _write(conf / "core-site.xml", {"fs.defaultFS": url, "hadoop.tmp.dir": str(folder / "tmp")})
    _write(
        conf / "hdfs-site.xml",
        {
            "dfs.replication": "1",
            "dfs.permissions.enabled": "false",
            "dfs.namenode.name.dir": f"file://{folder}/name",
            "dfs.datanode.data.dir": f"file://{folder}/data",
            "dfs.namenode.http-address": f"127.0.0.1:{ports[1]}",
            "dfs.namenode.rpc-bind-host": "127.0.0.1",
            "dfs.datanode.address": f"127.0.0.1:{ports[2]}",
            "dfs.datanode.http.address": f"127.0.0.1:{ports[3]}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{ports[4]}",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.namenode.safemode.extension": "0",
            "dfs.heartbeat.interval": "1",
            "dfs.webhdfs.enabled": "false",
            "dfs.namenode.fs-limits.min-block-size": "1024",
        },
    )
    (conf / "log4j.properties").write_text(
        "log4j.rootLogger=INFO,console\nlog4j.appender.console=org.apache.log4j.ConsoleAppender\n"
        "log4j.appender.console.layout=org.apache.log4j.PatternLayout\n"
        "log4j.appender.console.layout.ConversionPattern=%p %c{1}: %m%n\n"
    )
    java = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-Djava.net.preferIPv4Stack=true", "-XX:-UsePerfData"]
    java += [f"--add-opens={name}=ALL-UNNAMED" for name in _OPENED.split()]
    java += ["-cp", f"{conf}:{JARS}/*"]
    formatting = [*java, f"{_NODE}.namenode.NameNode", "-format", "-nonInteractive", "-force"]
    subprocess.run(formatting, check=True, capture_output=True)
    log = folder / "namenode.log"
    nodes = []
    try:
        for name, out in (("namenode.NameNode", log), ("datanode.DataNode", folder / "datanode.log")):
            with open(out, "wb") as file:
                nodes.append(subprocess.Popen([*java, f"{_NODE}.{name}"], stdout=file, stderr=file))
        deadline = time.monotonic() + 180
        while "registerDatanode: from" not in log.read_text(errors="replace"):
            assert all(node.poll() is None for node in nodes), log.read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline, "no DataNode has come"
            time.sleep(0.2)
        yield url
    finally:
        for node in nodes:
            node.kill()
            node.wait()
