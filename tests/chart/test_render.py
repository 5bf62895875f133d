"""Every case renders to objects that Kubernetes takes, and two to what they did. Every pod fits the standard `restricted`
(https://kubernetes.io/docs/concepts/security/pod-security-standards/) and holds a token only where it is used.
"""

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.chart import rendering
from tests.chart.cases import CASES, rendered_case
from tests.chart.rendering import CHART, HELM, SERVICES, WORKLOADS, HelmError, Object, Pod, Rendered, helm, render

OLDEST, *BETWEEN, NEWEST = (f"1.{minor}" for minor in range(31, 38))
OF_OTHERS = ("cert-manager.io/v1", "keda.sh/v1alpha1", "monitoring.coreos.com/v1")  # whose schemas Kubernetes does not have
SNAPSHOTS = Path(__file__).parent / "snapshots"
RENEW = "python -m tests.chart.test_render"


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """kubernetes_validate parses a file of definitions, 1 MB, for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@functools.cache
def _invalid(text: str, version: str) -> str:
    try:
        kubernetes_validate.validate(json.loads(text), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{list(error.path)}: {error.message}"
    return ""


@pytest.mark.parametrize("version", [OLDEST, *(pytest.param(version, marks=pytest.mark.soak) for version in BETWEEN), NEWEST])
def test_kubernetes_takes_every_object(case: str, version: str) -> None:
    items = [item for item in rendered_case(case).objects if item["apiVersion"] not in OF_OTHERS]
    problems = {(item["kind"], item["metadata"]["name"]): _invalid(json.dumps(item, sort_keys=True), version) for item in items}
    assert not any(problems.values()), problems


def test_every_object_has_a_name_of_its_own_and_carries_the_release(rendered: Rendered, case: str) -> None:
    assert len({(item["kind"], item["metadata"]["name"]) for item in rendered.objects}) == len(rendered.objects)
    wanted = {"name": "pipelinerl", "instance": CASES[case].release, "managed-by": "Helm"}
    wanted = {f"app.kubernetes.io/{key}": value for key, value in wanted.items()}
    for item in rendered.objects:
        assert item["metadata"]["labels"].items() >= wanted.items()


@pytest.mark.parametrize("name", ["default", "cpu"])
def test_the_chart_renders_what_it_did(name: str) -> None:
    """After a change that is wanted: `python -m tests.chart.test_render` renews the snapshots; read the difference."""
    assert (SNAPSHOTS / f"{name}.yaml").read_text(encoding="utf-8") == snapshot(name), f"if it should: {RENEW}"


def snapshot(name: str) -> str:
    """Without passwords, which are others each time."""
    manifests = rendering.rendered_text(files=(rendering.CPU_VALUES,) * (name == "cpu"))
    for item in yaml.load_all(manifests, Loader=yaml.CSafeLoader):
        for value in item.get("data", {}).values() if item and item["kind"] == "Secret" else ():
            manifests = manifests.replace(value, "(generated)")
    return manifests


def test_passwords_are_other_ones_each_time_and_in_no_manifest_other_than_a_secret(rendered: Rendered) -> None:
    first, second = (render().one("Secret", "pipelinerl-nats-auth")["data"] for _ in range(2))
    assert all(first[key] != second[key] for key in ("trainer", "actor", "admin", "route"))
    assert len({*first.values()}) == len(first)
    entries = [entry for pod in rendered.pods for container in pod.containers for entry in container.get("env", [])]
    assert all("secretKeyRef" in one["valueFrom"] for one in entries if "PASSWORD" in one["name"] or one["name"] == "HF_TOKEN")


def test_the_chart_can_refuse_to_make_passwords_and_names_the_command_that_makes_them() -> None:
    with pytest.raises(HelmError, match=r"nats\.existingSecret: is empty") as refused:
        render({"nats": {"auth": {"generate": False}}})
    command = next(line for line in str(refused.value).splitlines() if "kubectl" in line).split()
    command = [HELM.with_name("kubectl"), *command[1:], "--dry-run=client", "--output=yaml"]
    made = subprocess.run(command, capture_output=True, check=True)
    assert yaml.safe_load(made.stdout)["data"].keys() == render().one("Secret", "pipelinerl-nats-auth")["data"].keys()


def test_a_newer_chart_alone_restarts_nothing(tmp_path: Path) -> None:
    newer = Path(shutil.copytree(CHART, tmp_path / "chart"))
    chart = yaml.safe_load((newer / "Chart.yaml").read_text(encoding="utf-8"))
    (newer / "Chart.yaml").write_text(json.dumps(chart | {"version": "9.9.9", "appVersion": "9.9.9"}), encoding="utf-8")

    def templates(chart: Path) -> list[Object]:
        rendered = yaml.safe_load_all(helm("template", "pipelinerl", chart, "--set-string", "images.tag=1"))
        return [item["spec"]["template"] for item in rendered if item and item["kind"] in WORKLOADS]

    assert len(templates(CHART)) == 4
    assert templates(newer) == templates(CHART)


ALLOWED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}  # those in use
HOST_FIELDS = {"hostNetwork", "hostPID", "hostIPC", "hostUsers", "shareProcessNamespace"}
OF_PODS = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
OF_CONTAINERS = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
"""Security contexts of every pod and container, and nothing else: no privileges, and no other /proc or SELinux label."""


def _volume_kinds(rendered: Rendered, pod: Pod) -> dict[str, str]:
    kinds = {volume["name"]: next(iter(volume.keys() - {"name"})) for volume in pod.spec.get("volumes", [])}
    kind, _, name = pod.owner.partition("/")
    templates = rendered.one(kind, name)["spec"].get("volumeClaimTemplates", []) if kind == "StatefulSet" else []
    return kinds | {template["metadata"]["name"]: "persistentVolumeClaim" for template in templates}


def test_pods_fit_the_restricted_standard_mount_what_they_have_and_cannot_write_configuration(rendered: Rendered) -> None:
    assert {pod.component for pod in rendered.pods} >= {*SERVICES}
    for pod in rendered.pods:
        assert not HOST_FIELDS & pod.spec.keys(), pod.owner
        expected = OF_PODS | {"fsGroup": 10001, "fsGroupChangePolicy": "OnRootMismatch"}
        assert pod.spec["securityContext"] == expected, pod.owner
        kinds, mounted = _volume_kinds(rendered, pod), set[str]()
        assert set(kinds.values()) <= ALLOWED_VOLUMES, pod.owner
        for container in pod.containers:
            assert {**OF_PODS, **container["securityContext"]} == OF_PODS | OF_CONTAINERS, (pod.owner, container["name"])
            assert not any("hostPort" in port for port in container.get("ports", []))
            mounts = container.get("volumeMounts", [])
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts), (pod.owner, container["name"])
            assert all(one.get("readOnly") for one in mounts if kinds[one["name"]] in ("configMap", "secret")), pod.owner
            mounted |= {mount["name"] for mount in mounts}
        assert mounted == kinds.keys(), pod.owner


def test_only_the_trainer_holds_a_token_of_an_account_that_is_there(rendered: Rendered, case: str) -> None:
    accounts = {account["metadata"]["name"]: account for account in rendered.of_kind("ServiceAccount")}
    for pod in rendered.pods:
        expected = case != "no-kubernetes-api" and pod.component in ("trainer", "release-test")
        assert pod.spec["automountServiceAccountToken"] is expected, pod.owner
        assert pod.spec["serviceAccountName"] in accounts or (case, pod.spec["serviceAccountName"]) == ("no-rbac", "mine")
    assert not any(account["automountServiceAccountToken"] for account in accounts.values())


if __name__ == "__main__":
    for name in ("default", "cpu"):
        (SNAPSHOTS / f"{name}.yaml").write_text(snapshot(name), encoding="utf-8")
