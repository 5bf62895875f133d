"""Where pods cannot be run as processes, the tests here are skipped, with the reason."""

from __future__ import annotations

import pytest

from tests.cluster.kernel import why_not_here


@pytest.fixture(scope="session")
def kernel() -> None:
    reason = why_not_here()
    if reason:
        pytest.skip(f"the mini cluster: {reason}")
