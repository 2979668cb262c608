"""What only Kubernetes has to know of a job: `--engine KEY=VALUE`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from shoal.errors import ConfigError
from shoal.table import did_you_mean

KINDS = ("job", "jobset", "trainjob")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
"""A name as Kubernetes takes it (RFC 1123)."""


@dataclass(frozen=True)
class Options:
    """Where and how the pods of a job run.

    >>> parse(["image=registry.local/train:1", "queue=team"]).queue
    'team'
    """

    image: str
    """With Shoal, the script and its data's paths in it."""
    kind: str = ""
    """Of KINDS; a job on one host, a jobset on several."""
    namespace: str = "default"
    queue: str = ""
    """A LocalQueue of Kueue: it lets all pods start at once or none, by quota and priority."""
    priority_class: str = ""
    """A WorkloadPriorityClass with a queue, else a PriorityClass; both are the cluster's."""
    claim: str = ""
    """A PersistentVolumeClaim for checkpoints and logs, mounted at /runs; several hosts need ReadWriteMany."""
    secret: str = ""
    """A Secret whose keys become environment variables, such as those of S3."""
    run: str = ""
    """The folder of the run's log, as /runs/first: a pod is ready when its ranks train."""
    user: str = "1000"
    """The number of the user that pods run as."""
    runtime: str = "torch-distributed"
    """Of a trainjob: the ClusterTrainingRuntime."""
    gpu: str = "nvidia.com/gpu"
    """What the cluster calls a device."""


def parse(given: Sequence[str]) -> Options:
    """Read and check `--engine KEY=VALUE`."""
    known = [field.name for field in fields(Options)]
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not value:
            raise ConfigError(f"--engine {text}: write KEY=VALUE, such as image=registry.local/train:1.")
        if key not in known:
            raise ConfigError(f"--engine {text}: k8s has no option {key!r}{did_you_mean(key, known)}")
        found[key] = value
    if "image" not in found:
        raise ConfigError(
            "--on k8s needs an image with Shoal and the script in it: --engine image=registry.local/train:1 (see "
            "docker/Dockerfile)."
        )
    options = Options(**found)
    _check(options)
    return options


def _check(options: Options) -> None:
    for key in ("namespace", "queue", "priority_class", "claim", "secret", "runtime"):
        value = getattr(options, key)
        if value and not all(_LABEL.match(part) for part in value.split(".")):
            raise ConfigError(
                f"--engine {key}={value}: Kubernetes takes small letters, digits and - in a name, as team-a."
            )
    if options.kind and options.kind not in KINDS:
        raise ConfigError(
            f"--engine kind={options.kind}: it is one of {', '.join(KINDS)}{did_you_mean(options.kind, KINDS)}"
        )
    if not options.user.isdigit() or int(options.user) == 0:
        raise ConfigError(
            f"--engine user={options.user}: give the number of a user that is not root, as 1000."
        )
    if options.run and not options.run.startswith("/"):
        raise ConfigError(
            f"--engine run={options.run}: give the whole path in the container, as /runs/first."
        )
