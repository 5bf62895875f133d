"""How each service of a local run is started: its command and its environment, the same settings a pod gets.

Builds `Launch` objects and starts nothing; of this machine it asks only whether the page's port is free.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelinerl.config.recipe import Recipe
from pipelinerl.local.ports import why_taken
from pipelinerl.local.process import Launch
from pipelinerl.local.run_dir import RunDir
from pipelinerl.local.threads import ThreadPlan
from pipelinerl.service.address import ServiceAddress, split_host_port


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)


@dataclass(frozen=True)
class ServiceCommands:
    """What the containers run, as commands of this interpreter."""

    verifier: tuple[str, ...] = field(default_factory=lambda: _module("services.verifier"))
    trainer: tuple[str, ...] = field(default_factory=lambda: _module("services.trainer"))
    actor: tuple[str, ...] = field(default_factory=lambda: _module("services.actor"))
    initial_model: tuple[str, ...] = field(default_factory=lambda: _module("services.trainer.warmstart"))


@dataclass(frozen=True)
class ServiceLaunches:
    """Launches of one run's services. `environment` is what they inherit from the runner."""

    recipe: Recipe
    run_dir: RunDir
    threads: ThreadPlan
    environment: Mapping[str, str]
    commands: ServiceCommands
    nats_url: str = ""
    page_port: int | None = 0
    """Of the trainer's live page; 0 = any free port, None = no page."""

    def verifier(self, again: ServiceAddress | None = None) -> Launch:
        """`again`: where it listened before a restart; actors keep that address."""
        settings = {"workers": "2"}
        if again is not None:
            settings |= {"grpc_port": _port(again.grpc), "http_port": _port(again.http)}
        return self._launch("verifier", self.commands.verifier, settings, self.threads.light_env())

    def trainer(
        self, verifier: str, model_dir: str, actors: int | None = None, again: ServiceAddress | None = None
    ) -> Launch:
        """`actors`: how many there are; the recipe's number unless it was changed. `again`: where it listened before a restart;
        pages that are open keep that address, if nobody else has taken its port meanwhile."""
        settings = {
            "nats_url": self.nats_url,
            "verifier": verifier,
            "model_dir": model_dir,
            "run_dir": str(self.run_dir.path.resolve()),
            "expected_actors": str(self.recipe.actor.count if actors is None else actors),
            "page": "false" if self.page_port is None else "true",
            "http_port": self._trainer_port(again),
        }
        return self._launch(
            "trainer", self.commands.trainer, settings, self.threads.trainer_env(self.recipe.trainer.nproc)
        )

    def _trainer_port(self, again: ServiceAddress | None) -> str:
        """Where the page was, or shall be; any free one where that cannot be had again, or there is no page."""
        if self.page_port is None:
            return "0"
        if again is None:
            return str(self.page_port)
        port = _port(again.http)
        return "0" if why_taken(int(port)) else port

    def actor(self, index: int, verifier: str, model_dir: str) -> Launch:
        settings = {"nats_url": self.nats_url, "verifier": verifier, "model_dir": model_dir}
        return self._launch(f"actor-{index}", self.commands.actor, settings, self.threads.actor_env())

    def initial_model(self, arguments: tuple[str, ...], threads: int) -> Launch:
        """Nothing else runs beside it."""
        command = (*self.commands.initial_model, *arguments)
        return self._launch("warmstart", command, {}, {"OMP_NUM_THREADS": str(threads)})

    def _launch(
        self, name: str, command: tuple[str, ...], settings: Mapping[str, str], threads: Mapping[str, str]
    ) -> Launch:
        address_file = self.run_dir.address(name).resolve()
        common = {
            "run": self.run_dir.name,
            "recipe": str(self.run_dir.recipe.resolve()),
            "instance": name,
            "address_file": str(address_file),
        }
        own = {f"PIPELINERL_{key.upper()}": value for key, value in {**common, **settings}.items()}
        return Launch(name, command, {**self.environment, **threads, **own}, self.run_dir.log(name), address_file)


def _port(address: str) -> str:
    return str(split_host_port(address)[1])
