"""From a job to what Kubernetes is given: plain dicts, in the order in which a person reads them.

One host is a Job. Several are a JobSet, whose pods all start or all start again; pod 0 is where the others meet it. A
TrainJob leaves the pods to a runtime that the cluster's people have set up.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace

from shoal.errors import ConfigError
from shoal.jobs.job import JobSpec
from shoal.jobs.k8s.options import Options

Manifest = dict[str, object]
PORT = 29400
MANAGED = "app.kubernetes.io/managed-by"
GRACE_SECONDS = 120
"""Between SIGTERM and SIGKILL: a step is finished and saved in it."""
NEVER_AGAIN = 2
"""The exit code of what cannot work."""
_LONGEST = 40
"""Kubernetes adds to a job's name to make that of a pod, which may have 63 letters."""


def manifest_of(name: str, spec: JobSpec, options: Options) -> Manifest:
    """The one object that is created."""
    kind = kind_of(spec, options)
    if kind == "job":
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": _metadata(name, options),
            "spec": {**_suspended(options), **_job(name, spec, options)},
        }
    return _jobset(name, spec, options) if kind == "jobset" else _trainjob(name, spec, options)


def kind_of(spec: JobSpec, options: Options) -> str:
    """Of KINDS: what was asked for, or what fits the number of hosts."""
    kind = options.kind or ("job" if spec.hosts == 1 else "jobset")
    if kind == "job" and spec.hosts > 1:
        raise ConfigError(
            f"--engine kind=job: the pods of a Job on {spec.hosts} hosts have no addresses to meet at; use kind=jobset."
        )
    asked = [key for key in ("claim", "secret", "run") if getattr(options, key)]
    asked += ["--time"] * (spec.seconds is not None) + ["--retries"] * (spec.retries > 0)
    if kind == "trainjob" and asked:
        raise ConfigError(
            f"--engine kind=trainjob: its runtime {options.runtime} says what pods are like, so {' and '.join(asked)} "
            "cannot be asked for; leave it out, or use kind=jobset."
        )
    return kind


def name_of(spec: JobSpec, suffix: str = "") -> str:
    """A name that Kubernetes takes, from the job's.

    >>> name_of(JobSpec(("train.py",), name="Big_Model v2"), "3f09aa")
    'big-model-v2-3f09aa'
    """
    plain = re.sub(r"[^a-z0-9]+", "-", (spec.name or "shoal").lower()).strip("-")
    short = plain[: _LONGEST - len(suffix) - 1].rstrip("-") or "shoal"
    return f"{short}-{suffix}" if suffix else short


def as_yaml(manifest: Manifest) -> str:
    """As a person reads it and as `kubectl` takes it."""
    try:
        import yaml
    except ImportError:
        raise ConfigError("--on k8s writes YAML with PyYAML; pip install shoal[k8s].") from None
    text: str = yaml.safe_dump(manifest, sort_keys=False, width=110)
    return text


def _metadata(name: str, options: Options) -> Manifest:
    labels = {MANAGED: "shoal"}
    if options.queue:
        labels["kueue.x-k8s.io/queue-name"] = options.queue
        if options.priority_class:
            labels["kueue.x-k8s.io/priority-class"] = options.priority_class
    return {"name": name, "namespace": options.namespace, "labels": labels}


def _suspended(options: Options) -> Manifest:
    # Kueue wakes a job when there is room for all of it; without Kueue nobody would.
    return {"suspend": True} if options.queue else {}


def _jobset(name: str, spec: JobSpec, options: Options) -> Manifest:
    # A launcher starts lost workers again by itself. Pods that are gone are made up for here: all start again, and the
    # run goes on from its newest checkpoint. What cannot work is not tried again.
    policy: Manifest = {
        "maxRestarts": spec.retries,
        "rules": [
            {"name": "cannotwork", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        ],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(name, options),
        "spec": {
            **_suspended(options),
            "failurePolicy": policy,
            # Workers look for pod 0 before anybody is ready.
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {
                    "name": "hosts",
                    "replicas": 1,
                    "template": {"spec": _job(name, replace(spec, retries=0), options)},
                }
            ],
        },
    }


def _job(name: str, spec: JobSpec, options: Options) -> Manifest:
    limit = {} if spec.seconds is None else {"activeDeadlineSeconds": max(1, round(spec.seconds))}
    rules = [
        # A pod that the cluster takes away is no failure of the program's.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "shoal", "operator": "In", "values": [NEVER_AGAIN]},
        },
    ]
    return {
        "completionMode": "Indexed",
        "completions": spec.hosts,
        "parallelism": spec.hosts,
        "backoffLimit": spec.retries,
        **limit,
        "podFailurePolicy": {"rules": rules},
        "template": {
            "metadata": {"labels": {MANAGED: "shoal"}},
            "spec": _pod(name, spec, options),
        },
    }


def _pod(name: str, spec: JobSpec, options: Options) -> Manifest:
    class_ = (
        {"priorityClassName": options.priority_class} if options.priority_class and not options.queue else {}
    )
    memory = {"emptyDir": {"medium": "Memory"}}
    volumes: list[Manifest] = [{"name": "shm", **memory}, {"name": "tmp", "emptyDir": {}}]
    if options.claim:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}})
    return {
        "restartPolicy": "Never",
        **class_,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": int(options.user),
            "fsGroup": int(options.user),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(name, spec, options)],
        "volumes": volumes,
    }


def _container(name: str, spec: JobSpec, options: Options) -> Manifest:
    mounts: list[Manifest] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if options.claim:
        mounts.append({"name": "runs", "mountPath": "/runs"})
    return {
        "name": "shoal",
        "image": options.image,
        "command": command_of(name, spec),
        **_environment(options),
        "resources": resources_of(spec, options),
        **_probe(options),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _probe(options: Options) -> Manifest:
    # No liveness probe: the launcher is the container, ends where it cannot go on, and ends workers that hang. A probe
    # that killed pods beside it would only take a run's time to recover.
    if not options.run:
        return {}
    probe = {
        "exec": {"command": ["shoal", "status", options.run]},
        "initialDelaySeconds": 30,
        "periodSeconds": 60,
        "timeoutSeconds": 20,
    }
    return {"readinessProbe": probe}


def _environment(options: Options) -> Manifest:
    # The root of the file system is read only: what wants a home has one that goes with the pod.
    found: Manifest = {"env": [{"name": "HOME", "value": "/tmp"}, {"name": "PYTHONUNBUFFERED", "value": "1"}]}
    if options.secret:
        found["envFrom"] = [{"secretRef": {"name": options.secret}}]
    return found


def command_of(name: str, spec: JobSpec) -> list[str]:
    """What a pod runs.

    >>> command_of("first", JobSpec(("train.py",), least=8, most=8, hosts=2))[4:-1]
    ['--hosts', '2', '--host', '$(JOB_COMPLETION_INDEX)', '--at', 'first-hosts-0-0.first:29400']
    """
    each = spec.most // spec.hosts
    words = ["shoal", "run", "--workers", str(each)]
    if spec.hosts > 1:
        # Kubernetes puts the number in: an Indexed Job gives each container its own in this variable.
        words += ["--hosts", str(spec.hosts), "--host", "$(JOB_COMPLETION_INDEX)"]
        words += ["--at", f"{name}-hosts-0-0.{name}:{PORT}"]
    return [*words, *spec.command]


def resources_of(spec: JobSpec, options: Options) -> Mapping[str, Mapping[str, str | int]]:
    """What one pod is promised, and may not exceed."""
    each = spec.most // spec.hosts
    wants: dict[str, str | int] = {"cpu": spec.cores * each}
    if spec.memory:
        wants["memory"] = f"{-(-spec.memory // spec.hosts // 2**20)}Mi"
    if spec.devices:
        wants[options.gpu] = spec.devices * each
    return {"requests": wants, "limits": dict(wants)}


def _trainjob(name: str, spec: JobSpec, options: Options) -> Manifest:
    # The runtime says where the pods meet, in torchrun's words.
    each = spec.most // spec.hosts
    words = ["shoal", "run", "--workers", str(each), *spec.command]
    meet = '--hosts "$PET_NNODES" --host "$PET_NODE_RANK" --at "$PET_MASTER_ADDR:$PET_MASTER_PORT"'
    line = (
        f"exec {shlex.join(words[:4])} {meet} {shlex.join(spec.command)}"
        if spec.hosts > 1
        else shlex.join(words)
    )
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(name, options),
        "spec": {
            **_suspended(options),
            "runtimeRef": {"name": options.runtime},
            "trainer": {
                "image": options.image,
                "numNodes": spec.hosts,
                "command": ["sh", "-c", line],
                "resourcesPerNode": resources_of(spec, options),
            },
        },
    }
