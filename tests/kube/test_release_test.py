"""What `helm test` looks at in a release: each part that does not work is named, with what to do, and nothing else is. Its pair
of pods sends bytes over Gloo, and each names what fails, within its time.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from pipelinerl.bus.jetstream import connect
from pipelinerl.bus.permissions import ACTOR, TRAINER
from pipelinerl.kube.client import COMPLETION, SCALE_TRAINER, WATCH_PODS
from pipelinerl.service.grpc import serve_grpc
from pipelinerl.service.settings import TrainerSettings
from services.trainer import release_test, transfer_test
from services.trainer.release_test import OBJECTS, checks, failures, options_of
from tests.chart.rendering import ROOT
from tests.kube.api_server import ApiServer
from tests.support.guarded_nats import guarded
from tests.support.machine import free_port

NAMES = [
    *("recipe", "volume", "NATS", "actor's login to NATS", "trainer's Service", "verifier's Service", "actor's Service"),
    *("episodes", "rights", "network policies"),
]


def unused() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
async def verifier() -> AsyncIterator[str]:
    async with serve_grpc(lambda server: None, [], "127.0.0.1", 0, stop_grace_s=0.1) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
async def settings(api: ApiServer, account: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[TrainerSettings]:
    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    api.add_pod("actor-0")
    app = web.Application()
    app.router.add_get("/readyz", healthy)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    logins = tmp_path / "logins"
    with guarded(logins, "demo") as nats:
        async with connect(nats.url, "demo", credentials=logins / TRAINER) as bus:
            await bus.create_streams()
            yield TrainerSettings(
                run="demo",
                recipe=ROOT / "recipes" / "repeated-addition.yaml",
                instance="test",
                nats_url=nats.url,
                nats_credentials=logins / TRAINER,
                pod_namespace=api.namespace,
                service_account_dir=account("trainer-token"),
                run_dir=tmp_path / "runs" / "demo",
                rendezvous="127.0.0.1:29500",
                http_port=runner.addresses[0][1],
            )
    await runner.cleanup()


async def test_each_part_that_does_not_work_is_named_and_no_other(
    settings: TrainerSettings,
    verifier: str,
    api: ApiServer,
    account: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(release_test, "ANSWER_S", 10.0)

    assert settings.nats_credentials is not None
    login, wrong = settings.nats_credentials.with_name(ACTOR), tmp_path / "wrong"
    wrong.write_text("actor:of-another-release")
    answering, open_port = f"127.0.0.1:{settings.http_port}", f"127.0.0.1:{api.port}"

    async def failed(options: Sequence[str] = (), **changed: object) -> list[str]:
        services = [f"--verifier={verifier}", f"--actor={answering}", f"--episodes={open_port}"]
        whole = [f"--actor-login={login}", *services, f"--closed={unused()}", *options]
        return await failures(checks(settings.model_copy(update=changed), options_of(whole)))

    assert await failed() == []
    said = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("ok").split(":")[0].strip() for line in said] == NAMES
    assert "all 2 permissions are granted; 1 of 1 actors run" in said[8], said
    assert await failures(checks(settings, options_of(["--no-volume"]))) == []
    said = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("ok").split(":")[0].strip() for line in said] == ["recipe", *NAMES[2:3], *NAMES[4:5], "rights"]

    exits = {"on_completion": "exit", "release": "blue"}
    api.rights["trainer-token"] |= {*COMPLETION["exit"]}
    assert await failed(**exits) == []
    api.rights["lesser"] = api.rights["trainer-token"] - {WATCH_PODS, SCALE_TRAINER}
    lesser = exits | {"service_account_dir": account("lesser")}
    assert {one.resource for some in COMPLETION.values() for one in some} == OBJECTS.keys()
    (tmp_path / "file").write_text("")
    for changed, name, what in (
        ({"recipe": tmp_path / "file"}, "recipe", "file"),
        ({"run_dir": Path("/proc/runs/x")}, "volume", "check its space and permissions"),
        ({"options": ["--actor-login=/nowhere"]}, "actor's login to NATS", "/nowhere"),
        ({"options": [f"--actor-login={wrong}"]}, "actor's login to NATS", "refuses the login"),
        ({"options": [f"--actor={unused()}"]}, "actor's Service", "is an actor ready, and does its Service select it?"),
        ({"options": [f"--episodes={unused()}"]}, "episodes", "takes no connections"),
        ({"http_port": int(unused().rpartition(":")[2])}, "trainer's Service", "is the trainer ready, and does its Service"),
        ({"options": [f"--verifier={unused()}"]}, "verifier's Service", "127.0.0.1"),
        ({"pod_namespace": "other"}, "rights", "verbs [list]"),
        (lesser, "rights", "may not watch pods, patch statefulsets/scale blue-trainer;"),
        ({"options": [f"--closed={open_port}"]}, "network policies", "networkPolicy.enabled=false"),
        ({"options": ["--closed=nobody.invalid:50051"]}, "network policies", "is a pod of this Service ready?"),
    ):
        assert await failed(**changed) == [name], capsys.readouterr().out
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
        assert what in line
    for changed, what in (({"run": "another"}, "another"), ({"nats_url": f"nats://{unused()}"}, "nats://")):
        assert await failed(**changed) == ["NATS", "actor's login to NATS"]
        assert what in capsys.readouterr().out
    assert not list(tmp_path.glob("**/.release-test-*"))


def arguments(index: int, address: str, device: str = "cpu", within_s: float = 60) -> list[str]:
    host, _, port = address.rpartition(":")
    recipe = ROOT / "recipes" / "arithmetic.yaml"
    return [
        *(f"--index={index}", f"--host={host}", f"--port={port}", f"--own-host={host}", f"--recipe={recipe}"),
        *(f"--device={device}", f"--within={within_s}"),
    ]


async def pod_of_the_pair(index: int, address: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.trainer.transfer_test", *arguments(index, address)),
        env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    steps = [line.partition(":")[0] for line in said.splitlines()]
    assert steps == ["ok      device", f"ok      meeting pod {1 - index}", "ok      transfer"]


async def test_two_pods_send_each_other_the_bytes() -> None:
    address = unused()
    await asyncio.gather(pod_of_the_pair(0, address), pod_of_the_pair(1, address))


def test_a_pod_that_is_alone_or_has_no_gpu_says_so_within_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    for index, device, what in (
        (0, "cpu", "meeting pod 1: weight group pair: connecting 2 ranks ([1] are missing) took longer than "),
        (1, "cpu", "meeting pod 0: weight group pair: "),  # in one of three ways, by torch's random pauses
        (0, "cuda", "GPU: the pod requests one but sees none"),
    ):
        address = unused()
        assert transfer_test.main(arguments(index, address, device, within_s=6)) == 1
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
        assert what in line
        asked = f"; is pod {1 - index} running, and can both pods reach each other on every TCP port, first on {address}?"
        assert device == "cuda" or line.endswith(asked)
