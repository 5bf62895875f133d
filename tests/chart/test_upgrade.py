"""What an upgrade and an uninstall do to what runs: the real helm against a mock API server that stores objects.

Not tested: what a cluster's controllers then do, and field managers (the server stores what was applied last).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.api_server import ApiServer, Object, api_server
from tests.chart.rendering import CHART, CPU_VALUES, helm


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server() as started:
        yield started


def release(server: ApiServer, command: str, values: dict[str, Any] | None = None) -> str:
    chart = [] if command == "uninstall" else [str(CHART), "--values", str(CPU_VALUES), "--values", "-"]
    unchecked = [] if command == "uninstall" else ["--disable-openapi-validation"]
    place = ("--namespace", "train", "--kube-apiserver", server.url, "--qps", "10000", "--burst-limit", "10000")
    return helm(command, "pipelinerl", *chart, *unchecked, *place, text=json.dumps(values or {}))


def actors(server: ApiServer) -> Object:
    return server.find("deployments", "pipelinerl-actor")["spec"]


HPA = {"enabled": True, "kind": "hpa"}


@pytest.mark.parametrize(
    ("installed", "set_by_somebody", "upgraded"),
    [
        ({"actor": {"replicas": 2}}, 5, {"actor": {"replicas": 3}, "log": {"level": "debug"}}),
        ({}, 0, {}),  # 0 is a number that somebody set, too
        (
            {"actor": {"replicas": 2}},
            7,
            {"actor": {"autoscaling": HPA}},
        ),  # a field that goes is reset to its default, 1
    ],
)
def test_an_upgrade_keeps_the_replicas_that_somebody_set(
    server: ApiServer, installed: dict[str, Any], set_by_somebody: int, upgraded: dict[str, Any]
) -> None:
    release(server, "install", installed)
    assert actors(server)["replicas"] == (2 if installed else 1)
    actors(server)["replicas"] = set_by_somebody  # as kubectl scale, an HPA or KEDA do
    release(server, "upgrade", upgraded)
    assert actors(server)["replicas"] == set_by_somebody
    variables = actors(server)["template"]["spec"]["containers"][0]["env"]
    level = upgraded.get("log", {}).get("level", "info")
    assert {"name": "PIPELINERL_LOG_LEVEL", "value": level} in variables, "it was an upgrade"


def test_replicas_of_nobody(server: ApiServer) -> None:
    release(server, "install", {"actor": {"replicas": None}})
    assert "replicas" not in actors(server)


def test_an_upgrade_keeps_the_passwords_and_adds_one_that_is_missing(server: ApiServer) -> None:
    """As of a release that was installed before there was such a user."""
    release(server, "install")
    before = dict(server.find("secrets", "pipelinerl-nats-auth")["data"])
    assert set(before) == {"trainer", "actor", "admin", "route", "trainer-credentials", "actor-credentials"}
    del server.find("secrets", "pipelinerl-nats-auth")["data"]["route"]
    release(server, "upgrade", {"nats": {"sequencesMaxGib": 2}})
    after = server.find("secrets", "pipelinerl-nats-auth")["data"]
    assert after["route"] not in ("", before["route"])
    assert after == before | {"route": after["route"]}


def test_an_upgrade_makes_a_deleted_statefulset_anew(server: ApiServer) -> None:
    """As docs/kubernetes.md says for larger claims, which a StatefulSet cannot be given otherwise."""
    release(server, "install")
    (path,) = [path for path in server.objects if path.endswith("/statefulsets/pipelinerl-nats")]
    del server.objects[path]
    release(server, "upgrade", {"nats": {"persistence": {"size": "64Gi"}}})
    (claim,) = server.find("statefulsets", "pipelinerl-nats")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "64Gi"


@pytest.mark.parametrize("keep", [True, False])
def test_an_uninstall_leaves_the_checkpoints_which_an_install_takes_up_unless_the_values_say_so(
    server: ApiServer, keep: bool
) -> None:
    values = {"trainer": {"persistence": {"keep": keep}}}
    release(server, "install", values)
    release(server, "uninstall")
    left = [path.split("/")[-2:] for path in server.objects]
    assert left == ([["persistentvolumeclaims", "pipelinerl-trainer"]] if keep else [])
    release(server, "install", values)
    assert server.find("persistentvolumeclaims", "pipelinerl-trainer")


NODES = {"trainer": {"nodes": 2, "persistence": {"existingClaim": "shared"}}}
NOTES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {},
        [
            "kubectl -n train get pods -l app.kubernetes.io/instance=pipelinerl",
            "kubectl -n train logs -f statefulset/pipelinerl-trainer",
            "kubectl -n train scale deployment/pipelinerl-actor --replicas=4",
            "helm -n train test pipelinerl",
            "helm -n train uninstall pipelinerl",
            "kubectl -n train delete pvc pipelinerl-trainer",
            "The run arithmetic trains a model that it builds itself with the recipe arithmetic.",
        ],
    ),
    (NODES, ["delete pod -l app.kubernetes.io/instance=pipelinerl,app.kubernetes.io/component=trainer"]),
]


@pytest.mark.parametrize(("values", "commands"), NOTES)
def test_notes_say_the_next_commands(server: ApiServer, values: dict[str, Any], commands: list[str]) -> None:
    notes = release(server, "install", values).partition("NOTES:")[2]
    assert [command for command in commands if command not in notes] == []
