"""What the chart tells the services is what they read: variables, files, ports, labels, images."""

import re
from importlib.util import find_spec
from typing import Any

import pytest

from pipelinerl.service.settings import ActorSettings, ServiceSettings, TrainerSettings, VerifierSettings, read_settings
from tests.chart.cases import CASES, rendered_case
from tests.chart.rendering import COMPONENT, SERVICES, Object, Pod, Rendered, environment, render

SETTINGS: dict[str, type[ServiceSettings]] = {"actor": ActorSettings, "trainer": TrainerSettings, "verifier": VerifierSettings}
PREFIX = "PIPELINERL_"
OF_A_POD = {  # what the downward API gives, for every field that the chart may ask of it
    "metadata.name": "pipelinerl-actor-5d9c-x2x",
    "metadata.namespace": "train",
    "metadata.uid": "0b5f",
    "status.podIP": "10.0.0.7",
    "metadata.labels['apps.kubernetes.io/pod-index']": "1",
    "metadata.labels['controller-revision-hash']": "pipelinerl-trainer-5c57d5df6d",
}
LOCAL = {"address_file", "gpu_turn", "model_dir", "page_key", "private_dir"}  # of runs on one machine


def containers(rendered: Rendered) -> list[tuple[Pod, Object]]:
    return [(pod, container) for pod in rendered.pods for container in pod.containers]


def services(rendered: Rendered) -> list[Pod]:
    return [pod for pod in rendered.pods if pod.component in SERVICES]


def service_of(container: Object) -> str | None:
    """From its command: python -m services.NAME... None of what reads no settings."""
    words = container.get("args", [])
    reads = words[:2] == ["python", "-m"] and words[2].startswith("services.") and container["name"] != "transfer"
    return words[2].split(".")[1] if reads else None


def variables(container: Object) -> dict[str, str]:
    values = {}
    for name, entry in environment(container).items():
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if path or "value" in entry:
            values[name] = OF_A_POD[path] if path else entry["value"]
    return values


def settings_of(container: Object) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for variable in variables(container).items():
            patch.setenv(*variable)
        return read_settings(SETTINGS[service_of(container) or ""])


def names_of(fields: Any) -> set[str]:
    return {f"{PREFIX}{name.upper()}" for name in fields}


def test_services_are_started_by_their_modules_with_variables_that_they_know(rendered: Rendered) -> None:
    for pod, container in containers(rendered):
        service, where = service_of(container), (pod.owner, container["name"])
        if service is None:
            assert container["name"] in ("nats", "exporter", "validation", "page", "transfer", "fabric", "fabric-init")
            continue
        assert find_spec(container["args"][2]), container["args"]
        assert "command" not in container  # the image's entry point is its init process
        given = {name for name in environment(container) if name.startswith(PREFIX)}
        assert given <= names_of(SETTINGS[service].model_fields), where
        assert settings_of(container), where  # with all that are required


def test_the_chart_decides_every_setting_of_a_cluster() -> None:
    """A setting that no case sets is one that its author forgot here."""
    all_rendered = [*map(rendered_case, CASES), render({"rewards": {"files": {"my_rewards.py": ""}}})]
    for service, kind in SETTINGS.items():
        given = {name for rendered in all_rendered for name in environment(rendered.pod(service).main)}
        assert names_of(kind.model_fields.keys() - LOCAL) - given <= {f"{PREFIX}SERVICE_ACCOUNT_DIR"}, service


def test_init_containers_read_what_their_service_reads_and_files_that_settings_name_are_mounted(rendered: Rendered) -> None:
    for pod, container in containers(rendered):
        if container["name"] == "initial-model":
            assert all(container.get(key) == pod.main[key] for key in ("env", "volumeMounts", "image")), pod.owner
        mounts = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        for name, value in variables(container).items():
            if value.startswith("/") and name.startswith((PREFIX, "HF_", "XDG_", "TMPDIR")):
                assert any(value == at or value.startswith(f"{at}/") for at in mounts), (pod.owner, name, value)


def test_servers_listen_where_the_ports_say(rendered: Rendered) -> None:
    for pod in services(rendered):
        settings = settings_of(pod.main)
        wanted = {name: getattr(settings, f"{name}_port") for name in ("grpc", "http")}
        if isinstance(settings, ActorSettings) and settings.episode_port:
            wanted["episodes"] = settings.episode_port
            assert settings.episode_host == settings.http_host
        if isinstance(settings, TrainerSettings):
            wanted["transfer"] = settings.transfer_port
            wanted["rendezvous"] = int(settings.rendezvous.rpartition(":")[2])
        assert dict(pod.ports) == wanted


def test_names_and_ports_of_other_services_are_theirs(rendered: Rendered) -> None:
    def is_served(host: str, port: str) -> bool:
        first, _, governing = host.partition(".")
        if governing:
            owner, _, index = first.rpartition("-")
            stateful = rendered.one("StatefulSet", owner)["spec"]
            assert stateful["serviceName"] == governing
            assert int(index) < stateful["replicas"]
        return any(entry["port"] == int(port) for entry in rendered.one("Service", governing or first)["spec"]["ports"])

    for pod in services(rendered):
        settings = settings_of(pod.main)
        for name in ("verifier", "trainer", "rendezvous", "nats_url"):
            if address := getattr(settings, name, ""):
                host, _, port = re.sub(".*//(/)?", "", address).rpartition(":")
                assert host == "nats.messaging" or is_served(host, port), (name, address)


def some(pods: list[Pod], item: Object) -> list[Pod]:
    assert len({pod.component for pod in pods}) == 1, f"{item['kind']} {item['metadata']['name']} selects {pods}"
    return pods


def test_port_names_exist_in_the_pods_they_are_meant_for(rendered: Rendered) -> None:
    for pod, container in containers(rendered):
        probed = {probe["httpGet"]["port"] for key, probe in container.items() if key.endswith("Probe")}
        assert probed <= {port["name"] for port in container.get("ports", [])}, pod.owner
    for service in rendered.of_kind("Service"):
        for pod in some(rendered.selected(service["spec"]["selector"]), service):
            for port in service["spec"]["ports"]:
                assert pod.ports[port["targetPort"]] == port["port"], service["metadata"]["name"]
    for monitor in rendered.of_kind("PodMonitor"):
        for pod in some(rendered.selected(monitor["spec"]["selector"]["matchLabels"]), monitor):
            assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= set(pod.ports)


def test_selectors_find_their_own_pods(rendered: Rendered, case: str) -> None:
    for item in rendered.of_kind("Deployment", "StatefulSet", "PodDisruptionBudget"):
        selector = item["spec"]["selector"]["matchLabels"]
        pods = some(rendered.selected(selector), item)
        assert {pod.component for pod in pods} == {item["metadata"]["labels"][COMPONENT]}
        # They are immutable in a Deployment: a version or a label of the user's must not be among them.
        assert set(selector) == {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component")}
    for autoscaler in rendered.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        target = autoscaler["spec"]["scaleTargetRef"]
        assert rendered.one(target["kind"], target["name"])
    settings = settings_of(rendered.pod("trainer").main)
    actors = rendered.selected(dict(pair.split("=") for pair in settings.actor_selector.split(",") if pair))
    found = {pod.component for pod in actors if settings.actor_selector}, settings.pod_namespace
    assert found == ((set(), "") if case == "no-kubernetes-api" else ({"actor"}, "train"))


def test_what_a_pod_mounts_is_made_by_the_release_or_named_by_the_values(rendered: Rendered, case: str) -> None:
    made = {(item["kind"], item["metadata"]["name"]) for item in rendered.objects}
    made |= {("Secret", item["spec"]["secretName"]) for item in rendered.of_kind("Certificate")}
    for volume in (volume for pod in rendered.pods for volume in pod.spec.get("volumes", [])):
        for source, kind, key in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
            if source in volume and not volume[source].get("optional"):
                name = volume[source][key]
                assert (kind, name) in made or f"'{name}'" in str(CASES[case].values), volume
