"""Kubernetes.

When to use: the cluster has it. Kueue, if it is there, lets all pods of a job start at once or none.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from shoal.errors import ConfigError
from shoal.jobs.engine import Engine, JobState
from shoal.jobs.job import JobSpec, script_of
from shoal.jobs.k8s import kubectl
from shoal.jobs.k8s.manifest import as_yaml, kind_of, manifest_of, name_of
from shoal.jobs.k8s.options import parse

_ELASTIC = "pods start all or none, so give one number"


@dataclass(frozen=True)
class Kubernetes(Engine):
    """A Job, a JobSet or a TrainJob, created with `kubectl`."""

    summary = "Kubernetes: a Job, a JobSet on several hosts, or a TrainJob; with Kueue's queues."
    cannot: ClassVar[Mapping[str, str]] = {
        "priority": "its priorities are classes of the cluster, --engine priority_class=NAME",
        "after": "its jobs do not wait for each other",
        "preemptible": "that is a matter of its priority classes",
        "reservation": "what is set aside is a queue of Kueue's, --engine queue=NAME",
        "account": "shares are those of namespaces and queues, --engine namespace=NAME",
        "least": _ELASTIC,
    }

    def refuse(self, spec: JobSpec) -> None:
        """Options that Kubernetes does not take, and files that are on this machine only."""
        kind_of(spec, parse(spec.engine))
        script = script_of(spec)
        if os.path.isabs(script) and script.startswith(os.path.expanduser("~")):
            raise ConfigError(
                f"{script} is a path of this machine; give the script's path in the image, such as train.py in its "
                "working folder."
            )

    def describe(self, spec: JobSpec) -> str:
        """The manifest, as YAML."""
        return as_yaml(manifest_of(name_of(spec), spec, parse(spec.engine))).rstrip()

    def submit(self, spec: JobSpec) -> str:
        """A new object of a name that nobody else has."""
        options = parse(spec.engine)
        name = name_of(spec, secrets.token_hex(3))
        kubectl.create(manifest_of(name, spec, options))
        return f"{kind_of(spec, options)}/{options.namespace}/{name}"

    def jobs(self) -> list[JobState]:
        """Those with Shoal's label, in all namespaces."""
        return kubectl.states()

    def logs(self, job: str, follow: bool) -> Iterator[str]:
        """Of all pods."""
        return kubectl.output(job, follow)

    def cancel(self, job: str) -> None:
        """Deletes the object: the pods' runs save and end."""
        kubectl.delete(job)
