"""The chart's `tracing` values: the standard variables in every service's pods, and a way to the collector."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.service.settings import read_settings
from pipelinerl.telemetry.tracing import TracingSettings
from tests.chart.conftest import rendered_case
from tests.chart.rendering import NAMESPACE, SERVICES, HelmError, Rendered, render

ENDPOINT = "http://otel-collector.observability:4318"


def otel_variables(rendered: Rendered, component: str) -> dict[str, str]:
    return {
        entry["name"]: entry.get("value", "")
        for entry in rendered.pod(component).main["env"]
        if "OTEL" in entry["name"]
    }


def collector_ports(rendered: Rendered, component: str) -> list[int]:
    """Ports of any namespace's pods that this service may call, DNS aside."""
    specs = [policy["spec"] for policy in rendered.of_kind("NetworkPolicy")]
    label = "app.kubernetes.io/component"
    own = [spec for spec in specs if spec["podSelector"]["matchLabels"].get(label) == component]
    rules = [rule for spec in own for rule in spec.get("egress", []) if {"namespaceSelector": {}} in rule["to"]]
    return [entry["port"] for rule in rules for entry in rule["ports"]]


def test_traces_are_off_by_default() -> None:
    for component in SERVICES:
        assert otel_variables(rendered_case("default"), component) == {}
        assert collector_ports(rendered_case("default"), component) == []


@pytest.mark.parametrize("component", SERVICES)
def test_every_service_traces_to_the_collector_and_may_reach_it(
    component: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rendered = rendered_case("traces")
    variables = otel_variables(rendered, component)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = read_settings(TracingSettings)
    assert (settings.traces_exporter, settings.endpoint, settings.protocol) == ("otlp", ENDPOINT, "http/protobuf")
    assert (settings.traces_sampler, settings.traces_sampler_arg) == ("parentbased_traceidratio", "0.05")
    assert (
        variables["OTEL_RESOURCE_ATTRIBUTES"] == f"k8s.namespace.name={NAMESPACE},k8s.pod.name=$(PIPELINERL_INSTANCE)"
    )
    names = [entry["name"] for entry in rendered.pod(component).main["env"]]
    assert names.index("PIPELINERL_INSTANCE") < names.index("OTEL_RESOURCE_ATTRIBUTES")  # else it is not expanded
    (headers,) = (e for e in rendered.pod(component).main["env"] if e["name"] == "OTEL_EXPORTER_OTLP_HEADERS")
    assert headers["valueFrom"]["secretKeyRef"] == {"name": "collector-login", "key": "headers"}
    assert collector_ports(rendered, component) == [4317, 4318]


def test_the_verifier_resolves_the_collectors_name() -> None:
    (policy,) = (
        p for p in rendered_case("traces").of_kind("NetworkPolicy") if p["metadata"]["name"].endswith("-verifier")
    )
    assert 53 in [entry["port"] for rule in policy["spec"]["egress"] for entry in rule["ports"]]


def test_the_way_to_the_collector_can_be_narrowed() -> None:
    to = [{"ipBlock": {"cidr": "203.0.113.7/32"}}]
    rendered = render(
        {
            "tracing": {"endpoint": "https://otel.example.com"},
            "networkPolicy": {"tracing": {"to": to, "ports": [443]}},
        }
    )
    egress = [rule for policy in rendered.of_kind("NetworkPolicy") for rule in policy["spec"].get("egress", [])]
    assert [rule["ports"] for rule in egress if rule["to"] == to] == [[{"protocol": "TCP", "port": 443}]] * len(
        SERVICES
    )


def test_headers_without_an_endpoint_are_refused() -> None:
    with pytest.raises(HelmError, match=r"tracing\.headersSecret: login is not used"):
        render({"tracing": {"headersSecret": "login"}})


@pytest.mark.parametrize(
    ("tracing", "port"),
    [
        ({"endpoint": "http://collector:9999/v1"}, "9999"),
        ({"endpoint": "https://otel.example.com/in:4318"}, "443"),
        ({"endpoint": "http://[2001:db8::4318]"}, "80"),
        ({"endpoint": "http://[2001:db8::1]:55680"}, "55680"),
        ({"endpoint": "http://collector", "protocol": "grpc"}, "443"),
    ],
)
def test_an_endpoint_that_the_policies_keep_out_is_refused(tracing: dict[str, str], port: str) -> None:
    with pytest.raises(HelmError, match=rf"networkPolicy\.tracing\.ports: \[4317, 4318\] lacks port {port} of"):
        render({"tracing": tracing})
    render({"tracing": tracing, "networkPolicy": {"tracing": {"ports": [4318, int(port)]}}})
    render({"tracing": tracing, "networkPolicy": {"enabled": False}})
    render({"tracing": tracing, "networkPolicy": {"tracing": {"to": []}}})


def test_a_login_in_the_endpoint_is_refused() -> None:
    with pytest.raises(HelmError, match="endpoint"):
        render({"tracing": {"endpoint": "http://user:secret@collector:4318"}})
