"""What the chart tells the services is what they read: variables, files, ports, labels, images, devices."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings

from pipelinerl.service.settings import (
    ActorSettings,
    ServiceSettings,
    TrainerSettings,
    VerifierSettings,
)
from tests.chart.cases import CASES
from tests.chart.conftest import rendered_case
from tests.chart.rendering import SERVICES, Object, Pod, Rendered, environment, render

SETTINGS: dict[str, type[ServiceSettings]] = {
    "actor": ActorSettings,
    "trainer": TrainerSettings,
    "verifier": VerifierSettings,
}
PREFIX = "PIPELINERL_"
OF_A_POD = {
    "metadata.name": "pipelinerl-actor-5d9c-x2x",
    "metadata.namespace": "train",
    "metadata.uid": "0b5f",
    "status.podIP": "10.0.0.7",
    "metadata.labels['apps.kubernetes.io/pod-index']": "1",
}
"""What the downward API gives, for every field that the chart may ask of it."""
LOCAL = {"address_file", "model_dir"}
"""Settings for runs on one machine, which the chart leaves alone."""


def _service_of(container: Object) -> str | None:
    """From its command: python -m services.NAME..."""
    words = container.get("args", [])
    return words[2].split(".")[1] if words[:2] == ["python", "-m"] else None


def _values(container: Object) -> dict[str, str]:
    values = {}
    for name, entry in environment(container).items():
        source = entry.get("valueFrom", {})
        if "value" in entry:
            values[name] = entry["value"]
        elif "fieldRef" in source:
            values[name] = OF_A_POD[source["fieldRef"]["fieldPath"]]
    return values


def _settings(container: Object, monkeypatch: pytest.MonkeyPatch) -> BaseSettings:
    """As the service reads them, from these variables and no others."""
    service = _service_of(container)
    assert service
    for name, value in _values(container).items():
        monkeypatch.setenv(name, value)
    kind: Any = SETTINGS[service]
    try:
        return kind()
    finally:
        monkeypatch.undo()


def test_services_are_started_by_their_modules(rendered: Rendered) -> None:
    for pod in rendered.pods:
        for container in pod.containers:
            service = _service_of(container)
            if service is None:
                assert container["name"] == "nats"
                continue
            module = Path(*container["args"][2].split("."))
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), container["args"]
            assert "command" not in container  # the image's entry point is its init process


def test_every_variable_is_a_setting_and_every_needed_one_is_set(
    rendered: Rendered, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pod in rendered.pods:
        for container in pod.containers:
            service = _service_of(container)
            if service is None:
                continue
            fields = SETTINGS[service].model_fields
            known = {f"{PREFIX}{name.upper()}" for name in fields}
            given = {name for name in environment(container) if name.startswith(PREFIX)}
            assert given <= known, (pod.owner, container["name"], given - known)
            needed = {f"{PREFIX}{name.upper()}" for name, field in fields.items() if field.is_required()}
            assert needed <= given, (pod.owner, container["name"], needed - given)
            assert _settings(container, monkeypatch)


def test_the_chart_decides_every_setting_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that no case sets is one that its author forgot here."""
    given: dict[str, set[str]] = {service: set() for service in SERVICES}
    for name in CASES:
        for pod in rendered_case(name).pods:
            if pod.component in SERVICES:
                given[pod.component] |= set(environment(pod.main))
    for service, kind in SETTINGS.items():
        wanted = {f"{PREFIX}{name.upper()}" for name in kind.model_fields} - {f"{PREFIX}{n.upper()}" for n in LOCAL}
        assert wanted - given[service] <= {f"{PREFIX}SERVICE_ACCOUNT_DIR"}, service


def test_init_containers_read_what_their_service_reads(rendered: Rendered) -> None:
    for pod in rendered.pods:
        if pod.component not in SERVICES:
            continue
        for container in pod.spec.get("initContainers", []):
            assert environment(container) == environment(pod.main), pod.owner
            assert container["volumeMounts"] == pod.main["volumeMounts"]
            assert container["image"] == pod.main["image"]


def test_files_that_settings_name_are_mounted(rendered: Rendered) -> None:
    for pod in rendered.pods:
        for container in pod.containers:
            mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
            for name, value in _values(container).items():
                if value.startswith("/") and name.startswith((PREFIX, "HF_", "XDG_", "TMPDIR")):
                    assert any(value == at or value.startswith(f"{at}/") for at in mounts), (pod.owner, name, value)


def test_servers_listen_where_the_ports_say(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in rendered.pods:
        if pod.component not in SERVICES:
            continue
        settings = _settings(pod.main, monkeypatch)
        wanted = {name: getattr(settings, f"{name}_port") for name in ("grpc", "http")}
        if isinstance(settings, TrainerSettings):
            wanted["transfer"] = settings.transfer_port
            wanted["rendezvous"] = int(settings.rendezvous.rpartition(":")[2])
        assert dict(pod.ports) == wanted


def test_names_and_ports_of_other_services_are_theirs(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    services = {item["metadata"]["name"]: item for item in rendered.of_kind("Service")}
    stateful = {item["metadata"]["name"]: item for item in rendered.of_kind("StatefulSet")}

    def port_of(host: str, port: int) -> bool:
        first, _, governing = host.partition(".")
        if governing:
            owner, _, index = first.rpartition("-")
            assert stateful[owner]["spec"]["serviceName"] == governing
            assert int(index) < stateful[owner]["spec"]["replicas"]
        service = services[governing or first]
        return any(entry["port"] == port for entry in service["spec"]["ports"])

    for pod in rendered.pods:
        if pod.component not in SERVICES:
            continue
        settings = _settings(pod.main, monkeypatch)
        for name in ("verifier", "trainer", "rendezvous"):
            address = getattr(settings, name, "")
            if address:
                host, _, port = address.removeprefix("dns:///").rpartition(":")
                assert port_of(host, int(port)), (name, address)
        if rendered.of_kind("StatefulSet")[0] and not isinstance(settings, VerifierSettings):
            host = re.fullmatch(r"(?:nats|tls)://([a-z.-]+):4222", settings.nats_url)  # type: ignore[attr-defined]
            assert host
            assert host[1] == "nats.messaging" or port_of(host[1], 4222)


def test_port_names_exist_in_the_pods_they_are_meant_for(rendered: Rendered) -> None:
    for pod in rendered.pods:
        for container in pod.containers:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in container:
                    own = {port["name"] for port in container["ports"]}
                    assert container[probe]["httpGet"]["port"] in own, (pod.owner, probe)
    for service in rendered.of_kind("Service"):
        for pod in _some(rendered.selected(service["spec"]["selector"]), service):
            for port in service["spec"]["ports"]:
                assert pod.ports[port["targetPort"]] == port["port"], service["metadata"]["name"]
    for monitor in rendered.of_kind("PodMonitor"):
        for pod in _some(rendered.selected(monitor["spec"]["selector"]["matchLabels"]), monitor):
            assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= set(pod.ports)


def _some(pods: list[Pod], item: Object) -> list[Pod]:
    assert pods, f"{item['kind']} {item['metadata']['name']} selects no pod"
    assert len({pod.component for pod in pods}) == 1, item["metadata"]["name"]
    return pods


def test_selectors_find_their_own_pods(rendered: Rendered) -> None:
    for item in rendered.of_kind("Deployment", "StatefulSet", "PodDisruptionBudget"):
        selector = item["spec"]["selector"]["matchLabels"]
        pods = _some(rendered.selected(selector), item)
        assert {pod.component for pod in pods} == {item["metadata"]["labels"]["app.kubernetes.io/component"]}
    for autoscaler in rendered.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        target = autoscaler["spec"]["scaleTargetRef"]
        assert rendered.one(target["kind"], target["name"])
    for pod in rendered.pods:
        for constraint in pod.spec.get("topologySpreadConstraints", []):
            assert pod in rendered.selected(constraint["labelSelector"]["matchLabels"])


def test_the_trainer_selects_the_actors_pods(rendered: Rendered, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(rendered.pod("trainer").main, monkeypatch)
    assert isinstance(settings, TrainerSettings)
    if case == "no-kubernetes-api":
        assert settings.actor_selector == settings.pod_namespace == ""
        return
    selector = dict(pair.split("=") for pair in settings.actor_selector.split(","))
    assert {pod.component for pod in rendered.selected(selector)} == {"actor"}
    assert settings.pod_namespace == "train"


def test_labels_of_a_selector_never_change(rendered: Rendered, case: str) -> None:
    """They are immutable in a Deployment: another version or another label of the user's must not be among them."""
    for item in rendered.of_kind("Deployment", "StatefulSet"):
        names = {"name", "instance", "component"}
        assert set(item["spec"]["selector"]["matchLabels"]) == {f"app.kubernetes.io/{name}" for name in names}


def test_labels_of_values_are_added_and_the_charts_own_win() -> None:
    deployment = rendered_case("everything").one("Deployment", "pipelinerl-actor")
    assert deployment["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rl"
    assert deployment["metadata"]["labels"]["team"] == "rl"  # commonLabels
    assert deployment["metadata"]["labels"]["app.kubernetes.io/name"] == "pipelinerl"
    pod = rendered_case("everything").pod("actor")
    assert pod.labels["team"] == "a"  # podLabels before commonLabels
    assert "kueue.x-k8s.io/queue-name" not in pod.labels


def test_images_are_pinned(rendered: Rendered) -> None:
    for pod in rendered.pods:
        for container in pod.containers:
            name, _, tag = container["image"].rpartition(":")
            assert name
            assert re.search(r"\d", tag), container["image"]
            assert "latest" not in tag


def test_cpu_images_have_a_tag_of_their_own() -> None:
    rendered = rendered_case("cpu")
    tags = {pod.component: pod.main["image"].rpartition(":")[2] for pod in rendered.pods}
    assert tags["actor"] == tags["trainer"] == tags["test"] == "0.1.0-cpu"
    assert tags["verifier"] == "0.1.0"
    assert rendered_case("default").pod("actor").main["image"] == "pipelinerl/actor:0.1.0"
    assert rendered_case("default").pod("test").main["image"] == "pipelinerl/trainer:0.1.0-cpu"
    assert rendered_case("everything").pod("actor").main["image"] == "registry.example.com/ml/pipelinerl/actor:1.2.3"


def test_a_reference_is_taken_as_it_is() -> None:
    image = "registry.example.com/actor@sha256:" + "0" * 64
    rendered = render({"actor": {"image": {"reference": image}}})
    assert rendered.pod("actor").main["image"] == image


def _limits(pod: Pod) -> dict[str, Any]:
    return dict(pod.main["resources"].get("limits", {}))


def test_the_page_has_the_names_that_it_is_given() -> None:
    entries = environment(rendered_case("everything").pod("trainer").main)
    assert (entries["PIPELINERL_PAGE"]["value"], entries["PIPELINERL_PAGE_HOSTS"]["value"]) == (
        "true",
        "runs.example.com,runs",
    )
    assert "PIPELINERL_PAGE_HOSTS" not in environment(rendered_case("default").pod("trainer").main)


def test_gpus_are_the_recipes_ranks() -> None:
    """recipes/gsm.yaml: tensor_parallel_size 1, nproc 4."""
    rendered = rendered_case("default")
    assert _limits(rendered.pod("actor"))["nvidia.com/gpu"] == 1
    assert _limits(rendered.pod("trainer"))["nvidia.com/gpu"] == 4
    assert environment(rendered.pod("trainer").main)["PIPELINERL_RANKS_PER_NODE"]["value"] == "4"


def test_gpus_and_devices_of_values() -> None:
    rendered = rendered_case("everything")
    actor, trainer = _limits(rendered.pod("actor")), _limits(rendered.pod("trainer"))
    assert (actor["nvidia.com/gpu"], actor["rdma/hca"]) == (2, 1)
    assert (trainer["nvidia.com/gpu"], trainer["rdma/hca"]) == (8, 8)
    requests = rendered.pod("trainer").main["resources"]["requests"]
    assert (requests["nvidia.com/gpu"], requests["cpu"]) == (8, "8")


def test_no_gpu_is_asked_for_on_cpu() -> None:
    for pod in rendered_case("cpu").pods:
        for container in pod.containers:
            assert "nvidia.com/gpu" not in str(container.get("resources"))


def test_variables_of_values_replace_the_charts() -> None:
    entries = environment(rendered_case("everything").pod("actor").main)
    assert entries["HOME"]["value"] == "/elsewhere"
    assert entries["NCCL_DEBUG"]["value"] == "INFO"
    assert entries["NCCL_SOCKET_IFNAME"]["value"] == entries["GLOO_SOCKET_IFNAME"]["value"] == "net1"
    assert entries["NCCL_IB_HCA"]["value"] == "mlx5"


def test_the_hubs_token_comes_from_the_secret() -> None:
    rendered = rendered_case("everything")
    reference = environment(rendered.pod("actor").main)["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
    secret = rendered.one("Secret", reference["name"])
    assert base64.b64decode(secret["data"][reference["key"]]) == b"hf_x"
    assert "HF_TOKEN" not in environment(rendered_case("default").pod("actor").main)


def test_what_a_pod_mounts_is_made_by_the_release_or_named_by_the_values(rendered: Rendered, case: str) -> None:
    given = str(CASES[case].values)
    made = {(item["kind"], item["metadata"]["name"]) for item in rendered.objects}
    certificates = {item["spec"]["secretName"] for item in rendered.of_kind("Certificate")}
    keys = {"configMap": ("ConfigMap", "name"), "secret": ("Secret", "secretName")}
    for pod in rendered.pods:
        for volume in pod.spec.get("volumes", []):
            for source, (kind, key) in keys.items():
                if source in volume:
                    name = volume[source][key]
                    assert (kind, name) in made or name in certificates or f"'{name}'" in given, (pod.owner, name)


def test_a_changed_recipe_replaces_the_pods() -> None:
    def sums(values: dict[str, Any]) -> set[str]:
        rendered = render(values)
        return {rendered.pod(service).metadata["annotations"]["checksum/recipe"] for service in SERVICES}

    before, after = sums({}), sums({"recipe": {"set": {"trainer": {"steps": 7}}}})
    assert len(before) == len(after) == 1
    assert before != after


def test_a_stopped_actor_has_time_to_hand_over() -> None:
    """services/actor/app.py: about 9 s where nothing answers, and preStop counts into the grace period."""
    pod = rendered_case("default").pod("actor")
    waits = pod.main["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod.spec["terminationGracePeriodSeconds"] >= waits + 15


def test_a_stopped_trainer_has_time_for_its_checkpoint(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = rendered.pod("trainer")
    settings = _settings(pod.main, monkeypatch)
    assert isinstance(settings, TrainerSettings)
    assert pod.spec["terminationGracePeriodSeconds"] > settings.stop_checkpoint_s
    assert settings.linger is True


def test_old_actors_go_before_new_ones_come() -> None:
    strategy = rendered_case("default").one("Deployment", "pipelinerl-actor")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_trainer_pods_start_together_under_one_name() -> None:
    stateful = rendered_case("two-nodes").one("StatefulSet", "pipelinerl-trainer")["spec"]
    service = rendered_case("two-nodes").one("Service", stateful["serviceName"])["spec"]
    assert (stateful["podManagementPolicy"], stateful["replicas"]) == ("Parallel", 2)
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True


def test_streams_are_replicated_as_nats_is() -> None:
    def replicas(case: str) -> str:
        return str(environment(rendered_case(case).pod("trainer").main)["PIPELINERL_STREAM_REPLICAS"]["value"])

    assert (replicas("default"), replicas("nats-3"), replicas("external-nats")) == ("1", "3", "3")
