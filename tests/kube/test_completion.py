"""What a finished run tells a cluster, and gives back to it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelinerl.kube import completion
from pipelinerl.kube.client import COMPLETION, TRAINER, KubeBackoff, Permission
from tests.kube.api_server import NAMESPACE, ApiServer
from tests.unit.builders import RUN
from tests.unit.test_training_run import LINGERS, until_logged
from tests.unit.trainer_fakes import training_run


@pytest.mark.parametrize(
    ("mode", "left"),
    [
        ("keep", {"rl-actor": 8, "rl-trainer": 1}),
        ("release", {"rl-actor": 0, "rl-trainer": 1}),
        ("exit", {"rl-actor": 0, "rl-trainer": 0}),
    ],
)
async def test_a_finished_run_leaves_what_it_was_told_to(
    tmp_path: Path,
    api: ApiServer,
    account: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    left: dict[str, int],
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("services.trainer.run.evaluates_first", lambda *_: False)
    monkeypatch.setattr(completion, "BACKOFF", KubeBackoff(0.01, 0.01, denied_s=0.01))
    api.scales = {"rl-actor": {"replicas": 8}, "rl-trainer": {"replicas": 1}}
    api.configs = {"rl-run": {"theirs": "stays"}}
    pod = {"pod_namespace": NAMESPACE, "service_account_dir": account("trainer-token")}
    settings = {"linger": True, "on_completion": mode, "release": "rl", **pod}
    async with training_run(tmp_path, settings=settings) as (run, policy), asyncio.timeout(120):
        run.loop.version, policy.version, stop = 4, 4, asyncio.Event()
        running = asyncio.create_task(run.run(stop))
        await until_logged(caplog, LINGERS)
        if mode != "keep":
            await api.until(lambda: 403 in api.refused)  # a Role that comes late is waited for
            api.rights["trainer-token"] = TRAINER | {*COMPLETION[mode]}
            await api.until(lambda: api.configs["rl-run"].get("phase") == "Finished")
            assert api.configs["rl-run"] == {"theirs": "stays", "phase": "Finished", "run": RUN, "policyVersion": "4"}
            assert api.scales["rl-actor"]["replicas"] == 0  # who waited for it finds the GPUs free
        await api.until(lambda: {name: scale["replicas"] for name, scale in api.scales.items()} == left)
        assert not running.done()
        stop.set()
        await running
    async with (
        training_run(tmp_path, settings=settings) as (run, _),
        asyncio.timeout(120),
    ):  # another one, which waits for actors
        stop = asyncio.Event()
        running = asyncio.create_task(run.run(stop))
        if mode != "keep":
            await api.until(lambda: api.configs["rl-run"]["phase"] == "Running")
        stop.set()
        await running
    asked: set[Permission] = {*api.calls} - TRAINER
    assert asked == {*COMPLETION[mode]}
