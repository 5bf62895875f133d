"""The suite's own rules: what CI calls a failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import suite
from tests.support.suite import Suite, skip_is_error


def skipped(nodeid: str, reason: str) -> Any:
    return SimpleNamespace(
        nodeid=nodeid, skipped=True, outcome="skipped", longrepr=("file.py", 1, f"Skipped: {reason}")
    )


@pytest.mark.parametrize(
    ("nodeid", "reason", "outcome"),
    [
        ("tests/integration/test_x.py::test_y", "could not import 'vllm'", "failed"),
        ("tests/e2e/test_tour.py::test_y", "no chromium: make test-tools installs it", "failed"),
        ("tests/gpu/test_x.py::test_y", "no CUDA device", "skipped"),
        ("tests/optional/test_x.py", "no torchao", "skipped"),
        ("tests/unit/test_x.py::test_y", "this machine has a GPU", "skipped"),
        ("tests/faults/test_x.py::test_y", "a private network: not root", "skipped"),
        ("tests/unit/test_x.py::test_y", "no node here", "failed"),
    ],
)
def test_in_ci_a_skipped_test_fails_unless_it_needs_what_ci_has_not(
    monkeypatch: pytest.MonkeyPatch, nodeid: str, reason: str, outcome: str
) -> None:
    monkeypatch.setattr(suite, "REQUIRED", True)
    assert skip_is_error(skipped(nodeid, reason)).outcome == outcome
    monkeypatch.setattr(suite, "REQUIRED", False)
    assert skip_is_error(skipped(nodeid, reason)).outcome == "skipped"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Suite:
    """A suite whose unit tests are recorded with 100 s, on a machine as fast as the one that measured."""
    monkeypatch.setattr(suite, "REQUIRED", True)
    monkeypatch.setattr(suite, "calibrate", lambda: 0.05)
    config: Any = SimpleNamespace(getoption=lambda name: "")
    one = Suite(config)
    one.recorded = {"calibration_s": 0.05, "folders": {"tests/unit": 100.0}, "files": {}}
    return one


@pytest.mark.parametrize(
    ("seconds", "calibration_s", "fails"), [(149, 0.05, False), (151, 0.05, True), (151, 0.1, False)]
)
def test_a_folder_that_takes_half_as_long_again_fails_the_session(
    measured: Suite, seconds: float, calibration_s: float, fails: bool
) -> None:
    measured.pace.samples = [calibration_s]
    measured.seconds.update({"tests/unit/test_a.py": 20.0, "tests/unit/test_b.py": seconds - 20.0})
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    measured.pytest_sessionfinish(session)
    assert session.exitstatus == (pytest.ExitCode.TESTS_FAILED if fails else pytest.ExitCode.OK)
    assert bool(measured.exceeded) == fails
