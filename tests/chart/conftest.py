"""Renders each case once."""

from __future__ import annotations

import functools

import pytest

from tests.chart.cases import CASES
from tests.chart.rendering import Rendered, render


@functools.cache
def rendered_case(name: str) -> Rendered:
    case = CASES[name]
    return render(case.values, case.files, case.release)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rendered(case: str) -> Rendered:
    """Of each case in turn."""
    return rendered_case(case)
