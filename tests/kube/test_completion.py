"""What a finished run tells a cluster, gives back to it, and leaves to be read."""

import asyncio
import base64
import gzip
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from pipelinerl.errors import FieldError
from pipelinerl.kube import completion
from pipelinerl.kube.client import COMPLETION, TRAINER, Permission
from pipelinerl.kube.page import page_app
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.retry import Backoff
from pipelinerl.service.settings import TrainerSettings
from pipelinerl.telemetry.metrics import RunRegistry
from services.trainer.reporting.page import PageBoard, add_page
from tests.kube.api_server import NAMESPACE, ApiServer
from tests.support.machine import until_logged
from tests.unit.builders import RUN, make_recipe
from tests.unit.test_training_run import LINGERS
from tests.unit.trainer_fakes import training_run


@pytest.mark.parametrize("mode", ["keep", "release", "exit"])
async def test_a_finished_run_leaves_what_it_was_told_to_and_gets_its_actors_back(
    tmp_path: Path,
    api: ApiServer,
    account: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
) -> None:
    left = {"rl-actor": 8, "rl-trainer": 1} if mode == "keep" else {"rl-actor": 0, "rl-trainer": 0}
    caplog.set_level("INFO")
    monkeypatch.setattr("services.trainer.run.evaluates_first", lambda *_: False)
    monkeypatch.setattr(completion, "SEEN_WITHIN_S", 0.0)
    monkeypatch.setattr("pipelinerl.kube.client.BACKOFF", Backoff(0.01, 0.01))
    api.scales = {"rl-actor": {"replicas": 8}, "rl-trainer": {"replicas": 1}}
    api.configs = {"rl-run": {"theirs": "stays", "reason": "of an earlier failure"}}
    api.secrets = {"rl-report": {}}
    pod = {"pod_namespace": NAMESPACE, "service_account_dir": account("trainer-token")}
    settings = {"linger": True, "on_completion": mode, "release": "rl", "revision": "r", **pod}
    finished = {"theirs": "stays", "phase": "Finished", "run": RUN, "policyVersion": "4", "revision": "r"}
    finished |= {"steps": "4", "step": "4", "lag": "0.50"}  # the progress
    finished |= {"actors": "8"} if mode != "keep" else {}
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(make_recipe()))
    phases = list[str]()

    async def uploaded() -> None:
        phases.append(api.configs["rl-run"]["phase"])

    for most_bytes in (0, completion.MOST_REPORT_BYTES):  # a trainer that starts again, amid this or after it, does the same
        monkeypatch.setattr(completion, "MOST_REPORT_BYTES", most_bytes)
        api.scales["rl-trainer"]["replicas"], api.configs["rl-run"]["phase"] = 1, "Running"
        async with training_run(tmp_path, settings=settings) as (run, policy), asyncio.timeout(120):
            run.loop.version, policy.version, stop = 4, 4, asyncio.Event()
            monkeypatch.setattr(run.uploads, "all_done", uploaded)
            run.recorder.progress |= {"step": "4", "lag": "0.50"}
            running = asyncio.create_task(run.run(stop))
            await until_logged(caplog, LINGERS)
            await api.until(lambda: 403 in api.refused)  # a Role that comes late is waited for
            api.rights["trainer-token"] = TRAINER | {*COMPLETION[mode]}
            await api.until(lambda: api.configs["rl-run"].get("phase") == "Finished")
            assert api.configs["rl-run"] == finished
            assert api.scales["rl-actor"]["replicas"] == left["rl-actor"]  # who waited for it finds the GPUs free
            await api.until(lambda: {name: scale["replicas"] for name, scale in api.scales.items()} == left)
            assert not running.done()
            stop.set()
            await running
        assert ("too many for a Secret, so only the volume has it" in caplog.text) is (mode == "release" and not most_bytes)
        caplog.clear()
    assert phases == ["Running", "Running"]  # who waits for the end may remove the release
    assert (tmp_path / "report.html").exists() is (mode != "keep")
    if mode == "release":
        packed = base64.b64decode(api.secrets["rl-report"][completion.REPORT])
        assert gzip.decompress(packed) == (tmp_path / "report.html").read_bytes()
        assert b'<script type="application/json" id="data">' in gzip.decompress(packed)
        await the_page_is_the_trainers_and_then_its_report(tmp_path, packed)
    else:
        assert api.secrets == {"rl-report": {}}
    async with (
        training_run(tmp_path, settings=settings) as (run, _),
        asyncio.timeout(120),
    ):  # another one, which waits for actors
        stop = asyncio.Event()
        del api.configs["rl-run"]["steps"]
        running = asyncio.create_task(run.run(stop))
        await api.until(lambda: api.configs["rl-run"]["phase"] == "Running" and "actors" not in api.configs["rl-run"])
        await api.until(lambda: api.configs["rl-run"].get("steps") == "4")  # the progress
        assert api.scales["rl-actor"]["replicas"] == 8
        stop.set()
        await running
    asked: set[Permission] = {*api.calls} - TRAINER
    assert asked <= {*COMPLETION[mode]}
    assert asked == {*COMPLETION[mode]} or mode == "keep"  # an earlier end may have been another


async def the_page_is_the_trainers_and_then_its_report(folder: Path, packed: bytes) -> None:
    board, report = PageBoard(), folder / completion.REPORT
    trainer = health_app(Readiness(""), RunRegistry("r"))
    add_page(trainer, board)
    async with serve_http(trainer, "127.0.0.1", 0) as trainer_port:
        app = page_app(f"127.0.0.1:{trainer_port}", report)
        async with (
            serve_http(app, "127.0.0.1", 0, names=["runs.example.com"]) as port,
            httpx.AsyncClient(trust_env=False) as client,
            asyncio.timeout(60),
        ):

            async def get(path: str, at: int = port, **headers: str) -> httpx.Response:
                return await client.get(f"http://127.0.0.1:{at}{path}", headers=headers)

            for path in ("/", "/page/assets/live.js", "/page/assets/none.js", "/page/history", "/page/news?after=x"):
                own, passed = await get(path, trainer_port), await get(path)
                assert (passed.status_code, passed.content) == (own.status_code, own.content), path
                assert passed.headers["x-content-type-options"] == "nosniff"
            assert (await get("/", host="elsewhere.example.com")).status_code == 403
            assert (await get("/", host="runs.example.com")).status_code == 200
    async with serve_http(app, "127.0.0.1", 0) as port, httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(60):
        away = await client.get(f"http://127.0.0.1:{port}/")
        assert (away.status_code, "no report" in away.text) == (503, True)
        report.write_bytes(packed)
        left = await client.get(f"http://127.0.0.1:{port}/")
        assert (left.status_code, left.content) == (200, gzip.decompress(packed))
        assert (await client.get(f"http://127.0.0.1:{port}/page/news")).status_code == 503
        assert (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200


async def test_a_run_that_its_settings_make_fail_is_told_apart(api: ApiServer, account: Callable[[str], Path]) -> None:
    """What may heal when the trainer starts again is no failure of the run."""
    api.rights["trainer-token"] = TRAINER | {*COMPLETION["release"]}
    api.configs = {"rl-run": {"phase": "Running"}}
    pod = {"pod_namespace": NAMESPACE, "service_account_dir": account("trainer-token")}
    settings = TrainerSettings.model_construct(run=RUN, release="rl", **pod)
    with pytest.raises(OSError, match="disk"):
        async with completion.failure_told(settings):
            raise OSError("disk")
    assert api.configs["rl-run"] == {"phase": "Running"}
    with pytest.raises(ExceptionGroup):
        async with completion.failure_told(settings):
            raise ExceptionGroup("tasks", [FieldError("trainer.steps", 0, "at least 1")])
    state = api.configs["rl-run"]
    assert (state["phase"], state["run"], "trainer.steps" in state["reason"]) == ("Failed", RUN, True)
