"""Reads a service's settings from the environment and says, by variable, what is missing or wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings

from pipelinerl.errors import UserError

Settings = TypeVar("Settings", bound=BaseSettings)


def read_settings(kind: type[Settings]) -> Settings:
    """The settings of one service. Raises `UserError` naming each variable, its value and the problem."""
    from_environment: Callable[[], Settings] = kind
    try:
        return from_environment()
    except ValidationError as error:
        prefix = kind.model_config.get("env_prefix", "")
        lines = [f"  - {prefix}{_problem(details)}" for details in error.errors(include_url=False)]
        raise UserError("\n".join(["the environment does not configure this service:", *lines])) from error


def _problem(details: ErrorDetails) -> str:
    name = "_".join(str(part) for part in details["loc"]).upper()
    return f"{name} is not set" if details["type"] == "missing" else f"{name} = {details['input']!r}: {details['msg']}"
