"""A release lives: install, scale, upgrade, roll back, uninstall, with Helm 3 and both ways of Helm 4.

They need a real cluster: `make cluster-check` takes the one that KUBECONFIG names, such as one that kind made.
"""

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.chart.rendering import CHART, CPU_VALUES, HELM, NAMESPACE, Object

HELM3, KUBECTL = HELM.with_name("helm3"), HELM.with_name("kubectl")
HELMS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "helm-4": (HELM, ("--server-side=true",)),
    "helm-4-client-side": (HELM, ("--server-side=false",)),
    "helm-3": (HELM3, ()),
}


class CommandError(Exception):
    """A command failed. The text is its error."""


@dataclass(frozen=True)
class Cluster:
    namespace: str = NAMESPACE

    def run(self, *command: str | Path, text: str = "") -> str:
        """Its output. Raises `CommandError`."""
        environment = os.environ | {"HELM_NAMESPACE": self.namespace}
        done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise CommandError(done.stderr)
        return done.stdout

    def kubectl(self, *arguments: str, text: str = "") -> str:
        return self.run(KUBECTL, "--namespace", self.namespace, *arguments, text=text)

    def get(self, kind: str, name: str) -> Object:
        return dict(json.loads(self.kubectl("get", kind, name, "--output", "json")))

    def names(self, kind: str) -> set[str]:
        return {line.partition("/")[2] for line in self.kubectl("get", kind, "--output", "name").splitlines()}


@pytest.fixture(scope="session")
def real_cluster(request: pytest.FixtureRequest) -> Cluster:
    if not request.config.getoption("--cluster"):
        pytest.skip("needs a real cluster: make cluster-check")
    if not os.environ.get("KUBECONFIG"):
        pytest.exit("nothing was checked: KUBECONFIG is not set", returncode=1)
    return Cluster()


@pytest.fixture
def cluster(real_cluster: Cluster) -> Iterator[Cluster]:
    """A namespace for each test."""
    own = replace(real_cluster, namespace=f"pipelinerl-{uuid.uuid4().hex[:8]}")
    own.kubectl("create", "namespace", own.namespace)
    own.kubectl("label", "namespace", own.namespace, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield own
    finally:
        own.kubectl("delete", "namespace", own.namespace, "--wait=false")


@dataclass(frozen=True)
class Release:
    cluster: Cluster
    helm: Path
    options: tuple[str, ...]
    name: str = "pipelinerl"

    def install(self, values: dict[str, Any]) -> None:
        self._with_chart("install", values)

    def upgrade(self, values: dict[str, Any]) -> None:
        self._with_chart("upgrade", values)

    def rollback(self, revision: int) -> None:
        self.cluster.run(self.helm, "rollback", self.name, str(revision), "--no-hooks", *self.options)

    def uninstall(self) -> None:
        self.cluster.run(self.helm, "uninstall", self.name)

    def _with_chart(self, verb: str, values: dict[str, Any]) -> None:
        hooks = "--no-hooks"  # the stand-in runs no Job; tests/cluster runs that of the chart
        files = ("--values", CPU_VALUES, "--values", "-")
        self.cluster.run(self.helm, verb, self.name, CHART, *files, hooks, *self.options, text=json.dumps(values))

    def replicas(self, component: str, kind: str = "deployment") -> int:
        return int(self.cluster.get(kind, f"{self.name}-{component}")["spec"]["replicas"])

    def scale(self, component: str, replicas: int, kind: str = "deployment") -> None:
        self.cluster.kubectl("scale", f"{kind}/{self.name}-{component}", f"--replicas={replicas}")

    def run_state(self) -> dict[str, str]:
        return dict(self.cluster.get("configmap", f"{self.name}-run")["data"])

    def log_level(self, component: str) -> str:
        pod = self.cluster.get("deployment", f"{self.name}-{component}")["spec"]["template"]["spec"]
        return next(str(entry["value"]) for entry in pod["containers"][0]["env"] if entry["name"] == "PIPELINERL_LOG_LEVEL")


@pytest.fixture(params=HELMS)
def release(cluster: Cluster, request: pytest.FixtureRequest) -> Release:
    program, options = HELMS[request.param]
    if not program.exists():
        pytest.skip(f"{program.name} is not installed: make install")
    return Release(cluster, program, options)


BY_HAND = {
    "actor": {"replicas": None},
    "verifier": {"autoscaling": {"enabled": True}},
    "metrics": {"dashboards": {"enabled": True}},
    "trainer": {"persistence": {"accessMode": "ReadWriteMany"}},
}
MORE_STEPS = {"recipe": {"set": {"trainer": {"steps": 5000}}}}
TWO_NODES = {"trainer": BY_HAND["trainer"] | {"nodes": 2}}


def test_install_scale_upgrade_roll_back_uninstall(release: Release) -> None:
    """Actors scaled by hand and verifiers by their autoscaler keep their numbers all the way, and each step is what it says."""

    def scaled() -> tuple[int, int]:
        return release.replicas("actor"), release.replicas("verifier")

    release.install(BY_HAND)
    assert release.log_level("actor") == "info"
    release.scale("actor", 8)
    release.scale("verifier", 5)  # the request that the autoscaler sends
    release.upgrade(BY_HAND | {"log": {"level": "debug"}})
    assert (scaled(), release.log_level("actor")) == ((8, 5), "debug")
    release.rollback(1)
    assert (scaled(), release.log_level("actor")) == ((8, 5), "info")
    release.scale("actor", 3)
    release.upgrade(BY_HAND | {"log": {"level": "warning"}})
    assert (scaled(), release.log_level("verifier")) == ((3, 5), "warning")
    release.upgrade(BY_HAND | TWO_NODES)
    assert release.replicas("trainer", "statefulset") == 2
    release.rollback(2)
    assert release.replicas("trainer", "statefulset") == 1
    assert (scaled(), release.log_level("actor")) == ((3, 5), "debug")
    finish_run(release)
    release.upgrade(BY_HAND | MORE_STEPS)
    assert (release.replicas("trainer", "statefulset"), scaled()) == (1, (0, 5))
    assert release.run_state() == {"phase": "Finished", "actors": "3"}, "by which the trainer gives them back"
    release.scale("actor", 3)
    release.upgrade(BY_HAND)
    assert (release.replicas("trainer", "statefulset"), scaled()) == (1, (3, 5))
    release.uninstall()
    assert release.cluster.names("deployments") == release.cluster.names("statefulsets") == set()
    assert release.cluster.names("persistentvolumeclaims") == {"pipelinerl-trainer", "data-pipelinerl-nats-0"}


def test_a_number_in_the_values_is_what_there_is_after_each_step(release: Release) -> None:
    release.install({"actor": {"replicas": 2}})
    release.upgrade({"actor": {"replicas": 4}})
    assert release.replicas("actor") == 4
    release.rollback(1)
    assert release.replicas("actor") == 2
    finish_run(release)
    release.upgrade({"actor": {"replicas": 4}} | MORE_STEPS)
    assert (release.replicas("trainer", "statefulset"), release.replicas("actor")) == (1, 4)
    finish_run(release)
    release.rollback(3)
    assert (release.replicas("trainer", "statefulset"), release.replicas("actor")) == (1, 2)
    release.uninstall()


OFF = {"autoscaling": {"enabled": False}}


def test_an_autoscaler_that_is_switched_off_leaves_its_number_or_takes_that_of_the_values(release: Release) -> None:
    """A number in the manifest where the autoscaler has set another is a conflict in server-side apply, and nothing else is."""
    release.install(BY_HAND)
    release.scale("verifier", 5)  # the request that the autoscaler sends
    release.upgrade(BY_HAND | {"verifier": OFF | {"replicas": None}})
    assert release.replicas("verifier") == 5
    release.rollback(1)
    assert release.replicas("verifier") == 5
    numbered = BY_HAND | {"verifier": OFF | {"replicas": 2}}
    if "--server-side=true" in release.options:
        with pytest.raises(CommandError, match=r"conflict .*\.spec\.replicas"):
            release.upgrade(numbered)
        release.cluster.kubectl("delete", "horizontalpodautoscaler", "pipelinerl-verifier", "--ignore-not-found")
        release.scale("verifier", 2)
    release.upgrade(numbered)
    assert release.replicas("verifier") == 2
    release.uninstall()


def finish_run(release: Release) -> None:
    """The requests of pipelinerl/kube/completion.py."""
    state = {"phase": "Finished", "actors": str(release.replicas("actor"))}
    config = f"configmap/{release.name}-run"
    release.cluster.kubectl("patch", config, "--type=merge", "--patch", json.dumps({"data": state}))
    release.scale("actor", 0)
    release.scale("trainer", 0, "statefulset")
    release.cluster.kubectl("wait", "--for=jsonpath={.data.phase}=Finished", config, "--timeout=60s")


@pytest.mark.parametrize("release", ["helm-4"], indirect=True)
def test_a_service_account_may_do_what_its_service_does_and_no_more(release: Release) -> None:
    cluster = release.cluster
    release.install({})

    def may(account: str, verb: str, resource: str, *options: str) -> bool:
        subject = f"--as=system:serviceaccount:{cluster.namespace}:{release.name}-{account}"
        try:
            return cluster.kubectl("auth", "can-i", verb, resource, *options, subject).strip() == "yes"
        except CommandError:  # "no" is an exit code
            return False

    others = [("get", "secrets"), ("patch", "deployments"), ("create", "pods/exec"), ("create", "events")]
    others += [(verb, "pods") for verb in ("create", "delete", "patch", "update")]
    for account in ("actor", "trainer", "verifier", "nats"):
        assert [call for call in others if may(account, *call)] == [], account
    assert may("trainer", "list", "pods")
    assert may("trainer", "watch", "pods")
    for kind, own in (("deployments", "actor"), ("statefulsets", "trainer")):
        assert may("trainer", "patch", f"{kind}/{release.name}-{own}", "--subresource=scale")
        assert not may("trainer", "patch", f"{kind}/{release.name}-nats", "--subresource=scale")
    for one in (f"configmaps/{release.name}-run", f"secrets/{release.name}-report"):
        assert [may("trainer", verb, one) for verb in ("patch", "get", "delete")] == [True, False, False]
