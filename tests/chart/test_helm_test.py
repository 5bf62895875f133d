"""`helm test`: one pod that ends with its trainer's exit code, and whose processes find each other on its loopback."""

from __future__ import annotations

from tests.chart.conftest import rendered_case
from tests.chart.rendering import environment


def test_it_is_a_hook_that_ends_with_the_trainer() -> None:
    pod = rendered_case("default").pod("test")
    annotations = pod.metadata["annotations"]
    assert annotations["helm.sh/hook"] == "test"
    assert pod.spec["restartPolicy"] == "Never"
    assert [container["name"] for container in pod.spec["containers"]] == ["trainer"]
    assert environment(pod.main)["PIPELINERL_LINGER"]["value"] == "false"


def test_what_the_trainer_needs_runs_as_sidecars_in_the_order_of_need() -> None:
    containers = rendered_case("default").pod("test").spec["initContainers"]
    assert [(container["name"], container.get("restartPolicy")) for container in containers] == [
        ("initial-model", None),
        ("nats", "Always"),
        ("verifier", "Always"),
        ("actor", "Always"),
    ]
    assert all("startupProbe" in container for container in containers[1:])


def test_no_two_of_its_servers_share_a_port() -> None:
    containers = rendered_case("default").pod("test").containers[1:]
    ports = [
        entry["value"]
        for container in containers
        for name, entry in environment(container).items()
        if name in ("PIPELINERL_GRPC_PORT", "PIPELINERL_HTTP_PORT")
    ]
    assert len(ports) == 6
    assert len(set(ports)) == 6


def test_its_addresses_are_its_own() -> None:
    rendered = rendered_case("default")
    pod = rendered.pod("test")
    by_name = {container["name"]: environment(container) for container in pod.containers}
    grpc = by_name["verifier"]["PIPELINERL_GRPC_PORT"]["value"]
    for name in ("actor", "trainer"):
        assert by_name[name]["PIPELINERL_VERIFIER"]["value"] == f"127.0.0.1:{grpc}"
        assert by_name[name]["PIPELINERL_NATS_URL"]["value"] == "nats://127.0.0.1:4222"
    assert "listen: 127.0.0.1:4222" in rendered.one("ConfigMap", "pipelinerl-test")["data"]["nats.conf"]
    assert all("PIPELINERL_GRPC_HOST" not in entries for entries in by_name.values())  # loopback by itself


def test_it_can_be_left_out() -> None:
    assert all(pod.component != "test" for pod in rendered_case("no-kubernetes-api").pods)
