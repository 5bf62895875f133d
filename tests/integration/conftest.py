"""A certificate authority for the tests of a file."""

import pytest

from tests.support.certificates import Authority


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()
