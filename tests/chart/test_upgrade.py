"""What an upgrade changes of a release that runs, which the chart looks up, and what helm tells after an installation."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chart.rendering import CHART, CPU_VALUES, NAMESPACE, Rendered, helm, render
from tests.chart.test_rules import problems
from tests.cluster.api_server import ApiServer

OWNER = {"meta.helm.sh/release-name": "pipelinerl", "meta.helm.sh/release-namespace": NAMESPACE}


def installed(values: dict[str, Any] | None = None) -> Rendered:
    return render(values, [CPU_VALUES])


Asking = Callable[[Rendered], list[str]]
"""Returns options with which helm looks objects up in a cluster that has these of the release."""


@pytest.fixture
async def asking(tmp_path: Path) -> AsyncIterator[Asking]:
    server = ApiServer(Rendered([]), NAMESPACE)
    async with server.serve("127.0.0.1", 0, tmp_path / "api"):
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", f"https://127.0.0.1:{server.port}")

        def options(running: Rendered) -> list[str]:
            for item in running.objects:
                item["metadata"].setdefault("annotations", {}).update(OWNER)
            server._rendered.objects[:] = running.objects
            return ["--dry-run=server", "--disable-openapi-validation", f"--kubeconfig={kubeconfig}"]

        yield options


async def upgraded(options: list[str], values: dict[str, Any] | None = None, verb: str = "--is-upgrade") -> Rendered:
    return await asyncio.to_thread(render, values, [CPU_VALUES], extra=[verb, *options])


@pytest.mark.parametrize(
    ("values", "replicas"),
    [
        ({"replicas": None, "autoscaling": {"enabled": False}}, None),
        ({"replicas": 3, "autoscaling": {"enabled": False}}, 3),
        ({"replicas": 0, "autoscaling": {"enabled": False}}, 0),
        ({"replicas": 3, "autoscaling": {"enabled": True}}, None),
    ],
)
async def test_the_number_of_pods_comes_from_the_values_or_stays(asking: Asking, values: Any, replicas: int | None) -> None:
    """Helm 3's merge leaves what no manifest names, and Helm 4's server-side apply does not own it: in upgrades and rollbacks.
    So it must not be there, and what is live must not bring it back."""
    actor = {**values, "autoscaling": {"kind": "hpa", **values["autoscaling"]}}
    given = {"actor": actor, "trainer": {"expectedActors": 0}, "verifier": values, "metrics": {"scrapedOtherwise": True}}
    running = installed(given)
    for after in (running, await upgraded(asking(running), {**given, "log": {"level": "debug"}})):
        deployments = after.of_kind("Deployment")
        assert [item["spec"].get("replicas") for item in deployments] == [replicas, replicas]
        for item in deployments:
            item["spec"]["replicas"] = 7  # as kubectl scale, an HPA or KEDA do
    level = {"name": "PIPELINERL_LOG_LEVEL", "value": "debug"}
    assert all(level in after.pod(service).main["env"] for service in ("actor", "verifier")), "the other values count"


async def test_an_upgrade_keeps_the_passwords_and_adds_one_that_is_missing(asking: Asking) -> None:
    """As of a release that was installed before there was such a user."""
    running = installed()
    stored = running.one("Secret", "pipelinerl-nats-auth")["data"]
    assert set(stored) == {"trainer", "actor", "admin", "route", "trainer-credentials", "actor-credentials"}
    route = stored.pop("route")
    after = await upgraded(asking(running), {"nats": {"sequencesMaxGib": 2}})
    data = after.one("Secret", "pipelinerl-nats-auth")["data"]
    assert data["route"] not in ("", route)
    assert data == stored | {"route": data["route"]}


SIZES = ("1Ti < 1025Gi", "50000M > 46Gi", "50000M < 47Gi", "53687091201 > 50Gi", "5500000000000m < 6Gi", "1Ti > ")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("verb", ["--is-upgrade", "--is-upgrade=false"])
async def test_the_trainers_claim_never_shrinks(asking: Asking, verb: str, sizes: str) -> None:
    """In an upgrade that forgets the size, and in an installation over the claim that an uninstall has kept."""
    live, compared, size = sizes.split(" ")
    running = installed()
    running.one("PersistentVolumeClaim", "pipelinerl-trainer")["spec"]["resources"]["requests"]["storage"] = live
    after = await upgraded(asking(running), {"trainer": {"persistence": {"size": size}}}, verb)
    claims = [one.one("PersistentVolumeClaim", "pipelinerl-trainer") for one in (after, running)]
    assert claims[0]["spec"]["resources"]["requests"]["storage"] == (live if compared == ">" else size)
    assert list(problems(*claims)) == []


async def test_an_upgrade_that_takes_pods_away_warns(asking: Asking) -> None:
    """Nothing else does: a number in the values replaces one that kubectl scale or an autoscaler has set."""
    running = installed({"actor": {"replicas": None}})
    running.one("Deployment", "pipelinerl-actor")["spec"]["replicas"] = 5
    options = asking(running)
    notes = {numbers: await asyncio.to_thread(_notes, *options, "--set", numbers) for numbers in NUMBERS}
    assert {numbers: re.findall("WARNING: .*", text) for numbers, text in notes.items()} == NUMBERS


WARNING = "WARNING: actor.replicas reduces pipelinerl-actor from 5 pods to 3. To have 5 again: --set actor.replicas=5"
NUMBERS = {"actor.replicas=3": [WARNING], "actor.replicas=5,verifier.replicas=3": [], "actor.replicas=null": []}


@pytest.mark.parametrize("keep", [True, False])
def test_an_uninstall_leaves_the_checkpoints_unless_the_values_say_so(keep: bool) -> None:
    """Helm leaves what has this annotation, and nothing else."""
    metadata = [item["metadata"] for item in installed({"trainer": {"persistence": {"keep": keep}}}).objects]
    kept = [one["name"] for one in metadata if one.get("annotations", {}).get("helm.sh/resource-policy") == "keep"]
    assert kept == ["pipelinerl-trainer"] * keep


def test_notes_name_objects_that_exist() -> None:
    commands = r"(?:deployment/|statefulset/|service/|configmap/|exec |pvc |delete pod )(pipelinerl[-\w]*)"
    named = re.findall(commands, _notes("--dry-run=client"))
    made = {item["metadata"]["name"].removesuffix("-0") for item in installed().objects}
    assert len(named) > 4
    assert {name.removesuffix("-0") for name in named} <= made


def _notes(*options: str) -> str:
    chart = ("pipelinerl", CHART, "--namespace", NAMESPACE, "--values", CPU_VALUES)
    return helm("install", *chart, *options).partition("NOTES:")[2]
