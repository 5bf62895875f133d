"""A whole local run with real processes, a real nats-server and services that keep to the contract but train nothing:
order, restarts, failures, Ctrl-C, what a Prometheus sees, and that nothing is ever left behind.
"""

import asyncio
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import nats
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl.bus.link import read_login, tls_context
from pipelinerl.bus.permissions import ADMIN
from pipelinerl.cli import main
from pipelinerl.errors import ServiceError
from pipelinerl.initial_model import is_complete
from pipelinerl.local.ending import finish
from pipelinerl.local.processes import Launch, ServiceDied, ServiceProcess, bound_log, living, log_tail, session_pids
from pipelinerl.local.progress import Display, RunState, rows
from pipelinerl.recipe.fields import AlgorithmConfig, RewardConfig
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.rl.placement import Placement
from pipelinerl.run_dir import newest_checkpoint
from pipelinerl.service.settings import read_address
from tests.support.local_run import FAKES, SERVICES, Run, recipe, running, until, until_pid_changes


class Recorder(Display):
    """Keeps what was shown."""

    def __init__(self, stream: io.StringIO) -> None:
        super().__init__(stream, every_s=0)
        self.shown: list[dict[str, str]] = []

    def show(self, state: RunState, elapsed_s: float) -> None:
        super().show(state, elapsed_s)
        self.shown.append(dict(rows(state, elapsed_s)))

    @property
    def steps(self) -> list[int]:
        return [int(shown["step"].split()[0]) for shown in self.shown]


async def test_a_run_starts_everything_follows_it_and_leaves_nothing(tmp_path: Path) -> None:
    bounded = recipe(steps=60).model_copy(update={"algorithm": AlgorithmConfig(max_lag=1)})
    run = Run(tmp_path / "run", bounded, {"FAKE_PAUSES": "20,59", "FAKE_STEP_S": "0.02"})
    run.local.display = recorder = Recorder(run.printed)
    async with running(run) as task:
        seen = ("20", "training", "actor-0 serving v3, 64 in progress")
        await until(lambda: seen in {(s["step"].split()[0], s["now"], s.get("actors")) for s in recorder.shown})
        (run.dir.path / "go-on-20").touch()
        await until(lambda: any("left" in shown["step"] for shown in recorder.shown))
        (run.dir.path / "go-on-59").touch()
        ending = await task
    assert (ending.error, ending.interrupted, ending.exit_code) == (None, False, 0)
    assert tuple(run.pids()) == SERVICES
    assert load_recipe(run.dir.recipe) == run.recipe
    assert {path.stem for path in (run.dir.path / "logs").iterdir()} == set(SERVICES)
    assert not run.dir.address("nats").exists(), "only for as long as it runs"

    assert recorder.steps == sorted(recorder.steps)
    assert recorder.shown[-1]["step"].startswith("60 of 60 (100.0%)")
    assert "step 60/60 | version 60 | reward 1.000" in run.printed.getvalue()
    assert run.printed.getvalue().count("warning: algorithm.max_lag = 1: is below the largest lag") == 1
    narrow = "warning: algorithm.clip_low = 0.2: together with algorithm.clip_high (0.2) it clips 41% of the tokens"
    assert run.printed.getvalue().count(narrow) == 1
    assert run.printed.getvalue().count("warning: in 5 steps, all completions of each prompt earned the same reward") == 1
    failed = r"a sequence failed: reward_crashed: KeyError at my_rewards.py:4\x1b[2J (all failures: "
    assert run.printed.getvalue().count(failed) == 1

    assert finish(run.recipe, run.dir, ending) == 0
    summary = json.loads(run.dir.summary.read_text())
    assert (summary["by"], summary["restarts"], summary["interrupted"], summary["steps"]) == ("trainer", {}, False, 60)
    assert summary["wall_s"] > 0
    assert "tiny" in run.dir.report.read_text()


async def test_each_process_sees_its_gpu_and_a_shared_one_starts_with_the_engine(tmp_path: Path) -> None:
    placement = Placement(trainer=("GPU-a",), actors=(("GPU-a",), ("GPU-b",)))
    run = Run(tmp_path / "run", recipe(steps=100_000), {}, placement=placement)
    run.dir.scale.write_text('{"actors": 5}')
    async with running(run) as task:
        pids = await run.until_step(2)
        for name, gpu in (("trainer", "GPU-a"), ("actor-0", "GPU-a"), ("actor-1", "GPU-b")):
            assert f"CUDA_VISIBLE_DEVICES={gpu}" in Path(f"/proc/{pids[name]}/environ").read_text().split("\0")
        assert "actor-2" not in pids
        warning = "warning: 5 actors are wanted, but the GPUs here suffice only for 2 actors"
        assert run.printed.getvalue().count(warning) == 1
        serving_s = max(run.dir.address(name).stat().st_mtime for name in ("actor-0", "actor-1"))
        ticks = int(Path(f"/proc/{pids['trainer']}/stat").read_text().rpartition(")")[2].split()[19])
        booted_s = max(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) for _ in range(100))  # read without a pause
        started_s = booted_s + ticks / os.sysconf("SC_CLK_TCK")
        assert started_s > serving_s - 0.1, "the trainer allocates after the engines have measured"
        task.cancel()


# Restarts


async def fetched(address: str, path: str) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return (await client.get(f"http://{address}{path}")).raise_for_status().text


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


async def test_killed_services_are_started_again_and_one_address_tells_of_it(tmp_path: Path) -> None:
    """An actor, the verifier (more often than twice, the limit) and nats-server are killed; the trainer goes on."""
    function = RewardConfig(scorer="my_rewards:score")
    run = Run(tmp_path / "run", recipe(steps=100_000).model_copy(update={"reward": function}), {})
    run.local.display = recorder = Recorder(run.printed)
    run.dir.scale.write_text('{"actors": 2}')
    killed = ("actor-1", "verifier", "nats")
    async with running(run) as task:
        pids = await run.until_step(5)
        runner = read_address(run.dir.address("runner")).http
        services = {name: name.partition("-")[0] for name in ("trainer", "actor-0", "actor-1", "verifier", "runner")}
        while await instances(runner) != services:  # the stand-in for the trainer does not wait for actors
            await asyncio.sleep(0.02)
        before, names = await figures(runner), ("trainer", "actor", "verifier", "nats")
        assert [before["pipelinerl_runner_processes", name] for name in names] == [1, 2, 1, 1]
        assert [before["pipelinerl_runner_restarts_total", name] for name in names] == [0, 0, 0, 0]
        assert before["pipelinerl_runner_actors_wanted", ""] == 2
        verifier = read_address(run.dir.address("verifier"))
        url = json.loads(run.dir.address("nats").read_text())["url"]
        own = run.dir.credentials
        login: dict[str, Any] = {"tls": tls_context(own.tls_dir), **read_login(own.nats(ADMIN))}
        async with await nats.connect(url, **login) as client:
            await client.jetstream().add_stream(name="KEPT", subjects=["kept"])
            await client.jetstream().publish("kept", b"one")
        for name in killed:
            os.kill(pids[name], signal.SIGKILL)
        new = {name: await until_pid_changes(run, name, pids[name]) for name in killed}
        assert session_pids(pids["actor-1"]) == [], "its engine core is gone too"
        await until(lambda: run.dir.address("verifier").is_file() and run.dir.address("nats").is_file())
        again = read_address(run.dir.address("verifier"))
        assert (again.grpc, again.http, again.pid) == (verifier.grpc, verifier.http, new["verifier"])
        assert json.loads(run.dir.address("nats").read_text())["url"] == url
        async with await nats.connect(url, **login) as client:
            assert (await client.jetstream().stream_info("KEPT")).state.messages == 1
        assert (await figures(runner))["pipelinerl_runner_restarts_total", "actor"] == 1
        for _ in range(3):
            furthest, pid = recorder.steps[-1], run.pids()["verifier"]
            await until(lambda furthest=furthest: recorder.steps[-1] > furthest)  # type: ignore[misc]
            os.kill(pid, signal.SIGKILL)
            await until_pid_changes(run, "verifier", pid)
        assert run.pids()["trainer"] == pids["trainer"]
        os.kill(os.getpid(), signal.SIGINT)
        ending = await task
    assert (ending.interrupted, dict(ending.restarts)) == (True, {"actor-1": 1, "verifier": 4, "nats": 1})
    assert "actor-1 was killed by SIGKILL; end" in run.printed.getvalue()
    assert "verifier was killed by SIGKILL (its processes run my_rewards:score, which may" in run.printed.getvalue()
    assert json.loads(run.dir.summary.read_text())["expected_actors"] == 2
    assert not run.dir.address("runner").exists()


async def test_a_trainer_that_ends_goes_on_from_its_checkpoint_as_long_as_it_gets_further(tmp_path: Path) -> None:
    """Killed, told to stop by somebody else, killed and killed: four times in a row, where the limit is 2."""
    pauses = {"FAKE_PAUSES": "13,24,37,48,99", "FAKE_STEP_S": "0.02"}
    run = Run(tmp_path / "run", recipe(steps=100), {"FAKE_CHECKPOINT_EVERY": "10", **pauses})
    run.local.display = recorder = Recorder(run.printed)
    async with running(run) as task:
        others = {name: pid for name, pid in (await run.until_step(1)).items() if name != "trainer"}
        for step, number in ((13, signal.SIGKILL), (24, signal.SIGTERM), (37, signal.SIGKILL), (48, signal.SIGKILL)):
            pid = (await run.until_step(step))["trainer"]
            await until(lambda step=step: recorder.steps[-1] == step)  # type: ignore[misc]
            os.kill(pid, number)
            await until_pid_changes(run, "trainer", pid)
            (run.dir.path / f"go-on-{step}").touch()
        await until(lambda: recorder.steps[-1] == 99)
        (run.dir.path / "go-on-99").touch()
        ending = await task
    assert (ending.error, dict(ending.restarts), ending.exit_code) == (None, {"trainer": 4}, 0)
    assert {name: pid for name, pid in run.pids().items() if name != "trainer"} == others, "the others go on"
    records = [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 101))
    starts = json.loads((run.dir.path / "lineage.json").read_text())["starts"]
    assert starts == [0, 10, 24, 30, 40]
    assert [record["from"] for record in records] == [max(at for at in starts if at < step) for step in range(1, 101)]
    printed = run.printed.getvalue()
    assert "trainer was killed by SIGKILL" in printed
    assert "trainer exited with code 0" in printed
    assert "trainer is started again in 0.05 s, and continues from version 10" in printed
    links = re.findall("Live page: (http://127[0-9.:]+/[\\w-]+/)", printed)
    key = run.dir.credentials.page_key.read_text()
    assert links == [f"http://{read_address(run.dir.address('trainer')).http}/{key}/"], "each trainer is where the first was"

    fell = next(index for index, (a, b) in enumerate(zip(recorder.steps, recorder.steps[1:], strict=False)) if b < a)
    assert recorder.steps[fell + 1] == 10, "what came after the checkpoint never was"
    assert any(starts[-1] < step < 100 for step in recorder.steps), "heard from the last trainer, not read at the end"
    assert recorder.steps[-1] == 100

    assert finish(run.recipe, run.dir, ending) == 0
    summary = json.loads(run.dir.summary.read_text())
    assert (summary["restarts"], summary["steps"], summary["begun"]) == ({"trainer": 4}, 100, starts[-1])


# What fails for good


@pytest.mark.parametrize(
    ("environment", "who", "exit_code", "restarts", "said", "steps"),
    [
        ({"FAKE_CRASH_AT_STEP": "4"}, "trainer", 1, (2, 3, 4), "ZeroDivisionError: in the loss", 3),
        ({"FAKE_CRASH_AT_STEP": "4", "FAKE_EXIT_CODE": "2"}, "trainer", 2, (0,), "ZeroDivisionError: in the loss", 3),
        ({"FAKE_ACTOR_EXIT": "1", "FAKE_STEP_S": "600"}, "actor-0", 1, (1,), "error: no such model", None),
        ({"FAKE_ACTOR_EXIT": "2", "FAKE_STEP_S": "600"}, "actor-0", 2, (0,), "error: no such model", None),
    ],
)
async def test_what_dies_at_ever_the_same_place_fails_the_run_with_the_end_of_its_log(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    who: str,
    exit_code: int,
    restarts: tuple[int, ...],
    said: str,
    steps: int | None,
) -> None:
    """A trainer at one step, and an actor that never serves. Code 2, the user's mistake, is not tried again. The runner may
    hear of the last two steps only after the first deaths, and then forgives these."""
    run = Run(tmp_path / "run", recipe(steps=9), environment)
    ending = await run.end()
    assert isinstance(ending.error, ServiceDied)
    assert (ending.error.name, ending.error.returncode, ending.exit_code) == (who, exit_code, exit_code)
    assert sum(ending.restarts.values()) in restarts
    assert finish(run.recipe, run.dir, ending) == exit_code
    out, err = capsys.readouterr()
    assert said in err
    assert ("WARNING of something else" in err) is (who == "actor-0" and exit_code == 1), "a user's mistake is told alone"
    assert (f"pipelinerl run --resume {run.dir.path}" in out) is (restarts != (0,))
    summary = json.loads(run.dir.summary.read_text())
    assert f"{who} exited with code {exit_code}" in summary["error"]
    assert steps in (None, summary["steps"])


async def test_a_run_ends_in_order_before_its_disk_is_full(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=100_000), {})
    async with running(run) as task:
        await run.until_step(5)
        run.local.reserve_bytes = 10**18
        ending = await task
    said = "MB free, but the run needs 1,000,000,000,000 MB for a checkpoint and a reserve, so it ends now"
    assert said in str(ending.error)
    assert (ending.exit_code, dict(ending.restarts)) == (1, {})
    assert json.loads(run.dir.summary.read_text())["interrupted"], "the trainer was told to stop, and wrote what it had"


# The initial model


async def test_the_initial_model_is_built_once_and_again_where_the_cache_is_removed_under_a_run(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = Run(tmp_path / "one", recipe(steps=2, source="smollm2"), {"FAKE_PAUSES": "model"})
    async with running(first) as task:
        await until(lambda: "initial model: step 1 of 2" in first.printed.getvalue())
        (first.dir.path / "go-on-model").touch()
        assert (await task).error is None
    assert tuple(first.pids()) == SERVICES
    model_dir = Path(json.loads(first.dir.summary.read_text())["model_dir"])
    assert json.loads((model_dir / "config.json").read_text())["source"] == "smollm2"
    second = Run(tmp_path / "two", recipe(100_000, source="smollm2"), {})
    async with running(second) as ending:
        actor = (await second.until_step(1))["actor-0"]
        assert "initial model" not in second.printed.getvalue()
        assert list((cache / "models").iterdir()) == [model_dir]
        shutil.rmtree(cache)
        os.kill(actor, signal.SIGKILL)
        await until_pid_changes(second, "actor-0", actor)
        assert is_complete(model_dir)
        assert (cache / "inductor").is_dir()
        said = f"{model_dir} has been removed: the initial model is made again, because a service needs it to start"
        assert second.printed.getvalue().count(said) == 1
        assert "model" not in second.pids()
        os.kill(os.getpid(), signal.SIGINT)
        assert (await ending).error is None


# Ctrl-C: a runner of its own, as a user has it in a terminal.

RUNNER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.support.local_run import Run, recipe
from pipelinerl.local.ending import finish
run = Run(Path(sys.argv[2]), recipe(steps=10000), {}, stop_within_s=float(sys.argv[3]))
ending = asyncio.run(run.local.run())
print("ended", flush=True)
sys.exit(finish(run.recipe, run.dir, ending))
"""
DEAF = {"FAKE_DEAF": "trainer,actor,verifier", "PIPELINERL_STOP_CHECKPOINT_S": "0.5"}


@asynccontextmanager
async def runner_process(
    folder: Path, stop_within_s: float = 60.0, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUNNER, str(FAKES.parents[2]), str(folder), str(stop_within_s),
        env={**os.environ, **environment}, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def started(folder: Path) -> dict[str, int]:
    pids, metrics = folder / "pids.json", folder / "metrics.jsonl"
    await until(lambda: metrics.is_file() and metrics.stat().st_size > 0 and len(json.loads(pids.read_text())) == 4)
    found: dict[str, int] = json.loads(pids.read_text())
    return found


def alive(pids: Mapping[str, int]) -> dict[str, list[int]]:
    return {name: found for name, session in pids.items() if (found := session_pids(session))}


@pytest.mark.parametrize(
    ("number", "group", "deaf"), [(signal.SIGINT, True, {}), (signal.SIGTERM, False, {}), (signal.SIGINT, False, DEAF)]
)
async def test_an_interrupt_stops_everything(tmp_path: Path, number: signal.Signals, group: bool, deaf: dict[str, str]) -> None:
    """`group`: as the terminal does: the whole foreground group gets it, and the services must not."""
    folder = tmp_path / "run"
    async with runner_process(folder, 3.0 if deaf else 60.0, **deaf) as process:
        pids = await started(folder)
        os.killpg(process.pid, number) if group else process.send_signal(number)
        async with asyncio.timeout(60):
            said, _ = await process.communicate()
    assert process.returncode == 130
    assert alive(pids) == {}
    version = newest_checkpoint(folder)
    goes_on = f"--resume continues from the checkpoint of version {version}"
    end = "no checkpoint was written: --resume begins at version 0" if deaf else goes_on
    assert (version is None, said.decode().splitlines()[-1].strip()) == (bool(deaf), end)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["interrupted"], summary["steps"] >= 1) == (True, True)
    assert ("by" in summary) is not bool(deaf), "the trainer's own summary, unless it had to be killed"
    assert (folder / "report.html").is_file()


async def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with runner_process(folder, stop_within_s=600.0, **{**DEAF, "PIPELINERL_STOP_CHECKPOINT_S": ""}) as process:
        pids = await started(folder)
        process.send_signal(signal.SIGINT)
        await until(lambda: "ignored" in (folder / "logs" / "trainer.log").read_text())
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            assert await process.wait() == 130
    assert alive(pids) == {}


async def test_a_stop_waits_for_the_checkpoint_and_tells_how_far_it_is_while_the_others_end(tmp_path: Path) -> None:
    """For longer than all others together may take."""
    run = Run(tmp_path / "run", recipe(steps=100_000), {"FAKE_SLOW_CHECKPOINT": "1"}, stop_within_s=3.0)
    async with running(run) as ending:
        await run.until_step(2)
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: re.search(r"writing the checkpoint of version \d+: 0 MB", run.printed.getvalue()) is not None)
        began_s = time.monotonic()
        await until(lambda: alive({name: pid for name, pid in run.pids().items() if name in ("actor-0", "verifier")}) == {})
        await until(lambda: time.monotonic() - began_s > 3.2)
        assert not ending.done()
        assert living(run.dir).keys() == {"nats", "trainer"}, "what the trainer needs stays"
        (run.dir.path / "go-on-checkpoint").touch()
        ended = await ending
    assert (ended.interrupted, newest_checkpoint(run.dir.path)) == (True, json.loads(run.dir.summary.read_text())["steps"])


async def test_a_trainer_that_hangs_does_not_hold_the_stop(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=100_000), {}, stop_within_s=0.3)
    async with running(run) as ending:
        await run.until_step(2)
        trainer = psutil.Process(run.pids()["trainer"])
        trainer.suspend()
        await until(lambda: trainer.status() == psutil.STATUS_STOPPED)
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(60):
            ended = await ending
    assert (ended.interrupted, newest_checkpoint(run.dir.path)) == (True, None)
    assert re.search(r"the trainer has not answered and has written nothing for \d+s: it hangs", run.printed.getvalue())


# Scaling


async def test_actors_are_added_and_taken_away_while_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "Läufe 数", recipe(steps=100_000), {})
    async with running(run) as ending:
        first = (await run.until_step(1))["actor-0"]
        for count, stays in ((2, True), (1, True), (0, False), (1, False)):
            command = ["scale", "actors", str(count), "--run-dir", str(run.dir.path), "--timeout", "150"]
            assert await asyncio.to_thread(main, command) == 0
            actors = [pid for name, pid in living(run.dir).items() if name.startswith("actor-")]
            assert (len(actors), first in actors) == (count, stays), "the longest-serving one stays"
        command = f"`pipelinerl scale actors N --run-dir {shlex.quote(str(run.dir.path))}`"
        assert run.printed.getvalue().count(f"number of actors is 0: nothing is generated until you run {command}") == 1
        assert not ending.done()
        os.kill(os.getpid(), signal.SIGINT)
        assert (await ending).interrupted
        assert run.printed.getvalue().count("Ctrl-C again to kill at once") == 1


async def test_scaling_down_takes_the_actor_that_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until nobody reads its output any more; not at the terminal's end, under nohup."""

    def unread(text: str) -> None:
        raise BrokenPipeError

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = Run(tmp_path / "run", recipe(steps=100_000), {"FAKE_ACTOR_EXIT": "2", "FAKE_ONLY_ACTOR": "actor-0"})
    run.dir.scale.write_text('{"actors": 2}')
    async with running(run) as ending:
        await until(lambda: "actor-0 is not restarted again: actor-0 exited with code 2" in run.printed.getvalue())
        lives = run.pids()["actor-1"]
        run.dir.scale.write_text('{"actors": 1}')
        await until(lambda: "actor-0" not in run.pids())
        assert (run.pids()["actor-1"], ending.done()) == (lives, False)
        assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN
        monkeypatch.setattr(run.local.display, "note", unread)
        assert ((await ending).interrupted, (await ending).exit_code) == (True, 141)


# A process alone: readiness, its log, early death


Start = Callable[..., "asyncio.Future[ServiceProcess]"]
SERVICE = """
import http.server, json, os, sys, threading
ready = threading.Event()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/readyz" and ready.is_set() else 503)
        self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
address = {"grpc": "127.0.0.1:1", "http": "127.0.0.1:%d" % server.server_port, "pid": os.getpid()}
with open(sys.argv[1] + ".part", "w") as file: json.dump(address, file)
os.replace(sys.argv[1] + ".part", sys.argv[1])
if len(sys.argv) > 2: threading.Timer(float(sys.argv[2]), ready.set).start()
server.serve_forever()
"""


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts `python -c CODE ADDRESS_FILE ARGS...` as a service; what a test leaves running is killed."""
    started: list[ServiceProcess] = []

    async def _start(code: str, *args: str, name: str = "service") -> ServiceProcess:
        address = tmp_path / f"{name}.json"
        command = (sys.executable, "-S", "-u", "-c", code, str(address), *args)
        process = await ServiceProcess.start(Launch(name, command, os.environ, tmp_path / f"{name}.log", address))
        started.append(process)
        return process

    yield _start  # type: ignore[misc]
    for process in started:
        await process.kill_and_wait()


async def test_ready_waits_for_the_address_and_for_readyz_and_names_who_never_gets_ready_with_its_log(start: Start) -> None:
    process, never = await start(SERVICE, "0.3"), await start("print('booting...')\n" + SERVICE, name="never")
    address = await process.address(timeout_s=60)
    assert address.pid == process.pid
    assert await process.ready(timeout_s=60) == address
    await process.terminate(grace_s=60)
    assert process.returncode == -signal.SIGTERM
    await never.address(timeout_s=60)
    with pytest.raises(ServiceError, match=r"(?s)never is not ready .* after 0.5 s; end of .*booting\.\.\."):
        await never.ready(timeout_s=0.5)
    assert never.returncode is None


async def test_a_log_that_grows_too_long_keeps_its_end_beside_it_and_goes_on(start: Start) -> None:
    process = await start("import sys\nfor line in map(str, range(2000)): print(line)\nprint('\\x1b[2J\\x07')\n" + SERVICE)
    await process.address(timeout_s=60)
    log = process.launch.log
    bound_log(log, most_bytes=10**6)
    assert log_tail(log, lines=2) == "1999\n\\x1b[2J\\x07"
    bound_log(log, most_bytes=1000)
    assert (log.read_bytes(), log.with_suffix(".log.1").stat().st_size) == (b"", 1000)
    assert log_tail(log.with_suffix(".log.1"), lines=2) == "1999\n\\x1b[2J\\x07"
    with log.open("ab") as file:
        file.write(b"next\n")
    assert log.read_bytes() == b"next\n", "whoever has it open writes at its end"


async def test_a_command_that_cannot_be_executed_is_named(tmp_path: Path) -> None:
    def launch(command: str) -> Launch:
        return Launch("ghost", (command,), os.environ, tmp_path / "ghost.log", tmp_path / "ghost.json")

    process = await ServiceProcess.start(launch("/no/such/program"))
    with pytest.raises(ServiceDied, match="/no/such/program cannot be run"):
        await process.address(timeout_s=3600)
    with pytest.raises(ServiceError, match="ghost cannot be started"):
        await ServiceProcess.start(launch("x" * 300_000))
