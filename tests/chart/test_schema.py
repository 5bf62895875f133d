"""values.schema.json says what values.yaml says, refuses what is misspelt, and lets through only what renders."""

import functools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.tools.recipe_schema import recipe_definitions, text, with_recipe
from tests.chart.rendering import CHART, CPU_VALUES, HelmError, render

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
RENEW = "python -m deploy.tools.recipe_schema --write"


def _values(properties: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(dotted path, schema) of every value that is no section of the chart's own."""
    for name, schema in properties.items():
        at = f"{path}.{name}" if path else name
        if "properties" in schema and "default" not in schema:
            yield from _values(schema["properties"], at)
        else:
            yield at, schema


LEAVES = dict(_values(SCHEMA["properties"]))


def test_the_schema_is_draft_7_and_takes_the_values_that_ship() -> None:
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft7Validator(SCHEMA)
    assert list(validator.iter_errors(VALUES)) == []
    assert list(validator.iter_errors(yaml.safe_load(CPU_VALUES.read_text(encoding="utf-8")))) == []


def test_the_recipes_part_is_what_the_models_say() -> None:
    assert text(with_recipe(SCHEMA)) == (CHART / "values.schema.json").read_text(encoding="utf-8"), RENEW
    assert set(recipe_definitions()) <= set(SCHEMA["definitions"])


def test_every_value_has_a_description_and_the_default_of_values_yaml() -> None:
    assert len(LEAVES) > 150
    for path, schema in LEAVES.items():
        assert schema.get("description", "").endswith("."), path
        default = functools.reduce(lambda found, name: found[name], path.split("."), VALUES)
        assert schema.get("default", "none") == default, path


def test_sections_have_descriptions_are_closed_and_come_in_the_order_of_values_yaml() -> None:
    def check(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        assert schema["additionalProperties"] is False, path
        assert list(schema["properties"]) == list(values), path
        for name, part in schema["properties"].items():
            if "properties" in part and "default" not in part:
                assert part["description"], f"{path}.{name}"
                check(part, values[name], f"{path}.{name}")

    check(SCHEMA, VALUES, "")


REFUSED: dict[str, dict[str, Any]] = {
    "unknown value": {"actors": {}},
    "unknown value of a section": {"actor": {"replica": 3}},
    "unknown value of a part": {"nats": {"persistence": {"sizes": "1Gi"}}},
    "misspelt recipe field": {"recipe": {"set": {"trainer": {"stepz": 3}}}},
    "misspelt recipe section": {"recipe": {"set": {"trainers": {"steps": 3}}}},
    "misspelt field of a whole recipe": {"recipe": {"inline": {"name": "a", "modle": {}}}},
    "text for a number": {"actor": {"replicas": "three"}},
    "text for a number of the recipe": {"recipe": {"set": {"trainer": {"learning_rate": "small"}}}},
    "number for text": {"run": 7},
    "number out of range": {"recipe": {"set": {"sampling": {"temperature": 9}}}},
    "null for a number": {"recipe": {"set": {"trainer": {"steps": None}}}},
    "not a choice": {"recipe": {"set": {"algorithm": {"loss": "reinforze"}}}},
    "two servers of NATS": {"nats": {"replicas": 2}},
    "true for a section": {"tls": True},
    "a path as a model": {"model": {"name": "/models/llama"}},
    "a run that cannot be a subject": {"run": "My.Run"},
    "a Secret that no object can be called": {"storage": {"existingSecret": "my secret"}},
    "the same of the page": {"trainer": {"page": {"ingress": {"tlsSecret": "TLS"}}}},
    "a size without a unit": {"nats": {"persistence": {"size": "32"}}},
    "a variable of the chart's own": {"actor": {"extraEnv": [{"name": "PIPELINERL_RUN", "value": "x"}]}},
    "a volume of the chart's own": {"actor": {"extraVolumes": [{"name": "data", "emptyDir": {}}]}},
    "labels that are no labels": {"actor": {"podLabels": {"queue": "a b"}}},
    "an address as a registry": {"images": {"registry": "https://registry.example.com/ml"}},
    "no tag of NATS": {"nats": {"image": {"tag": ""}}},
    "a login in an endpoint": {"tracing": {"endpoint": "http://user:secret@collector:4318"}},
    "no threshold of an alert": {"metrics": {"prometheusRule": {"thresholds": {"essratio": 0.9}}}},
    "a runbook that is no URL": {"metrics": {"prometheusRule": {"runbook": "docs/runbook.md"}}},
    "a port out of range": {"networkPolicy": {"hub": {"ports": [70000]}}},
}


@pytest.mark.parametrize("why", REFUSED)
def test_helm_refuses(why: str) -> None:
    with pytest.raises(HelmError, match="values don't meet the specifications of the schema"):
        render(REFUSED[why])
