"""How services of a local run are started, restarted and given time to stop, and how they share the cores: by hand."""

import resource
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.initial_model import COMPILED
from pipelinerl.local.processes import Launch, Restarts, raise_open_files
from pipelinerl.local.runner import grace_s
from pipelinerl.local.services import ServiceLaunches, ThreadPlan, available_cores, keep_to_quota, plan_threads, private_files
from pipelinerl.recipe.loading import recipe_from_data
from pipelinerl.run_dir import RunDir
from pipelinerl.service.retry import Backoff
from pipelinerl.service.settings import ActorSettings, ServiceAddress, ServiceSettings, TrainerSettings, VerifierSettings
from tests.support.machine import free_port, usual_open_files

NATS, VERIFIER = "nats://127.0.0.1:4000", "127.0.0.1:5000"


@pytest.fixture
def launches(tmp_path: Path) -> ServiceLaunches:
    data = {"name": "tiny", "model": {"source": "hub", "name": "a/b"}, "task": {}, "actor": {"count": 3}}
    known = {"nats_url": NATS, "verifier_address": VERIFIER, "model_dir": "/model"}
    recipe, run = recipe_from_data(data, "tiny"), RunDir(tmp_path, "tiny-run")
    return ServiceLaunches(recipe, run, ThreadPlan(4, 2), {"PATH": "/bin"}, **known)  # type: ignore[arg-type]


def settings_of(launch: Launch, kind: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    own = {name for name in launch.environment if name.startswith("PIPELINERL_")}
    assert own <= {f"PIPELINERL_{name.upper()}" for name in kind.model_fields}, launch.name
    assert launch.environment["PATH"] == "/bin"
    for name, value in launch.environment.items():
        monkeypatch.setenv(name, value)
    return dict(kind())  # type: ignore[call-arg]


def test_settings_of_each_service(launches: ServiceLaunches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINERL_MODEL_DIR", "/of-the-shell")
    builder = settings_of(launches.initial_model(tmp_path), TrainerSettings, monkeypatch)
    assert (builder["model_cache"], builder["model_dir"]) == (tmp_path.resolve(), "")
    policy = {"run": "tiny-run", "nats_url": NATS, "model_dir": "/model"}
    trainer = settings_of(launches.trainer(0), TrainerSettings, monkeypatch)
    assert trainer.items() >= (policy | {"instance": "trainer", "expected_actors": 0, "http_port": 0}).items()
    assert (trainer["run_dir"], trainer["recipe"]) == (tmp_path.resolve(), tmp_path.resolve() / "recipe.yaml")
    secrets = tmp_path.resolve() / "secrets"
    tls = {"tls_dir": secrets / "tls", "nats_tls_dir": secrets / "tls"}
    known = {**tls, "nats_credentials": secrets / "nats-trainer", "page_key": secrets / "page-key"}
    assert trainer.items() >= known.items()
    actor = settings_of(launches.actor(2), ActorSettings, monkeypatch)
    known = {**tls, "nats_credentials": secrets / "nats-actor", "instance": "actor-2", "verifier": VERIFIER}
    assert actor.items() >= (policy | known | {"address_file": tmp_path.resolve() / "addresses" / "actor-2.json"}).items()
    started = [launches.trainer(1), launches.actor(0), launches.verifier()]
    assert [one.environment["OMP_NUM_THREADS"] for one in started] == ["4", "2", "1"]
    assert started[1].environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    again = ServiceAddress(grpc="127.0.0.1:5000", http="127.0.0.1:5001", pid=1)
    verifier = settings_of(launches.verifier(again), VerifierSettings, monkeypatch)
    assert (verifier["tls_dir"], verifier["private_dir"]) == (secrets / "tls", tmp_path.resolve())
    assert (verifier["grpc_port"], verifier["http_port"]) == (5000, 5001), "a restarted one keeps its ports"
    beside = replace(launches, run_dir=RunDir(tmp_path / "runs" / "tiny-run", "tiny-run"))
    assert settings_of(beside.verifier(), VerifierSettings, monkeypatch)["private_dir"] == tmp_path.resolve() / "runs"
    assert verifier["reward_modules"] is None
    (tmp_path / "modules").mkdir()
    assert settings_of(launches.verifier(), VerifierSettings, monkeypatch)["reward_modules"] == tmp_path.resolve() / "modules"


def test_the_trainers_page_keeps_its_port_over_restarts(launches: ServiceLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    again = ServiceAddress(grpc="127.0.0.1:1", http=f"127.0.0.1:{port}", pid=1)

    def page(page_port: int | None, again: ServiceAddress | None) -> tuple[object, object]:
        made = replace(launches, page_port=page_port)
        found = settings_of(made.trainer(1, again), TrainerSettings, monkeypatch)
        return found["page"], found["http_port"]

    assert page(0, None) == (True, 0)
    assert page(0, again) == (True, port)
    assert page(8000, None) == (True, 8000)
    assert page(None, again) == page(None, None) == (False, 0), "nobody keeps its address"
    with socket.create_server(("127.0.0.1", port)):
        assert page(0, again) == page(port, again) == (True, 0), "somebody else has it now"


@pytest.mark.parametrize(
    ("exit_code", "served", "delays_s"),
    [
        (1, True, [1.0, 2.0, 4.0, None, None]),
        (-9, False, [1.0, None, None]),  # it has never come up
        (2, True, [None]),  # a user's mistake
    ],
)
def test_restarts_wait_longer_each_time_and_end(exit_code: int, served: bool, delays_s: list[float | None]) -> None:
    restarts = Restarts(limit=3)
    assert [restarts.next_delay_s(1.0, exit_code, served) for _ in delays_s] == delays_s


def test_deaths_are_counted_in_a_row_until_the_run_gets_further_or_the_process_lives_long() -> None:
    row = Restarts(limit=2, backoff=Backoff(1.0), stable_s=600.0)

    def after(reached: int, lived_s: float = 1.0) -> float | None:
        return row.next_delay_s(lived_s, exit_code=1, served=True, reached=reached)

    assert [after(0), after(5), after(5), after(5)] == [1.0, 1.0, 2.0, None], "5 again is no progress"
    assert after(4) is None, "less is none either"
    assert after(4, lived_s=600.0) == 1.0


@pytest.mark.parametrize(
    ("kind", "left_s", "within_s", "expected_s"),
    [
        ("trainer", 12.0, 12.0, 7.0),
        ("actor", 5.0, 12.0, 2.5),
        ("actor", 11.0, 12.0, 8.5),  # the trainer was quick
        ("verifier", 2.5, 12.0, 1.5),
        ("nats", -88.0, 12.0, 0.2),
    ],
)
def test_the_time_to_stop_is_shared(kind: str, left_s: float, within_s: float, expected_s: float) -> None:
    assert grace_s(kind, left_s, within_s) == expected_s


@pytest.mark.parametrize(
    ("mode", "environment", "kept"),
    [
        (0o700, {}, True),
        (0o755, {}, True),
        (0o770, {}, False),  # others could put programs there
        (0o700, {"PIPELINERL_CACHE": "/proc/none"}, False),  # nothing can be made there
    ],
)
def test_compiled_code_is_kept_where_only_we_write(mode: int, environment: dict[str, str], kept: bool, tmp_path: Path) -> None:
    folder, cache = tmp_path / "temporary", tmp_path / "cache"
    folder.mkdir()
    (cache / COMPILED).mkdir(parents=True)
    (cache / COMPILED).chmod(mode)
    found = private_files({"PIPELINERL_CACHE": str(cache), **environment}, folder)
    assert found["TMPDIR"] == str(folder)
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    assert [link.resolve() for link in folder.iterdir()] == [cache / COMPILED] * kept


def test_a_run_may_open_as_many_files_as_the_system_lets_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with usual_open_files():
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])


@pytest.mark.parametrize(
    ("cores", "actors", "given", "plan"),
    [
        (1, 1, {}, ThreadPlan(trainer=1, engine=1)),
        (4, 1, {}, ThreadPlan(trainer=2, engine=2)),
        (8, 2, {}, ThreadPlan(trainer=4, engine=2)),
        (16, 0, {}, ThreadPlan(trainer=8, engine=8)),
        (8, 1, {"trainer_threads": 6}, ThreadPlan(trainer=6, engine=2)),
        (8, 2, {"engine_threads": 3}, ThreadPlan(trainer=2, engine=3)),
        (8, 2, {"take_turns": True}, ThreadPlan(trainer=8, engine=3)),
        (2, 3, {"take_turns": True}, ThreadPlan(trainer=2, engine=1)),
    ],
)
def test_trainer_and_engine_share_cores_or_take_turns(cores: int, actors: int, given: dict[str, Any], plan: ThreadPlan) -> None:
    assert plan_threads(cores, actors, **given) == plan


@pytest.mark.parametrize(
    ("cpu_max", "processes", "given", "cores", "threads"),
    [
        ("max 100000\n", 1, "", 16, ""),
        ("150000 100000\n", 1, "", 2, "2"),  # rounded up
        ("5000 100000\n", 1, "", 1, "1"),
        ("400000", 1, "", 4, "4"),
        ("400000 100000", 3, "", 4, "1"),
        ("400000 100000", 1, "9", 4, "9"),
    ],
)
def test_a_container_keeps_to_its_cgroups_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpu_max: str, processes: int, given: str, cores: int, threads: str
) -> None:
    """On a machine of 16 cores."""
    (tmp_path / "cpu.max").write_text(cpu_max)
    monkeypatch.setattr("pipelinerl.local.services._CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    environment = {"OMP_NUM_THREADS": given} if given else {}
    keep_to_quota(environment, processes)
    assert (available_cores(), environment.get("OMP_NUM_THREADS", "")) == (cores, threads)
