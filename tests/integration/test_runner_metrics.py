"""What a local run shows to a Prometheus that knows one address: its services as they come and go, and its restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from pipelinerl.errors import FieldError
from pipelinerl.local.metrics import targets_of
from pipelinerl.service.address import ServiceAddress, read_address, write_address
from tests.integration.fake_run import Run, recipe, running, until_pid_changes


async def fetched(address: str, path: str) -> str:
    def get() -> str:
        with urlopen(f"http://{address}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(get)


async def figures(address: str) -> dict[tuple[str, str], float]:
    """Value by metric and process."""
    families = text_string_to_metric_families(await fetched(address, "/metrics"))
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"tiny-run"}
    return {(sample.name, sample.labels.get("process", "")): sample.value for sample in samples}


async def instances(address: str) -> dict[str, str]:
    """Service by instance, as /targets tells."""
    found = json.loads(await fetched(address, "/targets"))
    assert all(len(target["targets"]) == 1 for target in found)
    return {target["labels"]["instance"]: target["labels"]["service"] for target in found}


async def test_one_address_tells_of_all_services_and_of_restarts(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=100_000), {})
    async with running(run) as task, asyncio.timeout(60):
        pids = await run.until_step(3)
        address = read_address(run.dir.address("runner")).http
        services = {"trainer": "trainer", "actor-0": "actor", "verifier": "verifier", "runner": "runner"}
        while await instances(address) != services:  # the stand-in for the trainer does not wait for actors
            await asyncio.sleep(0.02)
        before = await figures(address)
        names = ("trainer", "actor", "verifier", "nats")
        assert [before["pipelinerl_runner_processes", name] for name in names] == [1, 1, 1, 1]
        assert [before["pipelinerl_runner_restarts_total", name] for name in names] == [0, 0, 0, 0]
        assert before["pipelinerl_runner_actors_wanted", ""] == 1
        os.kill(pids["actor-0"], signal.SIGKILL)
        await until_pid_changes(run, "actor-0", pids["actor-0"])
        after = await figures(address)
        assert (after["pipelinerl_runner_restarts_total", "actor"], after["pipelinerl_runner_processes", "actor"]) == (
            1,
            1,
        )
        os.kill(os.getpid(), signal.SIGINT)
        assert (await task).interrupted
    assert not run.dir.address("runner").exists()


async def test_a_port_in_use_is_the_users_mistake(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(), {})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run.local.metrics_port = taken.getsockname()[1]
        ending = await run.end()
    assert isinstance(ending.error, FieldError)
    assert str(ending.error).startswith("--metrics-port = ")
    assert run.pids() == {}


def test_what_is_still_starting_is_no_target(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(), {})
    write_address(run.dir.address("actor-1"), ServiceAddress("127.0.0.1:1", "127.0.0.1:2", 3))
    assert targets_of(run.dir, ["actor-0", "actor-1"]) == [
        {"targets": ["127.0.0.1:2"], "labels": {"service": "actor", "instance": "actor-1"}}
    ]
