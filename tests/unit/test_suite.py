"""The suite's own rules: what CI calls a failure."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import suite
from tests.support.suite import Suite, skip_is_error


def skipped(nodeid: str, reason: str) -> Any:
    return SimpleNamespace(nodeid=nodeid, skipped=True, outcome="skipped", longrepr=("file.py", 1, f"Skipped: {reason}"))


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


RECORDED = {"tests/chart": 80.0, "tests/contract": 30.0, "tests/integration": 400.0, "tests/unit": 200.0}


@pytest.mark.parametrize(
    ("took", "slower", "too_long"),
    [
        ({"tests/unit": 310.0}, 1.0, ["tests/unit"]),
        ({"tests/unit": 290.0}, 1.0, []),
        ({"tests/unit": 310.0}, 1.2, []),
        ({"tests/contract": 80.0}, 1.0, []),
        ({"tests/contract": 91.0}, 1.0, ["tests/contract"]),
        ({name: 2 * seconds for name, seconds in RECORDED.items()}, 1.0, []),
        ({name: 2 * seconds for name, seconds in RECORDED.items()} | {"tests/unit": 610.0}, 1.0, ["tests/unit"]),
    ],
    ids=["half longer", "a little longer", "slow arithmetic", "short folder", "three times", "slow machine", "both"],
)
def test_a_folder_that_takes_half_as_long_again_fails_the_session(
    monkeypatch: pytest.MonkeyPatch, took: dict[str, float], slower: float, too_long: list[str]
) -> None:
    monkeypatch.setattr(suite, "REQUIRED", True)
    monkeypatch.setattr(suite, "calibrate", lambda: 0.05 * slower)
    config: Any = SimpleNamespace(getoption=lambda name: "")
    one = Suite(config)
    one.recorded = {"calibration_s": 0.05, "folders": RECORDED, "files": {}}
    one.seconds.update({f"{name}/test_a.py": seconds for name, seconds in (RECORDED | took).items()})
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    one.pytest_sessionfinish(session)
    assert [line.partition(":")[0] for line in one.exceeded] == too_long
    assert session.exitstatus == (pytest.ExitCode.TESTS_FAILED if too_long else pytest.ExitCode.OK)
