"""A run that is submitted to a cluster: from an API server that helm uses, without pods. tests/cluster has the pods."""

import asyncio
import base64
import json
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import pytest

from pipelinerl.cli import main
from pipelinerl.commands.submit import chart_values
from pipelinerl.errors import ServiceError
from pipelinerl.kube import submission
from pipelinerl.kube.client import Permission, PersonClient, name_of
from pipelinerl.kube.submission import Look, Release, failure_of, fetch, files_of, watch, why_not_ready
from pipelinerl.local.progress import Display
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import known_recipes, load_recipe
from pipelinerl.service.tls import server_credentials
from pipelinerl.v1 import trainer_pb2, trainer_pb2_grpc
from tests.chart.rendering import CPU_VALUES, HELM, NAMESPACE, Object, Rendered
from tests.cluster.api_server import ApiServer
from tests.support.certificates import Authority

INSTANCE, COMPONENT, PART_OF = (f"app.kubernetes.io/{name}" for name in ("instance", "component", "part-of"))
SUBMIT = ("submit", "arithmetic", "-n", NAMESPACE, "--release", "own", "--values", str(CPU_VALUES))
ATTACH = ("submit", "--attach", "own", "-n", NAMESPACE)


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer(Rendered([]), NAMESPACE)
    monkeypatch.setenv("PATH", f"{HELM.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    async with server.serve("127.0.0.1", 0, tmp_path / "api"):
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", f"https://127.0.0.1:{server.port}")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))  # helm reads it; the library has read it when it was imported
        monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
        yield server


@pytest.fixture
async def release(api: ApiServer) -> AsyncIterator[Release]:
    async with PersonClient(NAMESPACE) as client:
        yield Release("own", client)


async def pipelinerl(*arguments: str) -> int:
    async with asyncio.timeout(300):
        return await asyncio.to_thread(main, arguments)


async def errors_of(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert await pipelinerl(*arguments) == code
    return capsys.readouterr().err


def pod(name: str, component: str, **status: Any) -> Object:
    labels = {INSTANCE: "own", COMPONENT: component}
    return {"kind": "Pod", "metadata": {"name": name, "uid": name, "labels": labels}, "spec": {}, "status": status}


READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


def job_ends(api: ApiServer, message: str = "") -> None:
    """Each Job ends at once: it fails if its pod says something."""

    def end(item: Object) -> None:
        if item["kind"] == "Job":
            item["status"] = {"conditions": [{"type": "Failed" if message else "Complete", "status": "True"}]}
            if message:
                ended = {"terminated": {"exitCode": 2, "message": message}}
                one = pod("own-validation-x", "validation", phase="Failed", containerStatuses=[{"state": ended}])
                api.put(one | {"metadata": item["spec"]["template"]["metadata"] | {"name": "own-validation-x", "uid": "x"}})
            asyncio.get_running_loop().call_later(0.1, api.notify, "MODIFIED", item)

    api.appeared = end


async def test_a_name_stays_taken_until_removal(api: ApiServer, release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    job_ends(api)
    assert await pipelinerl(*SUBMIT, "--set", "trainer.steps=7") == 0
    assert "pipelinerl submit --attach own -n train" in capsys.readouterr().out
    recipe = api._rendered.one("ConfigMap", "own-pipelinerl-recipe")["data"]["recipe.yaml"]
    assert "steps: 7" in recipe
    trainer = api._rendered.one("StatefulSet", "own-pipelinerl-trainer")["spec"]["template"]["spec"]["containers"][0]
    told = {entry["name"]: entry.get("value") for entry in trainer["env"]}
    assert (told["PIPELINERL_RUN"], told["PIPELINERL_ON_COMPLETION"]) == ("own", "keep")

    said = await errors_of(capsys, 2, *SUBMIT)
    assert "--release = 'own': this release exists" in said
    assert "helm uninstall own -n train --kube-context tests --ignore-not-found && kubectl -n train --context tests" in said
    assert release.claims in said
    claim = api._rendered.one("PersistentVolumeClaim", "own-pipelinerl-trainer")
    foreign = {"name": "math-data", "labels": {INSTANCE: "own", COMPONENT: "primary"}}
    api._rendered.objects.append({"kind": "PersistentVolumeClaim", "metadata": foreign})
    await submission.remove(release)
    assert [name_of(item) for item in api._rendered.objects] == ["math-data"]
    api._rendered.objects.append(claim)
    assert "left the claims own-pipelinerl-trainer" in await errors_of(capsys, 2, *SUBMIT)
    await submission.remove(release)  # which is gone, but not its claim
    assert [name_of(item) for item in api._rendered.objects] == ["math-data"]
    state = {"kind": "ConfigMap", "data": {"run": "own"}}
    labels = {INSTANCE: "other", COMPONENT: "trainer", PART_OF: "pipelinerl"}
    api._rendered.objects.append(state | {"metadata": {"name": "other-run", "labels": labels}})
    assert "the release other has a run of this name" in await errors_of(capsys, 2, *SUBMIT)


async def test_a_recipe_that_the_job_refuses_is_uninstalled(api: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    job_ends(api, "trainer.batch_size = 7: \x1b[31mno")
    assert await pipelinerl(*SUBMIT) == 2
    said = capsys.readouterr()
    assert "trainer.batch_size = 7" in said.err
    assert "\x1b" not in said.err + said.out
    assert "nothing is left installed" in said.err
    assert [(item["kind"], name_of(item)) for item in api._rendered.objects] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("submit", "-n", "x"), "give either a recipe, or --attach"),
        ((*SUBMIT, "--attach", "own"), "give either a recipe, or --attach"),
        ((*SUBMIT, "--values", "absent.yaml"), "--values = 'absent.yaml': is no file, or has a comma"),
        (("submit", "arithmetic", "-n", "x", "--release", "a.b"), "--release = 'a.b': use 1-40"),
        ((*SUBMIT, "--output", "."), "has other files"),
        (("submit", "arithmetic", "-n", "x", "--set", "trainer.batch_size=7"), "trainer.batch_size"),
        (SUBMIT, "helm is not on PATH: install Helm 3.14 or newer"),
        (SUBMIT, "helm is v3.9.1: install Helm 3.14 or newer"),
    ],
)
async def test_mistakes_are_found_before_anything_is_installed(
    api: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    if told.startswith("helm is"):
        monkeypatch.setenv("PATH", str(Path.cwd()))
        Path("helm").write_text(f"#!{sys.executable}\nprint('v3.9.1')\n")
        Path("helm").chmod(0o755 if "v3.9.1" in told else 0o644)
    assert told in await errors_of(capsys, 2, *arguments)
    assert api._rendered.objects == []


@pytest.mark.parametrize(
    ("at", "arguments", "told", "is_there"),
    [
        ("check_absent", SUBMIT, "interrupted; nothing was installed\n", False),
        ("install", SUBMIT, "may be installed; before you submit again, remove it: helm uninstall own", False),
        ("look", (*SUBMIT, "--watch"), "the run goes on\n  watch and fetch  pipelinerl submit --attach own -n train", True),
        ("check_helm", ATTACH, "the run goes on\n  watch and fetch", False),
    ],
)
async def test_an_interrupted_command_says_what_there_is_and_how_to_go_on(
    api: ApiServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    arguments: tuple[str, ...],
    told: str,
    is_there: bool,
) -> None:
    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    job_ends(api)
    monkeypatch.setattr(submission, at, interrupted)
    assert told in await errors_of(capsys, 130, *arguments)
    assert bool(api._rendered.objects) is is_there


# --- watching


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Takes the steps that a test tells it to."""

    def __init__(self) -> None:
        self.incarnation, self.version, self.taken = 1, 0, list[int]()

    def GetStatus(self, request: Any, context: Any) -> trainer_pb2.TrainerStatus:
        told = "waiting for \x1b sequences"
        return trainer_pb2.TrainerStatus(incarnation=self.incarnation, policy_version=self.version, message=told)

    def StreamMetrics(self, request: Any, context: Any) -> Any:
        for step in [step for step in self.taken if step >= request.from_step]:
            yield trainer_pb2.StepMetrics(step=step, json=json.dumps({"step": step, "policy_version": step}))


@asynccontextmanager
async def trainer_served(monkeypatch: pytest.MonkeyPatch, tls_dir: Path | None) -> AsyncIterator[Trainer]:
    trainer, server, credentials = Trainer(), grpc.server(futures.ThreadPoolExecutor(4)), server_credentials(tls_dir)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server)
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    monkeypatch.setattr(submission, "_GRPC_PORT", port)
    monkeypatch.setattr(submission, "_LOOK_S", 0.05)
    server.start()
    try:
        yield trainer
    finally:
        server.stop(None)


def publish(api: ApiServer, **data: str) -> None:
    labels = {INSTANCE: "own", COMPONENT: "trainer", PART_OF: "pipelinerl"}
    metadata = {"name": "own-pipelinerl-run", "uid": "u", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    others = [item for item in api._rendered.objects if item["kind"] != "ConfigMap"]
    api._rendered.objects[:] = [*others, {"kind": "ConfigMap", "metadata": metadata, "data": data}]


async def until(condition: Callable[[], bool], running: asyncio.Task[Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            if running.done():
                running.result()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("tls", [False, True])
async def test_a_watch_survives_an_api_that_is_away_dropped_connections_and_a_new_trainer(
    api: ApiServer, release: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tls: bool
) -> None:
    state, shown, tls_dir = release.state, StringIO(), None
    release.display = Display(shown, 0.0)
    trainer_pod = pod("own-pipelinerl-trainer-0", "trainer", **READY)
    if tls:
        tls_dir = Authority().issue(tmp_path / "tls", "own-pipelinerl-trainer")
        trainer_pod["spec"]["volumes"] = [{"name": "tls", "secret": {"secretName": "its-tls"}}]
        data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in tls_dir.iterdir()}
        api._rendered.objects.append({"kind": "Secret", "metadata": {"name": "its-tls"}, "data": data})
    no_node = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    async with trainer_served(monkeypatch, tls_dir) as trainer:
        publish(api, steps="4")
        api.put(pod("own-pipelinerl-trainer-0", "trainer", phase="Pending", conditions=[no_node]))
        watching = asyncio.create_task(watch(release))
        await until(lambda: state.phase == "trainer-0: Pending: 0/3 nodes are available", watching)
        trainer.taken = [1, 2]
        trainer_pod["status"]["podIP"] = "127.0.0.1"
        api.put(trainer_pod)
        await until(lambda: state.step == 2, watching)
        api.drop_sockets()
        trainer.taken = [1, 2, 3]
        await until(lambda: state.step == 3, watching)
        await api.stop()
        await until(lambda: "waiting for the Kubernetes API" in state.phase, watching)
        await api.start("127.0.0.1", api.port)
        trainer.incarnation, trainer.version, trainer.taken = 2, 1, [1]
        api.put(trainer_pod | {"metadata": trainer_pod["metadata"] | {"uid": "another"}})
        await until(lambda: state.step == 1, watching)  # a restart undid steps
        trainer.taken = [1, 2, 3, 4]
        await until(lambda: state.step == 4, watching)
        publish(api, steps="4", phase="Finished")
        assert (await watching).data["phase"] == "Finished"
    assert "step 4/4" in shown.getvalue()
    assert "\x1b" not in shown.getvalue()


async def test_a_run_that_failed_is_told_with_its_reason_and_stays(api: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    publish(api, phase="Failed", reason="reward.scorer = 'x': no such module")
    said = await errors_of(capsys, 1, *ATTACH)
    assert "the run failed: reward.scorer = 'x': no such module" in said
    assert "kubectl -n train --context tests logs -l app.kubernetes.io/instance=own" in said
    assert api._rendered.find("ConfigMap", "own-pipelinerl-run")
    said = await errors_of(capsys, 1, "submit", "--attach", "other", "-n", NAMESPACE)
    assert "found no run of release other in namespace train" in said


@pytest.mark.parametrize(
    ("withheld", "command"),
    [
        (Permission("configmaps", "list"), ("runs", "-n", NAMESPACE)),
        (Permission("statefulsets", "list", "apps"), ("runs", "-n", NAMESPACE)),
        (Permission("pods", "list"), ATTACH),
        (Permission("pods/portforward", "get"), ATTACH),
    ],
)
async def test_a_right_that_is_missing_is_named(
    api: ApiServer, capsys: pytest.CaptureFixture[str], withheld: Permission, command: tuple[str, ...]
) -> None:
    api.withheld = {withheld}
    publish(api, steps="4", phase="Running")
    api.put(pod("own-pipelinerl-trainer-0", "trainer", **READY))
    assert f"resources [{withheld.resource}], verbs [{withheld.verb}" in await errors_of(capsys, 1, *command)


# --- fetching


FINISHED_RUN = Look("own-pipelinerl", {"run": "volume"}, [], uid="u 4")


@pytest.fixture
def run_dir(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The volume of a pod whose commands run here."""
    monkeypatch.setattr(submission, "_FOLDER", tmp_path)
    folder = tmp_path / "volume"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(json.dumps(chart_values(load_recipe("arithmetic"), "own")["recipe"]["inline"]))
    (folder / "checkpoint" / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (folder / "checkpoint" / "empty").touch()
    (folder / "metrics.jsonl").touch()
    (folder / "checkpoint" / "secret").symlink_to("/etc/hostname")
    api.put(pod("own-pipelinerl-trainer-0", "trainer"))

    async def execute(name: str, container: str, command: list[str]) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)

    api.execute = execute
    return folder


async def test_results_come_whole_over_connections_that_drop(
    api: ApiServer, release: Release, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "_LOOK_S", 0.01)
    dropped = list[str]()

    def drop_once(phase: str) -> None:
        if "model.safetensors" in phase and not dropped:
            dropped.append(phase)
            api.drop_sockets()

    monkeypatch.setattr(release, "show", drop_once)
    report = await fetch(release, FINISHED_RUN, tmp_path / "here")
    assert dropped
    assert (tmp_path / "here").stat().st_mode & 0o777 == 0o700  # prompts and completions are for the user alone
    assert report.read_text().startswith("<!doctype html>")
    got = {str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*") if path.is_file()}
    checkpoint = {"checkpoint/model.safetensors", "checkpoint/empty"}
    assert got == {".submitted", "recipe.yaml", "metrics.jsonl", "report.html"} | checkpoint
    for name in ("recipe.yaml", "checkpoint/model.safetensors"):
        assert (tmp_path / "here" / name).read_bytes() == (run_dir / name).read_bytes()


async def test_a_foreign_release_is_not_removed(api: ApiServer, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dashboard = {"name": "own-pipelinerl-dashboard-run", "labels": {INSTANCE: "own"}}
    api._rendered.objects.append({"kind": "ConfigMap", "metadata": dashboard})
    publish(api, phase="Finished", run="volume", steps="0")
    assert await pipelinerl(*ATTACH) == 0
    assert "remove      helm uninstall own -n train" in capsys.readouterr().out
    assert api._rendered.find("ConfigMap", "own-pipelinerl-run")
    assert Path("runs", "own", "report.html").is_file()

    publish(api, phase="Finished", run="volume", steps="0", policyVersion="9")  # other weights of the same size
    assert "--output = 'runs/own': has other files; give a folder that is empty" in await errors_of(capsys, 2, *ATTACH)
    Path("runs", "own", ".submitted").write_text("another installation 9")
    assert await pipelinerl(*ATTACH) == 2


async def test_an_installation_that_helm_refuses_removes_nothing(api: ApiServer, release: Release, tmp_path: Path) -> None:
    """Somebody else installs a release of this name while this one is refused."""
    job_ends(api)
    assert await pipelinerl(*SUBMIT) == 0
    before = [*api._rendered.objects]
    values = chart_values(load_recipe("arithmetic"), "own")
    with pytest.raises(ServiceError, match="nosuch"):
        await submission.install(release, str(tmp_path / "nosuch"), [], values)
    assert api._rendered.objects == before


async def test_results_that_cannot_be_fetched_remove_nothing(
    api: ApiServer, run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, files = api.execute, list[str]()

    async def breaks(name: str, container: str, command: list[str]) -> asyncio.subprocess.Process:
        """Each connection ends after a few bytes, and from the fifth on before the first byte."""
        if command[0] == "tail":
            files.append(command[-1])
            command = ["sh", "-c", f"{shlex.join(command)} | head -c {4096 if len(files) < 5 else 0}"]
        process = await execute(name, container, command)
        if command[0] == "sh":
            monkeypatch.setattr(process, "wait", dropped)
        return process

    async def dropped() -> None:
        api.drop_sockets()

    monkeypatch.setattr(submission, "_LOOK_S", 0.01)
    monkeypatch.setattr(submission, "_GIVE_UP_S", 0.0)
    publish(api, phase="Finished", run="volume", steps="0")
    api.execute = breaks
    said = await errors_of(capsys, 1, *ATTACH)
    assert "pods/exec: no answer: the connection ended; nothing has arrived for 0 s; run the command again" in said
    assert "nothing was removed; fetch the results again with: pipelinerl submit --attach own -n train" in said
    kept = Path("runs", "own", "checkpoint", "model.safetensors")
    assert 0 < kept.stat().st_size < 5 * 4096 < (run_dir / "checkpoint" / kept.name).stat().st_size
    api.execute = execute
    assert await pipelinerl(*ATTACH) == 0
    assert kept.read_bytes() == (run_dir / "checkpoint" / kept.name).read_bytes()

    async def grows(name: str, container: str, command: list[str]) -> asyncio.subprocess.Process:
        if command[0] == "tail":
            Path(command[-1]).write_bytes(b"x" * (Path(command[-1]).stat().st_size + 1))
        return await execute(name, container, command)

    api.execute = grows
    assert "bytes instead of" in await errors_of(capsys, 1, *ATTACH, "--output", "other")
    (run_dir / "recipe.yaml").unlink()
    assert "lacks recipe.yaml" in await errors_of(capsys, 1, *ATTACH)
    api.withheld = {Permission("pods/exec", "get")}
    assert "resources [pods/exec], verbs [get, create]" in await errors_of(capsys, 1, *ATTACH)
    assert api._rendered.find("ConfigMap", "own-pipelinerl-run")


def test_no_file_is_written_outside_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "a").symlink_to("/tmp")
    outside = dict.fromkeys((b"1 checkpoint/../../x", b"1 checkpoint/\0", b"1 checkpoint/a/b"), "which leads out of")
    no_lists = dict.fromkeys((b"recipe.yaml", b"many recipe.yaml", b"1 \xff"), "cannot read the list of files")
    for listed, why in (outside | no_lists).items():
        with pytest.raises(ServiceError, match=why):
            files_of(listed, tmp_path)
    (linked := tmp_path / "linked").symlink_to(tmp_path)
    listed = files_of(b"1 ../x\n1 /etc/passwd\n1 .\n1 other\n2 checkpoint/b", linked)  # the folder itself may be a link
    assert listed == {"checkpoint/b": (2, linked / "checkpoint" / "b")}


def test_what_a_pod_waits_for() -> None:
    def told(phase: str, **state: Object) -> str:
        return why_not_ready(pod("p", "trainer", phase=phase, containerStatuses=[{"state": state}] if state else []))

    assert why_not_ready(pod("p", "trainer", **READY)) == told("Succeeded") == ""
    assert (told("Pending"), told("Running")) == ("Pending", "starting")
    assert told("Pending", waiting={"reason": "ErrImagePull", "message": "no"}) == "ErrImagePull: no"
    assert told("Failed", terminated={"exitCode": 1, "message": "x"}) == "exit code 1: x"


def test_a_run_failed_where_its_state_or_its_trainer_says_so() -> None:
    def ended(code: int, where: str) -> Object:
        return pod("t", "trainer", containerStatuses=[{where: {"terminated": {"exitCode": code, "message": "why"}}}])

    assert failure_of({"phase": "Failed", "reason": "r"}, None) == "r"
    assert failure_of({}, ended(2, "lastState")) == failure_of({}, ended(2, "state")) == "why"
    assert failure_of({"phase": "Running"}, ended(1, "lastState")) is failure_of({}, None) is None


@pytest.mark.parametrize("name", sorted(known_recipes()))
def test_the_chart_gets_the_same_recipe(name: str) -> None:
    recipe = load_recipe(name, ["trainer.steps=3"])
    assert Recipe.model_validate(chart_values(recipe, "r")["recipe"]["inline"]) == recipe


async def test_runs_are_listed_in_a_table_with_what_is_known_of_them(
    api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no runs in namespace train" in await errors_of(capsys, 0, "runs", "-n", NAMESPACE)
    publish(api, run="own\x1b[2J", phase="Running", steps="8", step="3", heldoutAccuracy="0.5", lag="1.25")
    metadata = {"name": "silent-trainer", "labels": {INSTANCE: "silent", COMPONENT: "trainer", PART_OF: "pipelinerl"}}
    silent = {"kind": "StatefulSet", "metadata": metadata | {"creationTimestamp": "2025-01-01T00:00:00Z"}}
    api._rendered.objects.append(silent)
    assert await pipelinerl("runs", "-n", NAMESPACE) == 0
    header, line, other = capsys.readouterr().out.splitlines()
    assert other.split()[0] == "silent"
    assert header.split() == ["RELEASE", "RUN", "PHASE", "STEP", "ACCURACY", "LAG", "AGE"]
    assert line.split()[:7] == ["own", "own\\x1b[2J", "Running", "3", "of", "8", "0.5"]
