"""values.schema.json says what values.yaml says, refuses what is misspelt, and lets through only what renders. What documents
say of the chart is true: values exist, examples render; docs/chart-values.md is generated.
"""

import base64
import functools
import gzip
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.tools.recipe_schema import recipe_definitions, text, with_recipe
from deploy.tools.values_reference import PART, default_of, read_schema, reference, values
from tests.chart.cases import rendered_case
from tests.chart.rendering import CHART, COMPONENT, ROOT, SERVICES, WORKLOADS, HelmError, Rendered, render, rendered_text
from tests.chart.test_recipe import said_by_the_job

SCHEMA = read_schema()
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
RENEW = "python -m deploy.tools.recipe_schema --write"
LEAVES = values(SCHEMA)


def test_the_schema_is_draft_7_takes_the_values_that_ship_and_has_the_recipe_as_the_models_say() -> None:
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft7Validator(SCHEMA)
    assert list(validator.iter_errors(VALUES)) == []
    assert text(with_recipe(SCHEMA)) == (CHART / "values.schema.json").read_text(encoding="utf-8"), RENEW
    assert set(recipe_definitions()) <= set(SCHEMA["definitions"])


def test_sections_of_values_are_closed() -> None:
    parts = [SCHEMA, *(SCHEMA["definitions"][name] for name in ("image", "serviceAccount", "podDisruptionBudget", "Recipe"))]
    for schema in parts:
        assert schema["additionalProperties"] is False
        parts += [part for part in schema["properties"].values() if "properties" in part]
    assert len(parts) > 40


def test_a_null_is_an_empty_value_where_that_is_allowed_and_refused_by_name_elsewhere(tmp_path: Path) -> None:
    """Helm removes the default of a null before it looks at the schema. The Job reads what is left."""
    validator, empty = jsonschema.Draft7Validator(SCHEMA), dict[str, Any]()
    for path in LEAVES:
        *sections, name = path.split(".")
        merged = json.loads(json.dumps(VALUES))  # without YAML's aliases
        del functools.reduce(lambda found, section: found[section], sections, merged)[name]
        if errors := [error.message for error in validator.iter_errors(merged)]:
            assert errors == [f"{name!r} is a required property"]
        elif path != "networkPolicy.dns.to":  # without which nothing works
            functools.reduce(lambda found, section: found.setdefault(section, {}), sections, empty)[name] = None
    assert {"keep", "size"} & empty["trainer"]["persistence"].keys() == {"size"}, "an uninstall never deletes by accident"
    for section in empty:
        assert isinstance(said_by_the_job(render({section: empty[section]}), tmp_path), list), section
    for one in ({"actor": None}, {"trainer": {"persistence": {"keep": None}}}, {"verifier": {"serviceAccount": None}}):
        with pytest.raises(HelmError, match="missing property"):
            render(one)


def test_a_release_leaves_most_of_its_secret_to_the_users_files() -> None:
    """Helm stores chart and manifests in a Secret of at most 1 MiB, as base64 of compressed JSON, in which files are base64."""
    files = [base64.b64encode(path.read_bytes()).decode() for path in sorted(CHART.rglob("*")) if path.is_file()]
    assert len(base64.b64encode(gzip.compress(json.dumps([*files, rendered_text()]).encode()))) < 175_000


REFUSED: dict[str, dict[str, Any]] = yaml.safe_load(r"""
"unknown value": {nats: {persistence: {sizes: 1Gi}}}
"misspelt recipe field": {recipe: {set: {trainer: {stepz: 3}}}}
"text for a number": {actor: {replicas: three}}
"not a choice of the recipe": {recipe: {set: {algorithm: {loss: reinforze}}}}
"two servers of NATS": {nats: {replicas: 2}}
"true for a section": {tls: true}
"a path as a model": {model: {name: /models/llama}}
"a run that cannot be a subject": {run: My.Run}
"a Secret that no object can be called": {storage: {existingSecret: my secret}}
"a size without a unit": {nats: {persistence: {size: '32'}}}
"a variable of the chart's own": {actor: {extraEnv: [{name: PIPELINERL_RUN, value: x}]}}
"a volume of the chart's own": {actor: {extraVolumes: [{name: data, emptyDir: {}}]}}
"labels that are no labels": {actor: {podLabels: {queue: a b}}}
"an address as a registry": {images: {registry: 'https://registry.example.com/ml'}}
"a login in an endpoint": {tracing: {endpoint: 'http://user:secret@collector:4318'}}
"no threshold of an alert": {metrics: {prometheusRule: {thresholds: {essratio: 0.9}}}}
"a port out of range": {networkPolicy: {hub: {ports: [70000]}}}
""")


@pytest.mark.parametrize("why", REFUSED)
def test_helm_refuses(why: str) -> None:
    with pytest.raises(HelmError, match="values don't meet the specifications of the schema"):
        render(REFUSED[why])


def test_each_switch_the_other_way_and_each_choice_renders_or_is_refused_by_name(tmp_path: Path) -> None:
    """The Job finds what it checks in each, too."""
    switches = {path: schema.get("enum", [True, False] * (schema.get("type") == "boolean")) for path, schema in LEAVES.items()}
    tried = [(path, value) for path, choices in switches.items() for value in choices if value != default_of(path)]
    assert len(tried) > 50
    for path, value in tried:
        try:
            rendered = render(functools.reduce(lambda inner, name: {name: inner}, reversed(path.split(".")), value))
        except HelmError as error:
            if "\n\npipelinerl: " not in str(error):
                raise
        else:
            assert path == "validation.enabled" or isinstance(said_by_the_job(rendered, tmp_path), list)


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


def test_values_that_the_text_names_exist() -> None:
    named = set(re.findall(r"`((?:actor|trainer|verifier|nats|tls|network|networkPolicy|images|metrics)\.[\w.]+)[`=:]", PAGE))
    known = {*LEAVES, *(path.rpartition(".")[0] for path in LEAVES)}
    others = {"trainer.nproc", "actor.engine.tensor_parallel_size", "tls.crt", "tls.key"}  # recipe fields, files
    assert len(named) > 15
    within = {name for name in named if any(name.startswith(f"{leaf}.") for leaf in LEAVES)}  # verifier.resources.limits
    assert named - within <= known | others, named - within - known


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
