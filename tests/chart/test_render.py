"""Every case renders to objects that Kubernetes takes, and two of them to what they did.

Every pod fits the `restricted` Pod Security Standard, writes to volumes only, and holds a token only where it is used. The
standard: https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.chart.cases import CASES, rendered_case
from tests.chart.rendering import (
    CHART,
    CPU_VALUES,
    HELM,
    WORKLOADS,
    HelmError,
    Object,
    Pod,
    Rendered,
    helm,
    render,
    rendered_text,
)

OLDEST, NEWEST = "1.31", "1.37"
BETWEEN = ("1.32", "1.33", "1.34", "1.35", "1.36")
OF_OTHERS = {
    ("cert-manager.io/v1", "Certificate"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
}
"""Custom resources: their schemas are not Kubernetes's."""
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


@pytest.mark.parametrize("values", [(), ("--values", CPU_VALUES)], ids=["default", "cpu"])
def test_helm_lint_has_nothing_to_say(values: tuple[str, ...]) -> None:
    helm("lint", "--strict", CHART, *values)


@pytest.mark.parametrize("version", [OLDEST, *(pytest.param(version, marks=pytest.mark.soak) for version in BETWEEN), NEWEST])
def test_kubernetes_takes_every_object(case: str, version: str) -> None:
    problems = {}
    for item in rendered_case(case).objects:
        if (item["apiVersion"], item["kind"]) in OF_OTHERS:
            continue
        if problem := _invalid(json.dumps(item, sort_keys=True), version):
            problems[f"{item['kind']}/{item['metadata']['name']}"] = problem
    assert not problems


def test_every_object_has_a_name_of_its_own_and_carries_the_release(rendered: Rendered, case: str) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered.objects]
    assert len(names) == len(set(names))
    for kind, name in names:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name), (kind, name)  # the API server's rule, of no schema
    for item in rendered.objects:
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "pipelinerl"
        assert labels["app.kubernetes.io/instance"] == CASES[case].release
        assert labels["app.kubernetes.io/managed-by"] == "Helm"


@pytest.mark.parametrize("name", ["default", "cpu"])
def test_the_chart_renders_what_it_did(name: str) -> None:
    """After a change that is wanted: `python -m tests.chart.test_render` renews the snapshots; read the difference."""
    assert (SNAPSHOTS / f"{name}.yaml").read_text(encoding="utf-8") == snapshot(name), f"if it should: {RENEW}"


def snapshot(name: str) -> str:
    return without_passwords(rendered_text(CASES[name].values, CASES[name].files))


def without_passwords(manifests: str) -> str:
    """Generated passwords are others each time."""
    for item in yaml.load_all(manifests, Loader=yaml.CSafeLoader):
        for value in item.get("data", {}).values() if item and item["kind"] == "Secret" else ():
            manifests = manifests.replace(value, "(generated)")
    return manifests


def test_passwords_are_other_ones_each_time_and_in_no_manifest_other_than_a_secret(rendered: Rendered) -> None:
    first, second = (render().one("Secret", "pipelinerl-nats-auth")["data"] for _ in range(2))
    assert all(first[key] != second[key] for key in ("trainer", "actor", "admin", "route"))
    assert len({*first.values()}) == len(first)
    for pod in rendered.pods:
        for container in pod.containers:
            for entry in container.get("env", []):
                assert "PASSWORD" not in entry["name"] or "secretKeyRef" in entry["valueFrom"]
                assert entry["name"] != "HF_TOKEN" or "secretKeyRef" in entry["valueFrom"]


RANDOM = r"\b(?:rand[A-Z]\w+|uuidv4|now|ago|gen(?:CA|PrivateKey|Signed|SelfSigned)\w*|htpasswd|bcrypt|shuffle)\b"


def test_only_passwords_differ_between_renderings_and_the_chart_can_refuse_to_make_them() -> None:
    found = {
        (path.name, word)
        for path in (CHART / "templates").rglob("*.*")
        for action in re.findall(r"\{\{(?!/|-? ?/)(.*?)\}\}", path.read_text(encoding="utf-8"), re.DOTALL)
        for word in re.findall(RANDOM, re.sub(r'"[^"]*"', "", action))
    }
    assert found == {("secret.yaml", "randAlpha"), ("secret.yaml", "randAlphaNum")}
    with pytest.raises(HelmError, match=r"nats\.existingSecret: is empty") as refused:
        render({"nats": {"auth": {"generate": False}}})
    command = next(line for line in str(refused.value).splitlines() if "kubectl" in line).split()
    made = subprocess.run(
        [HELM.with_name("kubectl"), *command[1:], "--dry-run=client", "--output=yaml"], capture_output=True, check=True
    )
    assert yaml.safe_load(made.stdout)["data"].keys() == render().one("Secret", "pipelinerl-nats-auth")["data"].keys()


def test_a_newer_chart_alone_restarts_nothing(tmp_path: Path) -> None:
    newer = tmp_path / "chart"
    shutil.copytree(CHART, newer)
    chart = yaml.safe_load((newer / "Chart.yaml").read_text(encoding="utf-8"))
    text = yaml.safe_dump(chart | {"version": "9.9.9", "appVersion": "9.9.9"})
    (newer / "Chart.yaml").write_text(text, encoding="utf-8")

    def templates(chart: Path) -> list[Object]:
        rendered = yaml.safe_load_all(helm("template", "pipelinerl", chart, "--set-string", "images.tag=1"))
        return [item["spec"]["template"] for item in rendered if item and item["kind"] in WORKLOADS]

    assert len(templates(CHART)) == 4
    assert templates(newer) == templates(CHART)


ALLOWED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
"""Of those that the standard allows, the ones in use."""
HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC", "hostUsers", "shareProcessNamespace")
USER = 10001


def _volume_kinds(rendered: Rendered, pod: Pod) -> dict[str, str]:
    kinds = {volume["name"]: next(iter(volume.keys() - {"name"})) for volume in pod.spec.get("volumes", [])}
    kind, _, name = pod.owner.partition("/")
    templates = rendered.one(kind, name)["spec"].get("volumeClaimTemplates", []) if kind == "StatefulSet" else []
    return kinds | {template["metadata"]["name"]: "persistentVolumeClaim" for template in templates}


WANTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": USER,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Security context of every container, and nothing else: no privileges, and no other /proc or SELinux label."""


def test_pods_fit_the_restricted_standard(rendered: Rendered) -> None:
    assert {pod.component for pod in rendered.pods} >= {"actor", "trainer", "verifier"}
    for pod in rendered.pods:
        context = pod.spec["securityContext"]
        assert not [field for field in HOST_FIELDS if field in pod.spec], pod.owner
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == USER
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "sysctls" not in context
        assert set(_volume_kinds(rendered, pod).values()) <= ALLOWED_VOLUMES, pod.owner
        for container in pod.containers:
            own = container["securityContext"]
            assert {**context, **own}.items() >= WANTED.items(), (pod.owner, container["name"])
            assert not {"privileged", "procMount", "seLinuxOptions"} & own.keys()
            assert not any("hostPort" in port for port in container.get("ports", []))


def test_what_is_mounted_is_a_volume_and_configuration_is_read_only(rendered: Rendered) -> None:
    for pod in rendered.pods:
        kinds = _volume_kinds(rendered, pod)
        mounted = {mount["name"] for container in pod.containers for mount in container.get("volumeMounts", [])}
        assert mounted == set(kinds), pod.owner
        for container in pod.containers:
            mounts = container.get("volumeMounts", [])
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts), (pod.owner, container["name"])
            for mount in mounts:
                assert kinds[mount["name"]] not in ("configMap", "secret") or mount.get("readOnly"), (pod.owner, mount)


def test_only_the_trainer_holds_a_token_of_an_account_that_is_there(rendered: Rendered, case: str) -> None:
    made = {account["metadata"]["name"] for account in rendered.of_kind("ServiceAccount")}
    brought = {"mine"} if case == "no-rbac" else set()
    for pod in rendered.pods:
        expected = case != "no-kubernetes-api" and pod.component in ("trainer", "release-test")
        assert pod.spec["automountServiceAccountToken"] is expected, pod.owner
        assert pod.spec["serviceAccountName"] in made | brought, pod.owner
    for account in rendered.of_kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


if __name__ == "__main__":
    for name in ("default", "cpu"):
        (SNAPSHOTS / f"{name}.yaml").write_text(snapshot(name), encoding="utf-8")
