"""A release lives: install, scale, upgrade, roll back, uninstall, with Helm 3 and both ways of Helm 4. Only in a real cluster,
with `make cluster-check`: the one that KUBECONFIG names, or a control plane whose programs are on PATH.
"""

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.chart import control_plane
from tests.chart.control_plane import Cluster, CommandError
from tests.chart.placements import PLACEMENTS, URGENT
from tests.chart.rendering import CHART, COMPONENT, CPU_VALUES, HELM
from tests.chart.scheduler import pods_of

HELM3 = HELM.with_name("helm3")
HELMS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "helm-4": (HELM, ("--server-side=true",)),
    "helm-4-client-side": (HELM, ("--server-side=false",)),
    "helm-3": (HELM3, ()),
}


@pytest.fixture(scope="session")
def real_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not request.config.getoption("--cluster"):
        pytest.skip("needs a real cluster: make cluster-check")
    if file := os.environ.get("KUBECONFIG"):
        yield Cluster(Path(file))
    elif absent := [name for name in control_plane.BINARIES if shutil.which(name) is None]:
        pytest.exit(f"nothing was checked: KUBECONFIG is not set, and {', '.join(absent)} not on PATH", returncode=1)
    else:
        with control_plane.started(tmp_path_factory.mktemp("control-plane")) as cluster:
            yield cluster


@pytest.fixture
def cluster(real_cluster: Cluster) -> Iterator[Cluster]:
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

    def install(self, values: Mapping[str, Any], files: Sequence[Path] = (CPU_VALUES,), verb: str = "install") -> None:
        hooks = "--no-hooks"  # the stand-in runs no Job; tests/cluster runs that of the chart
        given = [f"--values={file}" for file in (*files, "-")]
        self.cluster.run(self.helm, verb, self.name, CHART, *given, hooks, *self.options, text=json.dumps(dict(values)))

    def upgrade(self, values: Mapping[str, Any]) -> None:
        self.install(values, verb="upgrade")

    def rollback(self, revision: int) -> None:
        self.cluster.run(self.helm, "rollback", self.name, str(revision), "--no-hooks", *self.options)

    def uninstall(self) -> None:
        self.cluster.run(self.helm, "uninstall", self.name)

    def replicas(self, component: str, kind: str = "deployment") -> int:
        return int(self.cluster.get(kind, f"{self.name}-{component}")["spec"]["replicas"])

    def scale(self, component: str, replicas: int, kind: str = "deployment") -> None:
        self.cluster.kubectl("scale", f"{kind}/{self.name}-{component}", f"--replicas={replicas}")

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
    state = release.cluster.get("configmap", "pipelinerl-run")["data"]
    assert state == {"phase": "Finished", "actors": "3"}, "by which the trainer gives them back"
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


def test_an_autoscaler_that_is_switched_off_leaves_its_number_or_takes_that_of_the_values(release: Release) -> None:
    """A number that the manifest has not named before has no owner in the API server, so that no conflict refuses another."""
    release.install(BY_HAND)
    release.scale("verifier", 5)  # the request that the autoscaler sends
    release.upgrade(BY_HAND | {"verifier": {"replicas": None, "autoscaling": {"enabled": False}}})
    assert release.replicas("verifier") == 5
    release.rollback(1)
    assert release.replicas("verifier") == 5
    numbered = BY_HAND | {"verifier": {"replicas": 2, "autoscaling": {"enabled": False}}}
    release.scale("actor", 5)
    release.upgrade(numbered | {"actor": {"replicas": 3}})
    assert (release.replicas("actor"), release.replicas("verifier")) == (3, 2)
    release.uninstall()


def finish_run(release: Release) -> None:
    state = {"phase": "Finished", "actors": str(release.replicas("actor"))}
    config = f"configmap/{release.name}-run"
    release.cluster.kubectl("patch", config, "--type=merge", "--patch", json.dumps({"data": state}))
    release.scale("actor", 0)
    release.scale("trainer", 0, "statefulset")
    release.cluster.kubectl("wait", "--for=jsonpath={.data.phase}=Finished", config, "--timeout=60s")


def _until(condition: Callable[[], bool], cluster: Cluster, what: str) -> None:
    """Conditions of a real cluster. `kubectl wait` waits for the pods; this is for what it has no word for."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, f"{what}\n{cluster.kubectl('get', 'pods,events', '--output', 'wide')}"
        time.sleep(0.5)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("release", ["helm-4"], indirect=True)
def test_pods_run_where_they_should(release: Release, name: str) -> None:
    """The same table as for the model of the scheduler, which may be wrong."""
    cluster, placement = release.cluster, PLACEMENTS[name]
    if cluster.stand_in is None:
        pytest.skip("needs the nodes of the table: unset KUBECONFIG to start a control plane that has them")
    number = len([*pods_of(placement.objects())])

    def pods() -> list[tuple[str, str, str]]:
        found = json.loads(cluster.kubectl("get", "pods", "--output", "json"))["items"]
        places = [(pod["metadata"]["labels"][COMPONENT], pod["spec"].get("nodeName", "")) for pod in found]
        return [(*place, json.dumps(pod["status"])) for place, pod in zip(places, found, strict=True)]

    def has_settled() -> bool:
        found = pods()
        return len(found) == number and placement.found(found) == placement.runs

    _until(lambda: not cluster.kubectl("get", "pods", "--all-namespaces", "--output", "name"), cluster, "pods of other tests")
    with cluster.stand_in.only(placement.nodes):
        cluster.kubectl("apply", "--filename=-", text=json.dumps(URGENT))
        release.install(placement.values, placement.files)
        if placement.drained:
            _until(lambda: sum(bool(node) for _, node, _ in pods()) == number, cluster, "a pod has no place before the drain")
            cluster.stand_in.join(placement.joining)
            with suppress(CommandError):  # a budget may keep a pod there until the time is over
                cluster.kubectl("drain", placement.drained, "--delete-emptydir-data", "--timeout=30s")
        _until(has_settled, cluster, f"{name}: not {placement.runs}")


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

    others = [("get", "secrets"), ("patch", "deployments"), ("create", "events")]
    for account in ("actor", "trainer", "verifier", "nats"):
        assert [call for call in others if may(account, *call)] == [], account
        subject = f"--as=system:serviceaccount:{cluster.namespace}:{release.name}-{account}"
        rules = re.findall(r"(?m)^(\S+) .*\[(.*)\]$", cluster.kubectl("auth", "can-i", "--list", subject))
        verbs = {verb for resources, some in rules if resources.startswith(("pods", "*")) for verb in some.split()}
        assert (bool(rules), verbs) == (True, {"list", "watch"} if account == "trainer" else set())
    for kind, own in (("deployments", "actor"), ("statefulsets", "trainer")):
        assert may("trainer", "patch", f"{kind}/{release.name}-{own}", "--subresource=scale")
        assert not may("trainer", "patch", f"{kind}/{release.name}-nats", "--subresource=scale")
    for one in (f"configmaps/{release.name}-run", f"secrets/{release.name}-report"):
        assert [may("trainer", verb, one) for verb in ("patch", "get", "delete")] == [True, False, False]
