"""Kubernetes as its own command sees it: `kubectl`, which knows the user's clusters and rights."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from shoal.errors import ConfigError
from shoal.jobs.engine import JobState
from shoal.jobs.k8s.manifest import MANAGED, Manifest, as_yaml

_SECONDS = 60.0
_KINDS = ("jobs.batch", "jobsets.jobset.x-k8s.io", "trainjobs.trainer.kubeflow.org")
_ENDED = {"Complete": "done", "Completed": "done", "Failed": "failed"}


def ask(words: Sequence[str], given: str = "") -> str:
    """What `kubectl` says; its last line is the error where there is one."""
    if shutil.which("kubectl") is None:
        raise ConfigError(
            "--on k8s speaks to the cluster through kubectl, and it is not installed; --dry-run prints the manifest "
            "without it."
        )
    try:
        done = subprocess.run(
            ["kubectl", *words], input=given, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"kubectl {words[0]} has not answered for {_SECONDS:g} s; see whether `kubectl cluster-info` does."
        ) from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"kubectl {words[0]} failed: {said.removeprefix('error: ')}")
    return done.stdout


def create(manifest: Manifest) -> None:
    """One new object; one of that name that is there already is an error, and stays as it is."""
    ask(["create", "-f", "-"], as_yaml(manifest))


def states() -> list[JobState]:
    """All jobs of Shoal's that are still there, in every namespace that the user may see."""
    found: list[JobState] = []
    for kind in _KINDS:
        try:
            text = ask(["get", kind, "--all-namespaces", "-l", f"{MANAGED}=shoal", "-o", "json"])
        except ConfigError as error:
            if "resource type" in str(error):  # a cluster without that kind has none of it
                continue
            raise
        found += [state_of(item) for item in _listed(json.loads(text).get("items"))]
    return found


def state_of(item: Mapping[str, object]) -> JobState:
    """A job as the object's conditions tell.

    >>> done = {"type": "Complete", "status": "True"}
    >>> state_of({"kind": "Job", "metadata": {"name": "a"}, "status": {"conditions": [done]}}).state
    'done'
    """
    about, spec, status = (_mapping(item.get(key)) for key in ("metadata", "spec", "status"))
    state, why = "waiting", ""
    if status.get("active") or _listed(status.get("replicatedJobsStatus")):
        state = "running"
    if spec.get("suspend"):
        state = "waiting"
    for condition in _listed(status.get("conditions")):
        if condition.get("status") == "True" and condition.get("type") in _ENDED:
            state = _ENDED[str(condition["type"])]
            why = str(condition.get("message", ""))
    kind, space, name = (
        str(item.get("kind", "Job")),
        about.get("namespace", "default"),
        about.get("name", ""),
    )
    width = spec.get("parallelism", 1)
    return JobState(
        id=f"{kind.lower()}/{space}/{name}",
        name=str(name),
        state=state,
        workers=width if isinstance(width, int) else 1,
        why=why if state == "failed" else "",
    )


def output(job: str, follow: bool) -> Iterator[str]:
    """What all pods of a job have written, each line with its pod where there are several."""
    kind, space, name = parts_of(job)
    label = "batch.kubernetes.io/job-name" if kind == "job" else "jobset.sigs.k8s.io/jobset-name"
    words = ["logs", "-n", space, "-l", f"{label}={name}", "--tail=-1", "--max-log-requests=256"]
    words += ["--prefix"] if kind != "job" else []
    if not follow:
        yield ask(words)
        return
    with subprocess.Popen(["kubectl", *words, "-f"], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield from running.stdout
        finally:
            running.terminate()


def delete(job: str) -> None:
    """Pods get SIGTERM, and a run saves its step."""
    kind, space, name = parts_of(job)
    ask(["delete", kind, name, "-n", space, "--wait=false"])


def parts_of(job: str) -> tuple[str, str, str]:
    """Kind, namespace and name.

    >>> parts_of("jobset/team-a/first-3f09aa")
    ('jobset', 'team-a', 'first-3f09aa')
    """
    words = job.split("/")
    if len(words) != 3 or not all(words):
        raise ConfigError(
            f"there is no job k8s:{job}; `shoal jobs --on k8s` lists them, as jobset/default/first-3f09aa."
        )
    kind, space, name = words
    return kind, space, name


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: object) -> list[Mapping[str, object]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
