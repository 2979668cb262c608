"""Files behind a URL: whatever fsspec can open, such as S3, HDFS, or a mounted disk.

Credentials and endpoints come from where the file system itself looks for them; none of them are shown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from shoal.errors import ConfigError

T = TypeVar("T")

FINAL = (FileNotFoundError, PermissionError)
"""What does not become better by trying again."""


class FileSystem(Protocol):
    """What is used of a file system of fsspec."""

    def invalidate_cache(self) -> None: ...
    def ls(self, path: str, detail: bool) -> list[Any]: ...
    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes: ...
    def pipe_file(self, path: str, value: bytes) -> None: ...
    def put_file(self, local: str, remote: str) -> None: ...
    def get_file(self, remote: str, local: str) -> None: ...
    def mv(self, source: str, target: str) -> None: ...
    def rm(self, path: str, recursive: bool) -> None: ...
    def rm_file(self, path: str) -> None: ...
    def glob(self, path: str) -> list[object]: ...
    def find(self, path: str) -> list[object]: ...
    def info(self, path: str) -> dict[str, Any]: ...


def title_of(url: str) -> str:
    """A URL as it may be shown and compared: without passwords, and of a folder on a disk its full path.

    >>> title_of("s3://key:secret@bucket/runs/"), title_of("/tmp/runs")
    ('s3://bucket/runs', 'file:///tmp/runs')
    """
    return (hide(url) if "://" in url else Path(url).absolute().as_uri()).rstrip("/")


def open_url(url: str, title: str, shared: bool = False) -> tuple[FileSystem, str]:
    """The file system behind a URL, and the path there; `shared`: one for all of this process that ask for it."""
    try:
        from fsspec.core import url_to_fs

        if url.startswith("hdfs://"):
            return _open_hdfs(url)
        # An instance of our own: what is set on it below is not for others.
        files, path = url_to_fs(url, skip_instance_cache=not shared)
    except ImportError as error:
        raise ConfigError(
            f"{title} needs a package that is not here ({error}); "
            "for s3:// run pip install 'shoal[remote]', for hdfs:// pip install hdfs-native."
        ) from error
    except Exception as error:
        raise ConfigError(f"{title} cannot be opened ({reason(error)}); check the address.") from error
    if hasattr(files, "auto_mkdir"):  # disks want their folders made; object stores have none
        files.auto_mkdir = True
    return files, path


def _open_hdfs(url: str) -> tuple[FileSystem, str]:
    """HDFS without Hadoop: fsspec's own way there needs its libraries."""
    from hdfs_native.fsspec import HdfsFileSystem

    address = urlsplit(url)
    files: FileSystem = HdfsFileSystem(host=address.hostname, port=address.port, skip_instance_cache=True)
    return files, address.path


def try_again(action: Callable[[], T], waits: Sequence[float]) -> T:
    """What an action gives, tried once more after each wait; what does not become better that way is raised at once."""
    for wait in waits:
        try:
            return action()
        except FINAL:
            raise
        except Exception:  # each file system has errors of its own
            time.sleep(wait)
    return action()


def last_name(path: str) -> str:
    """The name of a file or folder without those above it."""
    return path.rstrip("/").rpartition("/")[2]


def hide(text: str) -> str:
    """Without what may be a password or a token.

    >>> hide("webhdfs://me:secret@host:9870/runs?delegation=token")
    'webhdfs://host:9870/runs'
    """
    return re.sub(r"(?<=://)[^/\s]*@|\?[^\s\"')]*", "", text)


def reason(error: Exception) -> str:
    """The first line of an error, without secrets."""
    text = str(error).strip().splitlines()
    return hide(text[0]) if text else type(error).__name__
