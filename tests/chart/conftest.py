"""Each case in turn."""

import pytest

from tests.chart.cases import CASES, rendered_case
from tests.chart.rendering import Rendered


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rendered(case: str) -> Rendered:
    return rendered_case(case)
