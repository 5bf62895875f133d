"""The suite as a whole: which worker runs which file, and skips that are errors in CI.

A pytest plugin that tests/conftest.py registers. It does not change what a single test does.
"""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DURATIONS = ROOT / "tests" / "durations.json"
"""Seconds of each longer file when the suite was last measured (`make durations`)."""
REQUIRED = os.environ.get("PIPELINERL_TEST_TOOLS") == "required"
MAY_SKIP = ("tests/gpu/", "tests/optional/")
"""Folders whose tests need what a plain installation does not have: a GPU, torchao, experiment trackers, SmolLM2."""
OF_THE_MACHINE = (
    "GPU",
    "a private network",
    "the mini cluster",
    "cannot mount",
    "no IPv6",
    "the kernel permits no",
    "Landlock ABI",
    "a real cluster",
)
"""Parts of the reasons that no installation step can mend: devices, and what the kernel or its sandbox permits."""


class Suite:
    """Sums up the durations of one pytest invocation, with xdist in the controlling process only."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self.seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """One worker runs a whole file, so that its fixtures are set up once, and one worker each group of `group_of`. They are
        handed out in the order of `pytest_collection_modifyitems`; by default, xdist begins with those of most tests."""
        from xdist.scheduler.loadgroup import LoadGroupScheduling

        class FileScheduling(LoadGroupScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return super()._split_scope(nodeid).partition("::")[0]

        config.option.loadscopereorder = False
        return FileScheduling(config, log) if config.getoption("dist") == "loadgroup" else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Run engines first and then the longest files, so that no worker is left with a long one."""
        if not self.is_worker:
            return
        seconds: dict[str, float] = json.loads(DURATIONS.read_text())

        def key(item: pytest.Item) -> tuple[bool, float, str]:
            name = file_of(item.nodeid)
            return (group_of(item) != "engines", -seconds.get(name, 0.0), name)

        items.sort(key=key)
        for item in items:
            if group := group_of(item):
                item.add_marker(pytest.mark.xdist_group(group))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        return skip_is_error(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        report = yield
        return skip_is_error(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.is_worker:
            self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        path = self.config.getoption("--write-durations")
        if path and not self.is_worker:
            slow = {name: round(seconds, 1) for name, seconds in sorted(self.seconds.items()) if seconds >= 1.0}
            Path(path).write_text(json.dumps(slow, indent=1) + "\n", encoding="utf-8")


def group_of(item: pytest.Item) -> str:
    """Return `engines` for a test that starts a vLLM engine or a whole run, since one at a time is started beside the tests of
    other workers; `ranks` for one of a file that starts ranks, which share a fork server; else nothing."""
    if item.get_closest_marker("engine") or item.get_closest_marker("e2e"):
        return "engines"
    return "ranks" if hasattr(getattr(item, "module", None), "on_ranks") else ""


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def skip_is_error(report: Any) -> Any:
    """In CI a test that is skipped fails: a tool that is missing there is a mistake, and so is a broken import."""
    if REQUIRED and report.skipped and not hasattr(report, "wasxfail") and not report.nodeid.startswith(MAY_SKIP):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(part in reason for part in OF_THE_MACHINE):
            report.outcome = "failed"
            report.longrepr = f"{reason}\nA skipped test is an error when PIPELINERL_TEST_TOOLS=required"
    return report
