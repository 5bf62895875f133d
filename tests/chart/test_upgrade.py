"""What an upgrade changes of a release that runs, which the chart looks up, and what helm tells after an installation.

Not tested: what helm and a cluster's controllers then do with what is rendered.
"""

from typing import Any

import pytest

from tests.chart.api_server import api_server
from tests.chart.rendering import CHART, CPU_VALUES, NAMESPACE, Rendered, helm, render


def installed(values: dict[str, Any] | None = None) -> Rendered:
    return render(values, [CPU_VALUES])


def upgraded(running: Rendered, values: dict[str, Any] | None = None) -> Rendered:
    with api_server(running.objects) as url:
        extra = ["--is-upgrade", "--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url]
        return render(values, [CPU_VALUES], extra=extra)


@pytest.mark.parametrize(
    ("values", "replicas"),
    [
        ({"replicas": None, "autoscaling": {"enabled": False}}, None),
        ({"replicas": 3, "autoscaling": {"enabled": False}}, 3),
        ({"replicas": 0, "autoscaling": {"enabled": False}}, 0),
        ({"replicas": 3, "autoscaling": {"enabled": True}}, None),
    ],
)
def test_how_many_pods_there_are_is_said_by_the_values_or_by_somebody_else(values: Any, replicas: int | None) -> None:
    """Helm 3's merge leaves what no manifest names, and Helm 4's server-side apply does not own it: in upgrades and rollbacks.
    So it must not be there, and what is live must not bring it back."""
    given = {
        "actor": {**values, "autoscaling": values["autoscaling"] | {"kind": "hpa"}},
        "trainer": {"expectedActors": 0},
        "verifier": values,
        "metrics": {"scrapedOtherwise": True},
    }
    running = installed(given)
    deployments = running.of_kind("Deployment")
    assert [item["spec"].get("replicas") for item in deployments] == [replicas, replicas]
    for item in deployments:
        item["spec"]["replicas"] = 7  # as kubectl scale, an HPA or KEDA do
    for item in upgraded(running, {**given, "log": {"level": "debug"}}).of_kind("Deployment"):
        assert item["spec"].get("replicas") == replicas
        level = {"name": "PIPELINERL_LOG_LEVEL", "value": "debug"}
        assert level in item["spec"]["template"]["spec"]["containers"][0]["env"], "the other values count"


def test_an_upgrade_keeps_the_passwords_and_adds_one_that_is_missing() -> None:
    """As of a release that was installed before there was such a user."""
    running = installed()
    stored = running.one("Secret", "pipelinerl-nats-auth")["data"]
    assert set(stored) == {"trainer", "actor", "admin", "route", "trainer-credentials", "actor-credentials"}
    route = stored.pop("route")
    data = upgraded(running, {"nats": {"sequencesMaxGib": 2}}).one("Secret", "pipelinerl-nats-auth")["data"]
    assert data["route"] not in ("", route)
    assert data == stored | {"route": data["route"]}


@pytest.mark.parametrize("keep", [True, False])
def test_an_uninstall_leaves_the_checkpoints_unless_the_values_say_so(keep: bool) -> None:
    """Helm leaves what has this annotation, and nothing else."""
    rendered = installed({"trainer": {"persistence": {"keep": keep}}})
    kept = [
        item["metadata"]["name"]
        for item in rendered.objects
        if item["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    ]
    assert kept == (["pipelinerl-trainer"] if keep else [])
    assert rendered.one("PersistentVolumeClaim", "pipelinerl-trainer")


NODES = ("--set", "trainer.nodes=2", "--set", "trainer.persistence.existingClaim=shared")
NOTES: list[tuple[tuple[str, ...], list[str]]] = [
    (
        (),
        [
            "kubectl -n train get pods -l app.kubernetes.io/instance=pipelinerl",
            "kubectl -n train logs -f statefulset/pipelinerl-trainer",
            "kubectl -n train scale deployment/pipelinerl-actor --replicas=4",
            "helm -n train test pipelinerl",
            "helm -n train uninstall pipelinerl",
            "kubectl -n train delete pod pipelinerl-test pipelinerl-test-release --ignore-not-found",
            "kubectl -n train delete pvc pipelinerl-trainer",
            "The run arithmetic trains the model arithmetic with the recipe arithmetic.",
        ],
    ),
    (("--set", "trainer.expectedActors=8"), ["--replicas=8", "An install starts one actor, but the first step waits for 8"]),
    (("--set", "actor.replicas=0"), ["actor.replicas is 0: the run pauses", "upgrade ... --set actor.replicas=4"]),
    (("--set", "model.source=s3://a/b"), ["s3://a/b must have a private address and a port of"]),
    (("--set", "kueue.queue=rl"), ["kubectl -n train delete workload.kueue.x-k8s.io pipelinerl --ignore-not-found"]),
    (NODES, ["delete pod -l app.kubernetes.io/instance=pipelinerl,app.kubernetes.io/component=trainer"]),
]


@pytest.mark.parametrize(("values", "commands"), NOTES)
def test_notes_say_the_next_commands(values: tuple[str, ...], commands: list[str]) -> None:
    chart = ("pipelinerl", CHART, "--namespace", NAMESPACE, "--values", CPU_VALUES)
    notes = helm("install", *chart, *values, "--dry-run=client").partition("NOTES:")[2]
    assert [command for command in commands if command not in notes] == []
