"""What the documents say of the chart is true: values exist, examples render; docs/chart-values.md is generated."""

import re
from typing import Any

import pytest
import yaml

from deploy.tools.values_reference import PART, reference
from tests.chart.cases import rendered_case
from tests.chart.rendering import COMPONENT, ROOT, SERVICES, WORKLOADS, Rendered, render, rendered_text
from tests.chart.test_schema import LEAVES

NAMES = ("kubernetes", "security", "episodes", "storage")
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}
PAGES["episodes"] = PAGES["episodes"].partition("\n## On Kubernetes\n")[2].partition("\n## ")[0]
PAGE = "\n".join(PAGES.values())
TABLE = (ROOT / "docs" / "chart-values.md").read_text(encoding="utf-8")
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
EXAMPLES = [data for data in BLOCKS if not data.keys() & {"secrets", "rules"}]  # the others are no values


def test_the_table_of_values_is_what_the_schema_says_and_has_every_value_once() -> None:
    assert PART.replaced(TABLE) == TABLE, PART.command
    cells = re.findall(r"^\| (`.+?`) \|", reference(), re.MULTILINE)
    assert sorted(path for cell in cells for path in re.findall(r"`([\w.]+)`", cell)) == sorted(LEAVES)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda data: "-".join(data))
def test_examples_render(example: dict[str, Any]) -> None:
    assert len(EXAMPLES) >= 6
    assert render(example).of_kind("Deployment")


@pytest.mark.parametrize("tool", ["argocd", "flux"])
def test_gitops_examples_render_the_same_twice_and_ignore_the_numbers_that_others_set(tool: str) -> None:
    *_, item = yaml.safe_load_all((ROOT / "deploy" / "gitops" / f"{tool}.yaml").read_text(encoding="utf-8"))
    spec = item["spec"]
    values, rules = spec.get("values"), spec.get("ignoreDifferences")
    if tool == "argocd":
        values = spec["source"]["helm"]["valuesObject"]
    else:
        rules = [rule["target"] | {"jsonPointers": rule["paths"]} for rule in spec["driftDetection"]["ignore"]]
    texts = {rendered_text(values) for _ in range(2)}
    assert len(texts) == 1
    rendered = Rendered([one for one in yaml.safe_load_all(texts.pop()) if one])
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in rendered.of_kind("HorizontalPodAutoscaler")}
    for rule in rendered.one("Role", "pipelinerl-trainer")["rules"]:
        scaled |= {name for one in rule["resources"] if one.endswith("/scale") for name in rule["resourceNames"]}
    workloads = [(item["kind"], item["metadata"]["name"]) for item in rendered.of_kind(*WORKLOADS)]
    ignored = {name for kind, name in workloads for rule in rules if (rule["kind"], rule.get("name", name)) == (kind, name)}
    assert {path for rule in rules for path in rule["jsonPointers"]} == {"/spec/replicas"}
    assert ignored == scaled == {f"pipelinerl-{service}" for service in SERVICES}
    keys = rendered_case("default").one("Secret", "pipelinerl-nats-auth")["data"].keys()
    assert {*re.findall(r"--from-literal=([a-z-]+)=\S*\$\d", PAGES["kubernetes"])} == keys


def test_values_and_objects_that_the_text_and_its_commands_name_exist() -> None:
    named = set(re.findall(r"`((?:actor|trainer|verifier|nats|tls|network|networkPolicy|images|metrics)\.[\w.]+)[`=:]", PAGE))
    known = {*LEAVES, *(path.rpartition(".")[0] for path in LEAVES)}
    others = {"trainer.nproc", "actor.engine.tensor_parallel_size", "tls.crt", "tls.key"}  # recipe fields, files
    assert len(named) > 15
    within = {name for name in named if any(name.startswith(f"{leaf}.") for leaf in LEAVES)}  # verifier.resources.limits
    assert named - within <= known | others, named - within - known
    objects = {item["metadata"]["name"] for item in rendered_case("nats-3").objects}
    by_kind = re.findall(r"(?:deployment|statefulset|service)/([\w-]+)", PAGE)
    by_kind.append("pipelinerl-nats-auth")
    assert {*by_kind, *re.findall(r"(?:delete|describe) (?:pvc|pod|secret) (pipelinerl-\w+)`", PAGE)} <= objects


def test_names_of_certificates_are_those_that_the_page_lists() -> None:
    """In their short forms; certificates have the full ones too, and no wildcards."""
    certificates = rendered_case("everything").of_kind("Certificate")
    assert len(certificates) == 4
    for certificate in certificates:
        names, component = certificate["spec"]["dnsNames"], certificate["metadata"]["labels"][COMPONENT]
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `tls.secrets.{component}` | `pipelinerl"))
        listed = re.findall(r"`(pipelinerl[\w.-]*)`", row)
        assert {*listed, *(f"{name}.train.svc.cluster.local" for name in listed)} <= set(names)
        assert not [name for name in names if "*" in name]
