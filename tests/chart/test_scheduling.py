"""Where pods may go."""

from __future__ import annotations

import pytest

from tests.chart.conftest import rendered_case
from tests.chart.rendering import render

GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


@pytest.mark.parametrize("component", ["actor", "trainer"])
def test_pods_with_gpus_go_to_tainted_gpu_nodes(component: str) -> None:
    assert rendered_case("default").pod(component).spec["tolerations"] == [GPU_TAINT]


def test_no_other_pod_goes_there() -> None:
    for pod in rendered_case("default").pods:
        assert pod.component in ("actor", "trainer") or "tolerations" not in pod.spec, pod.owner
    for pod in rendered_case("cpu").pods:
        assert "tolerations" not in pod.spec, pod.owner


def test_own_tolerations_are_added_once() -> None:
    spot = {"key": "spot", "operator": "Exists"}
    rendered = render({"actor": {"tolerations": [GPU_TAINT, spot]}, "verifier": {"tolerations": [spot]}})
    assert rendered.pod("actor").spec["tolerations"] == [GPU_TAINT, spot]
    assert rendered.pod("verifier").spec["tolerations"] == [spot]


def test_the_taint_of_gpu_nodes_is_a_value() -> None:
    taint = {"key": "amd.com/gpu", "operator": "Exists"}
    rendered = render({"gpu": {"resource": "amd.com/gpu", "tolerations": [taint]}})
    assert rendered.pod("trainer").spec["tolerations"] == [taint]
