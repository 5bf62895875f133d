"""How services of a local run are started: every variable that is set is a setting, every required setting is set."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pipelinerl.local.processes import Launch
from pipelinerl.local.services import ServiceCommands, ServiceLaunches, ThreadPlan, cache_folder
from pipelinerl.local.supervisor import RestartCounter, RestartPolicy, StopBudget
from pipelinerl.recipe.loading import recipe_from_data
from pipelinerl.run_dir import RunDir
from pipelinerl.service.address import ServiceAddress
from pipelinerl.service.settings import (
    ActorSettings,
    ServiceSettings,
    TrainerSettings,
    VerifierSettings,
)

NATS, VERIFIER = "nats://127.0.0.1:4000", "127.0.0.1:5000"


def launches(tmp_path: Path, **sections: object) -> ServiceLaunches:
    data = {"name": "tiny", "model": {"source": "hub", "name": "a/b"}, "task": {}, "actor": {"count": 3}, **sections}
    recipe, run = recipe_from_data(data, "tiny"), RunDir(tmp_path, "tiny-run")
    return ServiceLaunches(recipe, run, ThreadPlan(4, 2), {"PATH": "/bin"}, ServiceCommands(), nats_url=NATS)


def settings_of(launch: Launch, kind: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    for name, value in launch.environment.items():
        monkeypatch.setenv(name, value)
    return kind()  # type: ignore[call-arg]


def test_every_variable_is_a_setting(tmp_path: Path) -> None:
    made = launches(tmp_path)
    for launch, kind in [
        (made.verifier(), VerifierSettings),
        (made.trainer(VERIFIER, "/model"), TrainerSettings),
        (made.actor(1, VERIFIER, "/model"), ActorSettings),
    ]:
        own = {name for name in launch.environment if name.startswith("PIPELINERL_")}
        assert own <= {f"PIPELINERL_{name.upper()}" for name in kind.model_fields}, launch.name
        assert launch.environment["PATH"] == "/bin"


def test_settings_of_each_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launches(tmp_path)
    trainer = settings_of(made.trainer(VERIFIER, "/model"), TrainerSettings, monkeypatch)
    assert isinstance(trainer, TrainerSettings)
    assert (trainer.run, trainer.instance, trainer.nats_url) == ("tiny-run", "trainer", NATS)
    assert (trainer.verifier, trainer.model_dir, trainer.expected_actors) == (VERIFIER, "/model", 3)
    assert (trainer.run_dir, trainer.recipe) == (tmp_path.resolve(), tmp_path.resolve() / "recipe.yaml")
    assert (trainer.grpc_port, trainer.http_port) == (0, 0)
    actor = settings_of(made.actor(2, VERIFIER, "/model"), ActorSettings, monkeypatch)
    assert (actor.instance, actor.address_file) == ("actor-2", tmp_path.resolve() / "addresses" / "actor-2.json")


def test_a_trainer_is_told_how_many_actors_there_are_by_now(tmp_path: Path) -> None:
    launch = launches(tmp_path).trainer(VERIFIER, "/model", actors=0)
    assert launch.environment["PIPELINERL_EXPECTED_ACTORS"] == "0"


def test_threads_reach_the_processes(tmp_path: Path) -> None:
    made = launches(tmp_path)
    assert made.trainer(VERIFIER, "").environment["OMP_NUM_THREADS"] == "4"
    assert made.actor(0, VERIFIER, "").environment["OMP_NUM_THREADS"] == "2"
    assert made.actor(0, VERIFIER, "").environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert made.verifier().environment["OMP_NUM_THREADS"] == "1"
    assert made.initial_model((), threads=8).environment["OMP_NUM_THREADS"] == "8"


def test_a_restarted_verifier_keeps_its_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launches(tmp_path).verifier(again=ServiceAddress("127.0.0.1:5000", "127.0.0.1:5001", 1))
    settings = settings_of(launch, VerifierSettings, monkeypatch)
    assert (settings.grpc_port, settings.http_port) == (5000, 5001)


# Restarts


def test_restarts_wait_longer_each_time_and_end() -> None:
    counter = RestartCounter(RestartPolicy(limit=3, first_delay_s=1.0, factor=2.0))
    assert [counter.next_delay_s(1.0, exit_code=1, served=True) for _ in range(5)] == [1.0, 2.0, 4.0, None, None]


def test_a_service_that_never_served_gets_one_more_chance_a_users_mistake_none() -> None:
    counter = RestartCounter(RestartPolicy())
    assert [counter.next_delay_s(1.0, exit_code=-9, served=False) for _ in range(3)] == [1.0, None, None]
    assert RestartCounter(RestartPolicy()).next_delay_s(1.0, exit_code=2, served=True) is None
    assert RestartCounter(RestartPolicy()).next_delay_s(1.0, exit_code=0, served=True) == 1.0


def test_deaths_are_counted_in_a_row_until_the_run_gets_further_or_the_process_lives_long() -> None:
    reached = 0
    row = RestartCounter(RestartPolicy(limit=2, first_delay_s=1.0, stable_s=600.0), lambda: reached)

    def after(lived_s: float = 1.0) -> float | None:
        return row.next_delay_s(lived_s, exit_code=1, served=True)

    assert [after(), after()] == [1.0, 2.0]
    reached = 5
    assert [after(), after(), after()] == [1.0, 2.0, None], "5 again is no progress"
    reached = 4
    assert after() is None, "less is none either"
    assert after(lived_s=600.0) == 1.0


# Stopping


def test_the_time_to_stop_is_shared_and_runs_from_the_first_stop() -> None:
    now = 100.0
    budget = StopBudget(lambda: now, within_s=12.0)
    assert not budget.started
    assert budget.grace_s("trainer") == 7.0
    assert budget.started
    now = 107.0
    assert budget.grace_s("actor") == 2.5
    now = 109.5
    assert budget.grace_s("verifier") == 1.5
    now = 111.0
    assert budget.grace_s("nats") == 1.0
    now = 200.0
    assert budget.grace_s("nats") == 0.2


def test_a_quick_service_leaves_its_time_to_the_next() -> None:
    now = 0.0
    budget = StopBudget(lambda: now, within_s=12.0)
    budget.start()
    now = 1.0
    assert budget.grace_s("actor") == 8.5


# The cache of initial models


def test_where_the_cache_is() -> None:
    assert cache_folder({"PIPELINERL_CACHE": "/somewhere"}) == Path("/somewhere")
    assert cache_folder({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/pipelinerl")
    assert cache_folder({}) == Path.home() / ".cache" / "pipelinerl"


def test_the_trainers_page_keeps_its_port_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(made: ServiceLaunches, again: ServiceAddress | None = None) -> tuple[bool, int]:
        found = settings_of(made.trainer(VERIFIER, "/model", again=again), TrainerSettings, monkeypatch)
        assert isinstance(found, TrainerSettings)
        return found.page, found.http_port

    made = launches(tmp_path)
    assert settings(made) == (True, 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        again = ServiceAddress("127.0.0.1:1", f"127.0.0.1:{port}", 1)
        assert settings(made, again) == (True, 0), "somebody else has it now"
        assert settings(replace(made, page_port=port), again) == (True, 0)
    assert settings(made, again) == (True, port)
    assert settings(replace(made, page_port=8000)) == (True, 8000)
    assert settings(replace(made, page_port=None)) == (False, 0)
    assert settings(replace(made, page_port=None), again) == (False, 0), "nobody keeps its address"
