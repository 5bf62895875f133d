"""What an upgrade and an uninstall do to what runs: the real helm against a mock API server that stores objects.

Not tested: what a cluster's controllers then do, and field managers (the server stores what was applied last).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.api_server import ApiServer, api_server
from tests.chart.rendering import CHART, CPU_VALUES, helm


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server() as started:
        yield started


def _release(server: ApiServer, command: str, values: dict[str, Any] | None = None) -> str:
    chart = [] if command == "uninstall" else [str(CHART), "--values", str(CPU_VALUES), "--values", "-"]
    unchecked = [] if command == "uninstall" else ["--disable-openapi-validation"]
    place = ("--namespace", "train", "--kube-apiserver", server.url, "--qps", "10000", "--burst-limit", "10000")
    return helm(command, "pipelinerl", *chart, *unchecked, *place, text=json.dumps(values or {}))


def _actors(server: ApiServer) -> dict[str, Any]:
    return dict(server.find("deployments", "pipelinerl-actor")["spec"])


def _scale(server: ApiServer, replicas: int) -> None:
    """As kubectl scale, an HPA or KEDA do."""
    server.find("deployments", "pipelinerl-actor")["spec"]["replicas"] = replicas


def test_an_upgrade_keeps_the_replicas_that_somebody_set(server: ApiServer) -> None:
    _release(server, "install", {"actor": {"replicas": 2}})
    assert _actors(server)["replicas"] == 2
    _scale(server, 5)
    _release(server, "upgrade", {"actor": {"replicas": 2}, "log": {"level": "debug"}})
    assert _actors(server)["replicas"] == 5
    environment = _actors(server)["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PIPELINERL_LOG_LEVEL", "value": "debug"} in environment  # it was an upgrade
    _release(server, "upgrade", {"actor": {"replicas": 3}})
    assert _actors(server)["replicas"] == 5


def test_an_upgrade_keeps_nothing_running(server: ApiServer) -> None:
    """0 is a number that somebody set, too."""
    _release(server, "install")
    _scale(server, 0)
    _release(server, "upgrade")
    assert _actors(server)["replicas"] == 0


def test_turning_an_autoscaler_on_does_not_start_over(server: ApiServer) -> None:
    """A field that a manifest no longer has is reset to its default, 1."""
    _release(server, "install", {"actor": {"replicas": 2}})
    _scale(server, 7)
    _release(server, "upgrade", {"actor": {"autoscaling": {"enabled": True, "kind": "hpa"}}})
    assert _actors(server)["replicas"] == 7


def test_replicas_of_nobody(server: ApiServer) -> None:
    _release(server, "install", {"actor": {"replicas": None}})
    assert "replicas" not in _actors(server)


def test_an_upgrade_keeps_the_passwords(server: ApiServer) -> None:
    _release(server, "install")
    before = dict(server.find("secrets", "pipelinerl-nats-auth")["data"])
    _release(server, "upgrade", {"nats": {"sequencesMaxGib": 2}})
    assert server.find("secrets", "pipelinerl-nats-auth")["data"] == before
    assert set(before) == {"trainer", "actor", "admin", "route", "trainer-credentials", "actor-credentials"}


def test_a_password_that_is_missing_is_added(server: ApiServer) -> None:
    """As of a release that was installed before there was such a user."""
    _release(server, "install")
    stored = server.find("secrets", "pipelinerl-nats-auth")["data"]
    before, _ = dict(stored), stored.pop("route")
    _release(server, "upgrade")
    after = server.find("secrets", "pipelinerl-nats-auth")["data"]
    assert after["route"] not in ("", before["route"])
    assert after["trainer"] == before["trainer"]


def test_an_uninstall_leaves_the_checkpoints_and_an_install_takes_them_up(server: ApiServer) -> None:
    _release(server, "install")
    _release(server, "uninstall")
    assert [path.split("/")[-2:] for path in server.objects] == [["persistentvolumeclaims", "pipelinerl-trainer"]]
    _release(server, "install")
    assert server.names("persistentvolumeclaims") == {"pipelinerl-trainer"}


def test_an_uninstall_leaves_nothing_where_the_values_say_so(server: ApiServer) -> None:
    _release(server, "install", {"trainer": {"persistence": {"keep": False}}})
    _release(server, "uninstall")
    assert server.objects == {}


def test_notes_say_the_next_commands(server: ApiServer) -> None:
    notes = _release(server, "install").partition("NOTES:")[2]
    for command in (
        "kubectl -n train get pods -l app.kubernetes.io/instance=pipelinerl",
        "kubectl -n train logs -f statefulset/pipelinerl-trainer",
        "kubectl -n train scale deployment/pipelinerl-actor --replicas=4",
        "helm -n train test pipelinerl",
        "helm -n train uninstall pipelinerl",
        "kubectl -n train delete pvc pipelinerl-trainer",
    ):
        assert command in notes
    assert "The run arithmetic trains a model that it builds itself with the recipe arithmetic." in notes


def test_an_upgrade_makes_a_deleted_statefulset_anew(server: ApiServer) -> None:
    """As docs/kubernetes.md says for larger claims, which a StatefulSet cannot be given otherwise."""
    _release(server, "install")
    (path,) = [path for path in server.objects if path.endswith("/statefulsets/pipelinerl-nats")]
    del server.objects[path]
    _release(server, "upgrade", {"nats": {"persistence": {"size": "64Gi"}}})
    (claim,) = server.find("statefulsets", "pipelinerl-nats")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "64Gi"


def test_notes_say_how_several_nodes_change_over(server: ApiServer) -> None:
    shared = {"trainer": {"nodes": 2, "persistence": {"existingClaim": "shared"}}}
    notes = _release(server, "install", shared).partition("NOTES:")[2]
    assert "delete pod -l app.kubernetes.io/instance=pipelinerl,app.kubernetes.io/component=trainer" in notes
