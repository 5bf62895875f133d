"""The schema of a tool, as a model reads it, from a Python function."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from enum import Enum
from typing import Any, Dict, Literal, Optional  # noqa: UP035

import pytest

from pipelinerl.episodes import tool_of
from pipelinerl.errors import UserError


def search(
    query: str,
    limit: int = 10,
    tags: list[str] | None = None,
    order: Literal["new", "old"] = "new",
    *,
    weights: dict[str, float],
    exact: Optional[bool] = None,  # noqa: UP045
    more: list = [],  # noqa: B006
    about: Dict = {},  # noqa: UP006, B006
) -> list[str]:
    """Finds documents.

    Newest first.

    Args:
        query: Words to look for: all
            of them.
        tags (list): Kinds of documents.

    Returns:
        limit: not a parameter's text.
    """
    return [query]


def test_name_hints_and_docstring_are_the_schema() -> None:
    assert tool_of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds documents.\n\nNewest first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words to look for: all of them."},
                    "limit": {"type": "integer", "default": 10},
                    "tags": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                        "description": "Kinds of documents.",
                        "default": None,
                    },
                    "order": {"enum": ["new", "old"], "default": "new"},
                    "weights": {"type": "object", "additionalProperties": {"type": "number"}},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
                    "more": {"type": "array", "items": {}, "default": []},
                    "about": {"type": "object", "additionalProperties": {}, "default": {}},
                },
                "required": ["query", "weights"],
                "additionalProperties": False,
            },
        },
    }


class Order(Enum):
    NEW = 1


def no_hint(query) -> None: ...  # type: ignore[no-untyped-def]
def odd_hint(query: set[str]) -> None: ...
def starred(*queries: str) -> None: ...
def odd_default(query: str = object()) -> None: ...  # type: ignore[assignment]
def yields(query: str) -> Iterator[str]:
    yield query


async def yields_later(query: str) -> AsyncIterator[str]:
    yield query


def list_as_hint(query: [str]) -> None: ...  # type: ignore[valid-type]
def odd_literal(query: Literal[Order.NEW]) -> None: ...
def unknown_hint(query: Nowhere) -> None: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_hint, "tool no_hint: parameter query has no type hint; write one, such as query: str"),
        (odd_hint, "tool odd_hint: parameter query has type set; use str, int"),
        (starred, "tool starred: parameter queries cannot be passed by name"),
        (odd_default, "tool odd_default: parameter query has the default <object"),
        (yields, "tool yields: is a generator function (it yields)"),
        (yields_later, "tool yields_later: is a generator function (it yields)"),
        (odd_literal, "tool odd_literal: parameter query has type Literal; use str, int"),
        (unknown_hint, "tool unknown_hint: its type hints cannot be read: name 'Nowhere'"),
        (list_as_hint, "tool list_as_hint: parameter query has type [<class 'str'>]; use str, int"),
        (max, "tool max: its type hints cannot be read: no signature found"),
        (lambda: None, "'<lambda>' cannot be a tool: use a function whose name has"),
    ],
)
def test_what_a_model_cannot_be_told_is_an_error(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        tool_of(function)
    assert said in str(raised.value)
