"""Fixtures for all tests: a real nats-server for the session, and a run name of each test's own on it."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.nats_server import NatsServer
from pipelinerl.cli import main
from tests.support.runs import Command, write_tiny_model
from tests.support.suite import Suite

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for the real hub, whatever its recipe names

# How long an example takes says something about the machine, and nothing about the code. The examples are always the same, so
# that no commit fails for what another one did. `make soak` draws new ones (--hypothesis-profile=random).
settings.register_profile("any-machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", settings.get_profile("any-machine"), derandomize=False)
settings.load_profile("any-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--histories", type=int, default=5, help="random fault histories, and breaks, to play")
    parser.addoption("--first-seed", type=int, default=0, help="of the random fault histories")
    parser.addoption("--fault-seed", type=int, default=0, help="of a run's faults")
    parser.addoption("--all-releases", action="store_true", help="run the chart's releases though nothing changed")
    parser.addoption("--cluster", action="store_true", help="releases of the chart in a real cluster, too (make cluster-check)")
    parser.addoption("--fault-table", default="", help="JSON file to keep recovery times of the fault matrix in")
    parser.addoption("--write-durations", default="", help="JSON file to write the seconds of each file to")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Suite(config))


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One real server on a free loopback port. Tests that stop or restart a server start their own."""
    with NatsServer(tmp_path_factory.mktemp("nats"), extra={"max_payload": 1024**2}) as server:
        yield server


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture
def pipelinerl(capsys: pytest.CaptureFixture[str]) -> Command:
    """Exit code, standard output and standard error of `pipelinerl ARGUMENTS...`, in this process."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as ended:  # argparse
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def run_name() -> str:
    """A run of this test only, so that tests share a server and nothing else."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_tiny_model(folder := tmp_path_factory.mktemp("model"))
    return folder
