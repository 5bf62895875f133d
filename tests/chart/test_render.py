"""Every case renders to objects that Kubernetes takes, and the default one to what it was."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.chart.cases import CASES
from tests.chart.conftest import rendered_case
from tests.chart.rendering import CHART, CPU_VALUES, Rendered, helm, rendered_text

OLDEST, NEWEST = "1.31", "1.37"
BETWEEN = ("1.32", "1.33", "1.34", "1.35", "1.36")
OF_OTHERS = {
    "cert-manager.io/v1": "Certificate",
    "keda.sh/v1alpha1": "ScaledObject",
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule"),
}
"""Custom resources: their schemas are not Kubernetes's."""
SNAPSHOTS = Path(__file__).parent / "snapshots"
RENEW = "python -m tests.chart.renew_snapshots"


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """kubernetes_validate parses a file of definitions, 1 MB, for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@functools.cache
def _invalid(text: str, version: str) -> str:
    try:
        kubernetes_validate.validate(json.loads(text), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{list(error.path)}: {error.message}"
    return ""


def test_the_newest_schemas_are_looked_at() -> None:
    assert kubernetes_validate.latest_version().startswith(NEWEST)


@pytest.mark.parametrize("values", [(), ("--values", CPU_VALUES)], ids=["default", "cpu"])
def test_helm_lint_has_nothing_to_say(values: tuple[str, ...]) -> None:
    helm("lint", "--strict", CHART, *values)


@pytest.mark.parametrize(
    "version", [OLDEST, *(pytest.param(version, marks=pytest.mark.soak) for version in BETWEEN), NEWEST]
)
def test_kubernetes_takes_every_object(case: str, version: str) -> None:
    problems = {}
    for item in rendered_case(case).objects:
        if item["kind"] in OF_OTHERS.get(item["apiVersion"], ()):
            continue
        problem = _invalid(json.dumps(item, sort_keys=True), version)
        if problem:
            problems[f"{item['kind']}/{item['metadata']['name']}"] = problem
    assert not problems


def test_an_unknown_field_would_be_found() -> None:
    (deployment,) = [item for item in rendered_case("cpu").of_kind("Deployment") if "actor" in item["metadata"]["name"]]
    wrong = json.loads(json.dumps(deployment))
    wrong["spec"]["template"]["spec"]["nodeselector"] = {"a": "b"}
    assert "nodeselector" in _invalid(json.dumps(wrong), OLDEST)


def test_custom_resources_are_rendered_somewhere() -> None:
    """Else the list of what is not validated would hide a misspelt kind."""
    seen = {(item["apiVersion"], item["kind"]) for name in CASES for item in rendered_case(name).objects}
    for version, kinds in OF_OTHERS.items():
        for kind in (kinds,) if isinstance(kinds, str) else kinds:
            assert (version, kind) in seen


def test_no_two_objects_share_a_name(rendered: Rendered) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered.objects]
    assert len(names) == len(set(names))


def test_every_object_carries_the_release(rendered: Rendered, case: str) -> None:
    for item in rendered.objects:
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "pipelinerl"
        assert labels["app.kubernetes.io/instance"] == CASES[case].release
        assert labels["app.kubernetes.io/managed-by"] == "Helm"


@pytest.mark.parametrize("name", ["default", "cpu"])
def test_the_chart_renders_what_it_did(name: str) -> None:
    """After a change that is wanted: python -m tests.chart.renew_snapshots, and read the difference."""
    case = CASES[name]
    wanted = (SNAPSHOTS / f"{name}.yaml").read_text(encoding="utf-8")
    assert without_passwords(rendered_text(case.values, case.files)) == wanted, f"if it should: {RENEW}"


def without_passwords(manifests: str) -> str:
    """Generated passwords are others each time."""
    documents = manifests.split("---\n")
    return "---\n".join(_masked(document) for document in documents)


def _masked(document: str) -> str:
    parsed = yaml.safe_load(document)
    if not parsed or parsed["kind"] != "Secret":
        return document
    for value in parsed["data"].values():
        document = document.replace(value, "(generated)")
    return document


def test_passwords_are_other_ones_each_time() -> None:
    secrets = [
        yaml.safe_load(document)["data"]
        for _ in range(2)
        for document in rendered_text().split("---\n")
        if "kind: Secret" in document
    ]
    assert len(secrets) == 2
    assert all(secrets[0][key] != secrets[1][key] for key in ("trainer", "actor", "admin", "route"))
    assert len({*secrets[0].values()}) == len(secrets[0])
