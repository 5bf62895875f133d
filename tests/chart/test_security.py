"""Every pod fits the `restricted` Pod Security Standard, writes to volumes only, and holds a token only where it is used.

The standard: https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from tests.chart.rendering import Object, Pod, Rendered

ALLOWED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
"""Of those that the standard allows, the ones in use."""
HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC", "hostUsers", "shareProcessNamespace")
USER = 10001


def _volume_kinds(rendered: Rendered, pod: Pod) -> dict[str, str]:
    kinds = {volume["name"]: next(iter(volume.keys() - {"name"})) for volume in pod.spec.get("volumes", [])}
    kind, _, name = pod.owner.partition("/")
    templates = rendered.one(kind, name)["spec"].get("volumeClaimTemplates", []) if kind == "StatefulSet" else []
    return kinds | {template["metadata"]["name"]: "persistentVolumeClaim" for template in templates}


def _container_problems(container: Object) -> list[str]:
    context = container["securityContext"]
    wanted = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": USER,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    wrong = [f"{key} is {context.get(key)}" for key, value in wanted.items() if context.get(key) != value]
    wrong += [key for key in ("privileged", "procMount", "seLinuxOptions") if key in context]
    wrong += ["hostPort" for port in container.get("ports", []) if "hostPort" in port]
    return [f"{container['name']}: {problem}" for problem in wrong]


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
        assert [problem for container in pod.containers for problem in _container_problems(container)] == []


def test_what_is_mounted_is_a_volume_and_configuration_is_read_only(rendered: Rendered) -> None:
    for pod in rendered.pods:
        kinds = _volume_kinds(rendered, pod)
        mounted = {mount["name"] for container in pod.containers for mount in container["volumeMounts"]}
        assert mounted == set(kinds), pod.owner
        for container in pod.containers:
            mounts = container["volumeMounts"]
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts), (pod.owner, container["name"])
            for mount in mounts:
                assert kinds[mount["name"]] not in ("configMap", "secret") or mount.get("readOnly"), (pod.owner, mount)


def test_only_actor_and_trainer_hold_a_token_of_an_account_that_is_there(rendered: Rendered, case: str) -> None:
    made = {account["metadata"]["name"] for account in rendered.of_kind("ServiceAccount")}
    brought = {"mine"} if case == "no-rbac" else set()
    for pod in rendered.pods:
        expected = case != "no-kubernetes-api" and pod.component in ("actor", "trainer")
        assert pod.spec["automountServiceAccountToken"] is expected, pod.owner
        assert pod.component == "test" or pod.spec["serviceAccountName"] in made | brought, pod.owner
    for account in rendered.of_kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_no_password_is_in_a_manifest_other_than_a_secret(rendered: Rendered) -> None:
    for pod in rendered.pods:
        for container in pod.containers:
            for entry in container.get("env", []):
                assert "PASSWORD" not in entry["name"] or "secretKeyRef" in entry["valueFrom"]
                assert entry["name"] != "HF_TOKEN" or "secretKeyRef" in entry["valueFrom"]
