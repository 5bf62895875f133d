"""Random values that a JSON schema allows, for the part of draft 7 that the chart's own values use.

Not for recipes, and not for schemas in general: an unknown keyword is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]
_NOTES = {"description", "default", "title", "$schema", "definitions", "format"}
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
