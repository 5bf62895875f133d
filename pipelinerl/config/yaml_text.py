"""YAML text to plain Python data, stricter than PyYAML where a recipe's author would otherwise be surprised.

A key written twice is an error instead of the last one winning, and `1e-6` is a number (YAML 1.1 as PyYAML reads it
makes it a string). Does not know what a recipe is.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from pipelinerl.errors import UserError


class YamlError(UserError):
    """The text is not YAML, or says one thing twice. Attributes: `source` (file), `line` (from 1; 0 = unknown)."""

    def __init__(self, source: str, line: int, problem: str) -> None:
        self.source, self.line, self.problem = source, line, problem
        super().__init__(f"{source}:{line}: {problem}" if line else f"{source}: {problem}")


class _DuplicateKey(yaml.constructor.ConstructorError):
    pass


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses a repeated key and reads every number as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first_line: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in first_line and key != "<<":
                problem = f"key {key!r} is written twice (first on line {first_line[key]}): keep one of them"
                raise _DuplicateKey(None, None, problem, key_node.start_mark)
            first_line[key] = line
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse_yaml(text: str, source: str) -> Any:
    """Data of one YAML document. Raises `YamlError` naming `source`, the line and the problem."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "not YAML"
        raise YamlError(source, mark.line + 1 if mark else 0, problem) from error
    except yaml.reader.ReaderError as error:
        raise YamlError(source, 0, f"not a text file: {error.reason} at position {error.position}") from error
