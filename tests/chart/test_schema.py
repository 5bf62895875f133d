"""values.schema.json says what values.yaml says, refuses what is misspelt, and lets through only what renders."""

import base64
import functools
import gzip
import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deploy.tools.recipe_schema import SECTIONS, recipe_definitions, text, with_recipe
from deploy.tools.values_reference import comments, default_of, meaning, read_schema, values
from pipelinerl.kube.checks import problems
from pipelinerl.recipe.loading import parse_yaml, recipe_from_data
from tests.chart.rendering import CHART, HelmError, render, rendered_text

Schema = Mapping[str, Any]
_NOTES = {"title", "$schema", "definitions", "format"}
_MOST_ITEMS = 2
_CHARACTERS = st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])
"""Those that YAML takes."""
_TEXT = st.text(_CHARACTERS, max_size=12)
_ANYTHING = st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), _TEXT | st.integers(0, 9), max_size=2)


def allowed(schema: Schema, definitions: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Raises `ValueError` for a keyword that is not known here."""
    if "$ref" in schema:
        return allowed(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return st.one_of([allowed(part, definitions) for part in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return st.one_of([_of_type(kind, schema, definitions) for kind in kinds])


def _of_type(kind: str, schema: Schema, definitions: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    keywords = set(schema) - _NOTES - {"type"}
    if kind == "object":
        _check(keywords, {"properties", "required", "additionalProperties", "propertyNames"})
        return _object(schema, definitions)
    if kind == "array":
        _check(keywords, {"items", "minItems"})
        fewest = schema.get("minItems", 0)
        items = allowed(schema["items"], definitions) if "items" in schema else _ANYTHING
        return st.lists(items, min_size=fewest, max_size=fewest + _MOST_ITEMS)
    if kind == "string":
        _check(keywords, {"pattern", "minLength", "not"})
        return _string(schema)
    if kind == "integer":
        _check(keywords - {"properties", "additionalProperties"}, {"minimum", "maximum"})
        return st.integers(schema.get("minimum", -(2**31)), schema.get("maximum", 2**31))
    if kind == "number":
        _check(keywords, {"minimum", "exclusiveMinimum", "maximum"})
        above = schema.get("exclusiveMinimum")
        least = schema["minimum"] if above is None else above
        return st.floats(least, schema["maximum"], exclude_min=above is not None, allow_subnormal=False)
    return st.none() if kind == "null" else st.booleans()


def _object(schema: Schema, definitions: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "properties" in schema:
        parts = {name: allowed(part, definitions) for name, part in schema["properties"].items()}
        needed = schema.get("required", [])
        optional = {name: part for name, part in parts.items() if name not in needed}
        return st.fixed_dictionaries({name: parts[name] for name in needed}, optional=optional)
    if "propertyNames" not in schema:
        return _ANYTHING
    names = _string(schema["propertyNames"])
    return st.dictionaries(names, allowed(schema["additionalProperties"], definitions), max_size=_MOST_ITEMS)


def _string(schema: Schema) -> st.SearchStrategy[str]:
    pattern = schema.get("pattern", "").replace("$", r"\Z")
    strings = st.from_regex(pattern, alphabet=_CHARACTERS) if pattern else _TEXT
    fewest, refused = schema.get("minLength", 0), schema.get("not", {})
    return strings.filter(
        lambda text: (
            len(text) >= fewest
            and text not in refused.get("enum", ())
            and not text.startswith(refused.get("pattern", "^\0").removeprefix("^"))
        )
    )


def _check(found: set[str], known: set[str]) -> None:
    if found - known:
        raise ValueError(f"keywords {sorted(found - known)} are not known here")


SCHEMA = read_schema()
VALUES_TEXT = (CHART / "values.yaml").read_text(encoding="utf-8")
VALUES: dict[str, Any] = yaml.safe_load(VALUES_TEXT)
RENEW = "python -m deploy.tools.recipe_schema --write"


LEAVES = values(SCHEMA)


def test_the_schema_is_draft_7_takes_the_values_that_ship_and_has_the_recipe_as_the_models_say() -> None:
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft7Validator(SCHEMA)
    assert list(validator.iter_errors(VALUES)) == []
    assert text(with_recipe(SCHEMA)) == (CHART / "values.schema.json").read_text(encoding="utf-8"), RENEW
    assert set(recipe_definitions()) <= set(SCHEMA["definitions"])


def test_every_value_has_a_default_and_a_meaning_in_values_yaml() -> None:
    assert len(LEAVES) > 150
    meanings = comments(VALUES_TEXT)
    for path in LEAVES:
        default_of(path)
        assert len(meaning(path, meanings)) > 10, path


def test_sections_of_values_are_closed() -> None:
    def check(schema: dict[str, Any]) -> None:
        assert schema["additionalProperties"] is False
        for part in schema["properties"].values():
            if "properties" in part:
                check(part)

    check(SCHEMA)
    for name in ("image", "serviceAccount", "podDisruptionBudget", "Recipe"):
        check(SCHEMA["definitions"][name])


def test_a_null_is_an_empty_value_where_that_is_allowed_and_refused_by_name_elsewhere() -> None:
    """Helm removes the default of a null before it looks at the schema."""
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
        assert render({section: empty[section]}).of_kind("Deployment"), section
    for one in ({"actor": None}, {"trainer": {"persistence": {"keep": None}}}, {"verifier": {"serviceAccount": None}}):
        with pytest.raises(HelmError, match="missing property"):
            render(one)


def test_a_release_leaves_most_of_its_secret_to_the_users_files() -> None:
    """Helm stores chart and manifests in a Secret of at most 1 MiB, as base64 of compressed JSON, in which files are base64."""
    files = [base64.b64encode(path.read_bytes()).decode() for path in sorted(CHART.rglob("*")) if path.is_file()]
    stored = base64.b64encode(gzip.compress(json.dumps([*files, rendered_text()]).encode()))
    assert len(stored) < 175_000


REFUSED: dict[str, dict[str, Any]] = yaml.safe_load(r"""
"unknown value": {actors: {}}
"unknown value of a section": {actor: {replica: 3}}
"unknown value of a part": {nats: {persistence: {sizes: 1Gi}}}
"misspelt recipe field": {recipe: {set: {trainer: {stepz: 3}}}}
"misspelt recipe section": {recipe: {set: {trainers: {steps: 3}}}}
"misspelt field of a whole recipe": {recipe: {inline: {name: a, modle: {}}}}
"text for a number": {actor: {replicas: three}}
"text for a number of the recipe": {recipe: {set: {trainer: {learning_rate: small}}}}
"number for text": {run: 7}
"number out of range": {recipe: {set: {sampling: {temperature: 9}}}}
"null for a number": {recipe: {set: {trainer: {steps: null}}}}
"not a choice": {recipe: {set: {algorithm: {loss: reinforze}}}}
"two servers of NATS": {nats: {replicas: 2}}
"true for a section": {tls: true}
"a path as a model": {model: {name: /models/llama}}
"a run that cannot be a subject": {run: My.Run}
"a Secret that no object can be called": {storage: {existingSecret: my secret}}
"the same of the page": {trainer: {page: {ingress: {tlsSecret: TLS}}}}
"a size without a unit": {nats: {persistence: {size: '32'}}}
"a variable of the chart's own": {actor: {extraEnv: [{name: PIPELINERL_RUN, value: x}]}}
"a volume of the chart's own": {actor: {extraVolumes: [{name: data, emptyDir: {}}]}}
"labels that are no labels": {actor: {podLabels: {queue: a b}}}
"an address as a registry": {images: {registry: 'https://registry.example.com/ml'}}
"no tag of NATS": {nats: {image: {tag: ''}}}
"a login in an endpoint": {tracing: {endpoint: 'http://user:secret@collector:4318'}}
"no threshold of an alert": {metrics: {prometheusRule: {thresholds: {essratio: 0.9}}}}
"a runbook that is no URL": {metrics: {prometheusRule: {runbook: docs/runbook.md}}}
"a port out of range": {networkPolicy: {hub: {ports: [70000]}}}
""")


@pytest.mark.parametrize("why", REFUSED)
def test_helm_refuses(why: str) -> None:
    with pytest.raises(HelmError, match="values don't meet the specifications of the schema"):
        render(REFUSED[why])


def _partial(section: Schema) -> Schema:
    """A section as values give it: Helm adds the rest before it looks at the schema."""
    inner = {name: _partial(part) for name, part in section.get("properties", {}).items()}
    return {key: part for key, part in section.items() if key != "required"} | ({"properties": inner} if inner else {})


def _generated() -> st.SearchStrategy[dict[str, Any]]:
    """Any sections of what the schema allows, but for the recipe's fields: those are test_recipe.py's."""
    sections = dict(SCHEMA["properties"])
    recipe = {"type": "object", "properties": {"name": {"enum": ["gsm", "arithmetic"]}}}
    definitions = SCHEMA["definitions"] | {name: _partial(SCHEMA["definitions"][name]) for name in SECTIONS}
    parts = {name: allowed(_partial(schema), definitions) for name, schema in (sections | {"recipe": recipe}).items()}
    return st.fixed_dictionaries({}, optional=parts)


@settings(
    max_examples=25,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # without shrinking: an example takes half a second
)
@given(_generated())
def test_what_the_schema_allows_renders_or_is_refused_by_name(values: dict[str, Any]) -> None:
    """The Job finds what it checks in each, too."""
    refusal = ""
    try:
        rendered = render(values)
        assert rendered.of_kind("Deployment")
        for config in rendered.of_kind("ConfigMap"):
            if "values.yaml" in config.get("data", {}):
                recipe = recipe_from_data(parse_yaml(config["data"]["recipe.yaml"], ""), "")
                assert isinstance(problems(yaml.safe_load(config["data"]["values.yaml"]), recipe), list)
    except HelmError as error:
        refusal = str(error)
    assert not refusal or "\n\npipelinerl: " in refusal, refusal
