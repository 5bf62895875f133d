"""values.schema.json says what values.yaml says, refuses what is misspelt, and lets through only what renders."""

import base64
import functools
import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.tools.recipe_schema import recipe_definitions, text, with_recipe
from deploy.tools.values_reference import default_of, read_schema, values
from tests.chart.rendering import CHART, HelmError, render, rendered_text
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
