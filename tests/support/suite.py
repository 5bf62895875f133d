"""The suite as a whole: which worker runs which file, time budgets per folder, and skips that are errors in CI.

A pytest plugin that tests/conftest.py registers. It does not change what a single test does.
"""

import json
import os
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DURATIONS = ROOT / "tests" / "durations.json"
"""What the suite took when it was last measured (`make durations`)."""
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
    "Landlock of Linux",
    "a real cluster",
)
"""Parts of the reasons that no installation step can mend: devices, and what the kernel or its sandbox permits."""
WITHOUT_BUDGET = {"tests/cluster"}
"""Its releases are played only when what they show has changed."""
TIMEOUT_S = 180
"""Of most tests, as in pyproject.toml."""
OVER = 1.5
"""A folder fails when it takes this many times its recorded time."""
MARGIN_S = 60.0
"""And so many seconds more: what a slow disk adds to a short folder is not worth a failure."""


class Suite:
    """Sums up durations of one pytest invocation: with xdist in the controlling process only."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.recorded: dict[str, Any] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        self.is_worker = hasattr(config, "workerinput")
        self.seconds: dict[str, float] = defaultdict(float)
        self.pace = Pace(goes_on=not self.is_worker)
        self.exceeded: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """One worker runs a whole file, so that its fixtures are set up once, and one worker all tests with engines."""
        from xdist.scheduler.loadgroup import LoadGroupScheduling

        class FileScheduling(LoadGroupScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return super()._split_scope(nodeid).partition("::")[0]

        return FileScheduling(config, log) if config.getoption("dist") == "loadgroup" else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sets time-outs: a test of a long file may take three times as long as the file did, unless its mark says otherwise.

        With several workers, engines come first and then the longest files, so that no worker is left with a long one.
        """
        seconds = self.recorded.get("files", {})
        slower = self.slower()
        for item in items:
            longest_s = slower * max(TIMEOUT_S, 3 * seconds.get(file_of(item.nodeid), 0.0))
            if longest_s > TIMEOUT_S and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(longest_s))
        if not self.is_worker:
            return

        def key(item: pytest.Item) -> tuple[bool, float, str]:
            name = file_of(item.nodeid)
            return (not needs_engine(item), -seconds.get(name, 0.0), name)

        items.sort(key=key)
        for item in filter(needs_engine, items):
            item.add_marker(pytest.mark.xdist_group("engines"))

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

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_worker:
            return
        folders = by_folder(self.seconds)
        if path := self.config.getoption("--write-durations"):
            write(Path(path), self.seconds, self.pace.seconds())
        elif REQUIRED and self.recorded:
            self.exceeded = over_budget(folders, self.recorded["folders"], slower=self.slower())
            if self.exceeded and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def slower(self) -> float:
        """How much slower this machine is than the one that measured, both busy with the suite; at least 1."""
        return max(1.0, self.pace.seconds() / self.recorded["calibration_s"]) if self.recorded else 1.0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.exceeded:
            terminalreporter.write_line(f"TIME BUDGET {line}; make durations measures anew", red=True)


def needs_engine(item: pytest.Item) -> bool:
    """Whether it starts a vLLM engine or a whole run: one at a time, beside the tests of other workers."""
    return item.get_closest_marker("engine") is not None or item.get_closest_marker("e2e") is not None


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def by_folder(files: dict[str, float]) -> dict[str, float]:
    """Seconds per folder under tests/, e.g. `tests/unit`."""
    found: dict[str, float] = defaultdict(float)
    for name, seconds in files.items():
        found["/".join(Path(name).parts[:2])] += seconds
    return dict(found)


def over_budget(folders: dict[str, float], recorded: dict[str, float], *, slower: float) -> list[str]:
    """A line for each folder that took too long. Both arguments have seconds; budgets grow with the slowness of the machine.

    That is `slower`, measured by arithmetic, or the median folder's if it is larger: slow disks and process starts show there.
    """
    both = folders.keys() & recorded.keys() - WITHOUT_BUDGET
    ratios = {name: folders[name] / recorded[name] for name in both if recorded[name]}
    factor = OVER * max([slower, statistics.median(ratios.values())] if ratios else [slower])
    return [
        f"{name}: {folders[name]:.0f} s, more than {factor:.1f} times the recorded {recorded[name]:.0f} s"
        for name in sorted(ratios)
        if folders[name] > max(recorded[name] + MARGIN_S, recorded[name] * factor)
    ]


class Pace:
    """How long a fixed amount of arithmetic takes: a slow machine shows, and a busy one."""

    EVERY_S = 5.0

    def __init__(self, *, goes_on: bool) -> None:
        self.samples = [calibrate()]
        if goes_on:
            threading.Thread(target=self._measure, daemon=True, name="pace").start()

    def seconds(self) -> float:
        return statistics.median(self.samples)

    def _measure(self) -> None:
        while True:
            time.sleep(self.EVERY_S)
            self.samples.append(calibrate())


def calibrate() -> float:
    """Seconds of a fixed amount of arithmetic."""
    began = time.perf_counter()
    sum(number * number for number in range(200_000))
    return time.perf_counter() - began


def skip_is_error(report: Any) -> Any:
    """In CI a test that is skipped fails: a tool that is missing there is a mistake, and so is a broken import."""
    if REQUIRED and report.skipped and not hasattr(report, "wasxfail") and not report.nodeid.startswith(MAY_SKIP):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(part in reason for part in OF_THE_MACHINE):
            report.outcome = "failed"
            report.longrepr = f"{reason}\nA skipped test is an error when PIPELINERL_TEST_TOOLS=required"
    return report


def write(path: Path, files: dict[str, float], calibration_s: float) -> None:
    slow = {name: round(seconds, 1) for name, seconds in sorted(files.items()) if seconds >= 1.0}
    folders = {name: round(seconds) for name, seconds in sorted(by_folder(files).items())}
    data = {"calibration_s": round(calibration_s, 4), "folders": folders, "files": slow}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
