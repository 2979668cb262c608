"""The keys of one job: who does not hold them can neither speak to its processes nor read what they say.

Two key pairs of CURVE (curve25519), new for each job. Whoever listens proves that he has the secret key of the server
pair, whoever connects that of the client pair. All processes of a job hold both; they trust each other.
"""

from __future__ import annotations

import os
import stat
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from shoal.errors import ConfigError

_FIRST = "shoal-keys-1"
_TEXT_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Both key pairs, as zmq writes them: 40 characters each. The secret ones show up in no `repr`."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def make(cls) -> JobKeys:
        """New keys."""
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def to_text(self) -> str:
        """One line without quotes or spaces inside its words; it holds the secrets."""
        keys = (self.server_public, self.server_secret, self.client_public, self.client_secret)
        return " ".join([_FIRST, *(key.decode() for key in keys)]) + "\n"

    @classmethod
    def from_text(cls, text: str, source: str = "this text") -> JobKeys:
        """The keys that `to_text` wrote. Refusals name the `source` and never what is in it."""
        first, *words = text.split() or [""]
        if first != _FIRST:
            raise ConfigError(f"{source} does not begin with '{_FIRST}'; have the job's keys written anew.")
        if len(words) != 4:
            raise ConfigError(
                f"{source} has {len(words)} keys instead of 4; have the job's keys written anew."
            )
        made = cls(*(word.encode() for word in words))
        pairs = {
            "server": (made.server_public, made.server_secret),
            "client": (made.client_public, made.client_secret),
        }
        for name, (public, secret) in pairs.items():
            if not _is_key(public) or not _is_key(secret) or zmq.curve_public(secret) != public:
                raise ConfigError(
                    f"{source}: the two {name} keys are not a pair; have the job's keys written anew."
                )
        return made

    def write(self, path: Path) -> None:
        """Write the keys to a file that only its owner can read, whole or not at all."""
        try:
            there = os.lstat(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(f"keys cannot be written to {path}: {error.strerror}.") from None
        else:
            _check_private(path, there)
        try:
            fd, draft = tempfile.mkstemp(dir=path.parent, prefix=".shoal-keys-")  # readable by its owner only
            try:
                with os.fdopen(fd, "w") as file:
                    file.write(self.to_text())
                # Whole or not at all: another process may read the file at this moment.
                os.replace(draft, path)
            except BaseException:
                os.unlink(draft)
                raise
        except OSError as error:
            raise ConfigError(f"keys cannot be written to {path}: {error.strerror}.") from None

    @classmethod
    def read(cls, path: Path) -> JobKeys:
        """The keys in a file, if only its owner can read it."""
        try:
            # Without O_NONBLOCK a pipe of that name would hold us up before it is refused.
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                _check_private(path, os.fstat(file.fileno()))
                data = file.read(_TEXT_LIMIT)
        except OSError as error:
            raise ConfigError(f"the keys in {path} cannot be read: {error.strerror}.") from None
        return cls.from_text(data.decode("ascii", "replace"), str(path))


def _is_key(key: bytes) -> bool:
    try:
        return len(key) == 40 and len(z85.decode(key)) == 32
    except (KeyError, struct.error):  # not of its alphabet; five characters for more than four bytes can hold
        return False


def _check_private(path: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(f"{path} is not a plain file; name another place for the keys.")
    # A file of another user could be changed by that one at any time.
    if facts.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to user {facts.st_uid}; keep the keys in a file of your own.")
    if facts.st_mode & 0o077:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(facts.st_mode):o} and others can read it; "
            f"do `chmod 600 {path}`, or have new keys written elsewhere if others may have seen them."
        )
