"""The suite as a whole: which worker runs which file, and skips that are errors in CI.

A pytest plugin that tests/conftest.py registers. It does not change what a single test does.
"""

import functools
import json
import os
import re
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
        """One worker runs the files of a group, in the order of `pytest_collection_modifyitems`. By default, xdist begins with
        the files of most tests. Its marker `xdist_group` has no effect with pytest 9.2, whose ids of tests are immutable."""
        from xdist.scheduler import LoadFileScheduling

        class GroupScheduling(LoadFileScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return group_of(super()._split_scope(nodeid))

        config.option.loadscopereorder = False
        return GroupScheduling(config, log) if config.getoption("dist") == "loadfile" else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Run engines first and then the longest files, so that no worker is left with a long one."""
        if not self.is_worker:
            return
        seconds, names = json.loads(DURATIONS.read_text()), {item: file_of(item.nodeid) for item in items}
        items.sort(key=lambda item: (group_of(names[item]) != "engines", -seconds.get(names[item], 0.0), names[item]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        return skip_is_error((yield))

    pytest_make_collect_report = pytest_runtest_makereport

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.is_worker:
            self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        path = self.config.getoption("--write-durations")
        if path and not self.is_worker:
            slow = {name: round(seconds, 1) for name, seconds in sorted(self.seconds.items()) if seconds >= 1.0}
            Path(path).write_text(json.dumps(slow, indent=1) + "\n", encoding="utf-8")


@functools.cache
def group_of(file: str) -> str:
    """Return `engines` if the file starts vLLM engines or whole runs, since one at a time is started beside the tests of other
    workers; `ranks` if it starts ranks, which share a fork server; else the file. The process that hands out the tests has not
    imported them, so their text decides."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if re.search(r"\bmark\.(engine|e2e)\b", text):
        return "engines"
    return "ranks" if "on_ranks(" in text else file


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
