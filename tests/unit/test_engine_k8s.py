"""Manifests for Kubernetes, held to the schemas that Kubernetes, JobSet and Kubeflow publish."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shoal.errors import ConfigError
from shoal.jobs import accept
from shoal.jobs.job import JobSpec
from shoal.jobs.k8s import kubectl
from shoal.jobs.k8s.engine import Kubernetes
from shoal.jobs.k8s.manifest import as_yaml, manifest_of, name_of
from shoal.jobs.k8s.options import parse

ROOT = Path(__file__).parents[2]
ONE = JobSpec(
    ("--strategy", "zero1", "train.py"), least=4, most=4, name="first", engine=("image=reg/train:1",)
)
EVERYTHING = replace(
    ONE,
    least=16,
    most=16,
    hosts=2,
    devices=1,
    memory=64 * 10**9,
    seconds=7200.0,
    retries=3,
    engine=(
        "image=reg/train:1",
        "namespace=team-a",
        "queue=team",
        "priority_class=high",
        "claim=runs",
        "secret=s3",
        "run=/runs/first",
        "user=1234",
        "gpu=amd.com/gpu",
    ),
)
TRAINJOB = replace(
    ONE, least=8, most=8, hosts=2, engine=("image=reg/train:1", "kind=trainjob", "runtime=own")
)


def made(spec: JobSpec) -> dict[str, object]:
    """What goes to the cluster, having been text."""
    found: dict[str, object] = yaml.safe_load(
        as_yaml(manifest_of(name_of(spec, "3f09aa"), spec, parse(spec.engine)))
    )
    return found


def check_job(job: Mapping[str, object]) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: scripts/setup dev"
    )
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": job}
    validate.validate(whole, "1.37", strict=True)


def check_whole(manifest: Mapping[str, object]) -> None:
    """By the models that are made from the definitions of JobSet and TrainJob; what they do not know they drop."""
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed: scripts/setup dev"
    )
    kinds = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}
    again = kinds[str(manifest["kind"])].from_dict(dict(manifest)).to_dict()
    lost = [path for path in paths(manifest) if path not in set(paths(again))]
    assert not lost, f"no field of a {manifest['kind']}: {lost}"


def paths(value: object, here: str = "") -> list[str]:
    if isinstance(value, Mapping):
        return [path for key, one in value.items() for path in paths(one, f"{here}.{key}")]
    if isinstance(value, list):
        return [path for number, one in enumerate(value) for path in paths(one, f"{here}[{number}]")]
    return [here]


def inside(manifest: object, *way: str | int) -> object:
    for key in way:
        manifest = manifest[key]  # type: ignore[index]
    return manifest


JOB = ("spec", "replicatedJobs", 0, "template", "spec")
POD = ("template", "spec")


def test_one_host_is_a_job() -> None:
    found = made(ONE)
    assert (found["kind"], inside(found, "metadata", "name")) == ("Job", "first-3f09aa")
    check_job(inside(found, "spec"))  # type: ignore[arg-type]
    container = inside(found, "spec", *POD, "containers", 0)
    assert inside(container, "command") == [
        "shoal",
        "run",
        "--workers",
        "4",
        "--strategy",
        "zero1",
        "train.py",
    ]
    assert inside(container, "resources", "limits") == {"cpu": 4}


def test_several_hosts_are_a_jobset_whose_pods_meet_at_the_first() -> None:
    found = made(EVERYTHING)
    check_whole(found)
    check_job(inside(found, *JOB))  # type: ignore[arg-type]
    container = inside(found, *JOB, *POD, "containers", 0)
    command = inside(container, "command")
    assert isinstance(command, list)
    assert command[2:10] == [
        *("--workers", "8", "--hosts", "2", "--host", "$(JOB_COMPLETION_INDEX)"),
        *("--at", "first-3f09aa-hosts-0-0.first-3f09aa:29400"),
    ]
    assert inside(container, "resources", "requests") == {"cpu": 8, "memory": "30518Mi", "amd.com/gpu": 8}
    assert inside(found, "spec", "failurePolicy", "maxRestarts") == 3
    assert inside(found, "spec", "suspend") is True, "Kueue wakes it"
    assert inside(found, *JOB, "backoffLimit") == 0, "all pods start again, not one"


def test_nothing_runs_as_root_or_sees_the_network_of_its_host() -> None:
    for pod in (inside(made(ONE), "spec", *POD), inside(made(EVERYTHING), *JOB, *POD)):
        assert isinstance(pod, dict)
        assert inside(pod, "securityContext", "runAsNonRoot") is True
        assert "hostNetwork" not in pod
        assert pod["automountServiceAccountToken"] is False
        assert inside(pod, "containers", 0, "securityContext") == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_a_trainjob_meets_where_its_runtime_says() -> None:
    found = made(TRAINJOB)
    check_whole(found)
    (_, _, line) = inside(found, "spec", "trainer", "command")  # type: ignore[misc]
    assert line == (
        'exec shoal run --workers 4 --hosts "$PET_NNODES" --host "$PET_NODE_RANK" --at '
        '"$PET_MASTER_ADDR:$PET_MASTER_PORT" --strategy zero1 train.py'
    )


def test_the_checks_see_what_is_wrong() -> None:
    spoiled = made(EVERYTHING)
    inside(spoiled, "spec", "failurePolicy")["maxRestart"] = 3  # type: ignore[index]
    with pytest.raises(AssertionError, match="maxRestart"):
        check_whole(spoiled)
    inside(spoiled, *JOB)["paralelism"] = 4  # type: ignore[index]
    with pytest.raises(Exception, match="paralelism"):
        check_job(inside(spoiled, *JOB))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"engine": ()}, "--on k8s needs an image with Shoal"),
        ({"engine": ("image=a", "qeue=b")}, "k8s has no option 'qeue'; did you mean 'queue'"),
        ({"engine": ("image",)}, "write KEY=VALUE"),
        ({"engine": ("image=a", "queue=Team A")}, "Kubernetes takes small letters"),
        ({"engine": ("image=a", "user=0")}, "a user that is not root"),
        ({"engine": ("image=a", "kind=job"), "hosts": 2}, "no addresses to meet at"),
        ({"engine": ("image=a", "kind=trainjob", "claim=runs")}, "claim cannot be asked for"),
        ({"priority": 200}, "--on k8s has no --priority"),
        ({"least": 2}, "--on k8s has no --workers MIN:MAX"),
        ({"command": (str(Path.home() / "train.py"),)}, "is a path of this machine"),
    ],
)
def test_what_cannot_be_is_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)) as refused:
        accept(Kubernetes(), "k8s", replace(ONE, **changes))  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_what_can_be_is_accepted_and_described() -> None:
    for spec in (ONE, EVERYTHING, TRAINJOB):
        accept(Kubernetes(), "k8s", spec)
        assert yaml.safe_load(Kubernetes().describe(spec))["metadata"]["name"] == "first"


def test_objects_of_a_cluster_are_states() -> None:
    items = [
        {"kind": "Job", "metadata": {"name": "a"}, "spec": {"parallelism": 1}, "status": {"active": 1}},
        {"kind": "Job", "metadata": {"name": "b"}, "spec": {"suspend": True}, "status": {}},
        {
            "kind": "JobSet",
            "metadata": {"name": "c", "namespace": "team"},
            "status": {"conditions": [{"type": "Failed", "status": "True", "message": "a pod was lost"}]},
        },
        {"metadata": None, "spec": [], "status": {"conditions": "none"}},  # a cluster may say anything
    ]
    found = [kubectl.state_of(json.loads(json.dumps(item))) for item in items]
    assert [(one.id, one.state) for one in found[:3]] == [
        ("job/default/a", "running"),
        ("job/default/b", "waiting"),
        ("jobset/team/c", "failed"),
    ]
    assert found[2].why == "a pod was lost"


def test_without_a_cluster_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the real kubectl where there is one, pointed at a port of this machine where nobody listens."""
    config = tmp_path / "config"
    config.write_text(
        "apiVersion: v1\nkind: Config\nclusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "contexts: [{name: a, context: {cluster: a, user: ''}}]\ncurrent-context: a\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(config))
    there = shutil.which("kubectl") is not None
    with pytest.raises(
        ConfigError, match="failed: " if there else "kubectl, and it is not installed"
    ) as refused:
        Kubernetes().submit(ONE)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="there is no job k8s:first; `shoal jobs --on k8s` lists them"):
        Kubernetes().cancel("first")


def test_the_image_is_built_without_a_network_and_without_root() -> None:
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    words = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert words[0] == "ARG"
    assert words.index("USER") < words.index("CMD")
    (install,) = [line for line in lines if "pip install" in line]
    assert "--no-index" in install
    assert "--find-links=/wheels" in install
