"""Rights on the Kubernetes API and on NATS are those that the code says it needs, and no more."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from pipelinerl.bus.permissions import permissions
from pipelinerl.kube import client as kube
from pipelinerl.kube.client import Permission
from pipelinerl.local.nats import find_nats_server
from services.trainer.release_test import OBJECTS
from tests.chart.cases import CASES, rendered_case
from tests.chart.rendering import SERVICES, Object, Rendered, environment, render
from tests.support.certificates import Authority


def _granted(role: Object) -> dict[Permission, list[str] | None]:
    """With the names of the objects, where not all of them are meant."""
    return {
        Permission(resource, verb, group): rule.get("resourceNames")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def _trainers_rights(mode: str, full: str = "pipelinerl") -> dict[Permission, list[str] | None]:
    of_the_end = {right: [f"{full}-{OBJECTS[right.resource]}"] for right in kube.COMPLETION[mode]}
    return dict.fromkeys(kube.TRAINER) | of_the_end


def test_roles_grant_what_the_code_asks_and_no_more(rendered: Rendered, case: str) -> None:
    roles = rendered.of_kind("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    if case in ("no-rbac", "no-kubernetes-api"):
        assert roles == []
        return
    role, binding = roles
    entries = environment(rendered.pod("trainer").main)
    full = entries["PIPELINERL_RELEASE"]["value"]
    granted = _granted(role)
    assert granted == _trainers_rights(entries["PIPELINERL_ON_COMPLETION"]["value"], full)
    for right in granted.keys() - kube.TRAINER:
        # A right to write pods would include the images, labels and finalizers of all pods in the namespace.
        assert granted[right] is not None
        assert not right.resource.startswith("pods")
    for kind, right in (("ConfigMap", kube.PATCH_CONFIG), ("Secret", kube.PATCH_REPORT)):
        for written in granted.get(right) or []:
            assert "data" not in rendered.one(kind, written), "an upgrade would take it away"
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == f"{full}-trainer"
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (rendered.pod("trainer").spec["serviceAccountName"], "train")


@pytest.mark.parametrize("mode", ["keep", "exit"])
def test_what_a_finished_run_leaves_decides_what_its_trainer_may_do(mode: str) -> None:
    rendered = render({"trainer": {"onCompletion": mode}})
    assert _granted(rendered.one("Role", "pipelinerl-trainer")) == _trainers_rights(mode)
    assert rendered.find("Secret", "pipelinerl-report") is None


def _configuration(rendered: Rendered, name: str = "pipelinerl-nats") -> str:
    return str(rendered.one("ConfigMap", name)["data"]["nats.conf"])


def _subjects(block: str, side: str) -> list[str]:
    found = re.search(rf"{side}: \[(.*?)\]", block, re.DOTALL)
    assert found
    return re.findall(r'"([^"]+)"', found[1])


@pytest.mark.parametrize(("case", "run"), [("default", "gsm"), ("everything", "all-of-it"), ("cpu", "arithmetic")])
def test_users_of_nats_may_do_what_the_bus_says(case: str, run: str) -> None:
    blocks = {block.split(",")[0]: block for block in _configuration(rendered_case(case)).split("user: ")[1:]}
    blocks.pop("route", None)  # a server of the cluster
    given = {user: {side: _subjects(block, side) for side in ("publish", "subscribe")} for user, block in blocks.items()}
    assert given == permissions(run)
    assert all(f"password: ${user.upper()}_PASSWORD" in block for user, block in blocks.items())


def _server_environment(rendered: Rendered) -> dict[str, str]:
    values: dict[str, str] = {"PATH": os.environ["PATH"]}
    for name, entry in environment(rendered.pod("nats").main).items():
        value = entry.get("value") or ("e1e5" + "0" * 36 if "secretKeyRef" in entry["valueFrom"] else "pipelinerl-nats-0")
        values[name] = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], value)
    return values


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("external-nats", "external-nats-open")])
def test_nats_server_takes_its_configuration(case: str, tmp_path: Path) -> None:
    rendered = rendered_case(case)
    text = _configuration(rendered, rendered.pod("nats").owner.partition("/")[2])
    if "/etc/nats-tls" in text:
        Authority().issue(tmp_path, "pipelinerl-nats")
    for at in ("/etc/nats-tls", "/data", "/var/run/nats"):
        text = text.replace(at, str(tmp_path))
    file = tmp_path / "nats.conf"
    file.write_text(text)
    command, env = [find_nats_server(), "-t", "--config", file], _server_environment(rendered)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "is valid" in done.stderr) == (0, True), done.stderr


def test_each_server_of_a_cluster_has_a_route_to_each() -> None:
    rendered = rendered_case("nats-3")
    text, entries = _configuration(rendered), environment(rendered.pod("nats").main)
    routes = [name for name in entries if name.startswith("ROUTE_") and name != "ROUTE_PASSWORD"]
    assert re.findall(r"\$(ROUTE_\d)", text) == routes == ["ROUTE_0", "ROUTE_1", "ROUTE_2"]
    assert [entries[route]["value"] for route in routes] == [
        f"nats://route:$(ROUTE_PASSWORD)@pipelinerl-nats-{index}.pipelinerl-nats-headless:6222" for index in range(3)
    ]
    # A variable may only stand for one that comes before it.
    assert list(entries).index("ROUTE_PASSWORD") < list(entries).index("ROUTE_0")
    assert "$ROUTE_" not in _configuration(rendered_case("default"))


def test_services_log_in_with_their_own_credentials(rendered: Rendered) -> None:
    for pod in map(rendered.pod, SERVICES):
        for secret in (volume["secret"] for volume in pod.spec["volumes"] if volume["name"] == "nats-credentials"):
            assert secret["items"] == [{"key": f"{pod.component}-credentials", "path": "credentials"}]
            made = rendered.find("Secret", secret["secretName"])
            assert made is None or secret["items"][0]["key"] in made["data"]
            assert pod.component != "verifier"
    assert not {"PIPELINERL_NATS_CREDENTIALS", "HF_TOKEN"} & environment(rendered.pod("verifier").main).keys()
