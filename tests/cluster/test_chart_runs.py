"""The chart, run as it says: its pods train on this machine, are scaled, deleted and started again.

Small models and few steps; whatever else the values say (probes, grace periods, users, read-only roots, permissions) is as
rendered.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelinerl.local.die_with_parent import guarded
from pipelinerl.recipe.model_folder import SMALL_MODELS
from tests.chart.rendering import CPU_VALUES, HELM, NAMESPACE, ROOT, Object, Rendered, render
from tests.cluster.cluster import Cluster, mini_cluster
from tests.cluster.objects import Peer, labels_of, name_of
from tests.support.certificates import Authority

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

STARTS_S, TRAINS_S = 900.0, 900.0
TRIES = 4
"""Of stopping an actor, until one of them has a group in hand."""
TRAINER, SET, ACTOR, RECIPE = "pipelinerl-trainer-0", "pipelinerl-trainer", "pipelinerl-actor", "pipelinerl-recipe"
PAGE = {"threads": 1, "page": {"enabled": True}}
RUN_DIR = "/var/lib/pipelinerl/runs/arithmetic"
HELM_TEST = {
    "task": {"heldout_problems": 32},
    "actor": {"sequences_in_progress": 12, "engine": {"kv_cache_gib": 0.25}},
    "trainer": {"steps": 4, "batch_size": 32, "warmup_steps": 0},
}
RELEASE = {
    **HELM_TEST,
    "model": {"source": "checkpoint", "name": "untrained"},
    "sampling": {"max_tokens": 96},
    "algorithm": {"max_lag": 32},
    "trainer": {**HELM_TEST["trainer"], "steps": 1_000_000, "learning_rate": 1e-9},
    "weights": {"probe_every": 2},
    "evaluation": {"every_steps": 0},
    "checkpoint": {"every_steps": 20},
    "reward": {"scorer": "task"},
    "task": None,
    "tasks": [{"name": "guess", "task": {"source": "environment", "name": "pipelinerl.tasks.environments:GuessNumber"}}],
}
"""Episodes, for which verifiers call actors. Plenty of prompts, few sequences at a time, and completions that stay as long as
those of an untrained model. So actors are slower than the trainer and have work in hand, also one that gets no new versions
because the trainer's pod is being deleted."""
OWN_RECIPE = {
    "task.heldout_problems": 32,
    "actor.sequences_in_progress": 12,
    "actor.engine.kv_cache_gib": 0.25,
    "trainer.steps": 30,
    "trainer.batch_size": 32,
    "trainer.warmup_steps": 0,
    "reward.scorer": "my_rewards:score",
}
SUBMITTED = "own-pipelinerl-trainer"
OWN_VALUES = ("--values", str(CPU_VALUES))
REWARDS = {"files": {"my_rewards.py": "def score(item):\n    return float(len(item.completion) % 2)\n"}}
CERTIFICATES = {
    "grpc": {"enabled": True},
    "nats": {"enabled": True},
    "certManager": {"enabled": True, "issuerRef": {"name": "ca", "kind": "Issuer"}},
}


@dataclass
class Release:
    """The installed chart, and what its run has written to the trainer's volume."""

    cluster: Cluster
    tests: dict[str, Object]
    """Pods by name that `helm test` makes."""
    render: Callable[..., Rendered]

    def upgrade(self, recipe: dict[str, Any], **values: Any) -> None:
        """The ConfigMap with the recipe and the trainer's StatefulSet become others; pods that are made from now on see it."""
        rendered = self.render(recipe, **values)
        self.cluster.rendered.one("ConfigMap", RECIPE).update(rendered.one("ConfigMap", RECIPE))
        self.cluster.rendered.one("StatefulSet", SET)["spec"].update(rendered.one("StatefulSet", SET)["spec"])

    @property
    def run_dir(self) -> Path:
        return self.cluster.folder / "claims" / "pipelinerl-trainer" / "runs" / "arithmetic"

    @property
    def steps(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def ready(self, actors: int = 1) -> None:
        for component, count in (("nats", 1), ("verifier", 1), ("trainer", 1), ("actor", actors)):
            what = f"{count} of {component} are ready"
            await self.cluster.until(lambda c=component, n=count: self.cluster.all_ready(c, n), STARTS_S, what)

    async def until_state(self, **wanted: str) -> None:
        def said() -> bool:
            return self.cluster.api.configs[f"{SET.removesuffix('-trainer')}-run"].items() >= wanted.items()

        await self.cluster.until(said, TRAINS_S, f"the run's state is {wanted}")

    async def page(self) -> str:
        (pod,) = self.cluster.of("page")
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"http://{pod.ip}:8080/", headers={"Host": "pipelinerl-page"})).raise_for_status().text

    async def more_steps(self, count: int) -> None:
        wanted = len(self.steps) + count
        await self.cluster.until(lambda: len(self.steps) >= wanted, TRAINS_S, f"{wanted} steps are taken")

    def logged(self, text: str) -> int:
        """Return how many times the trainer that runs now has logged the text."""
        pod = self.cluster.pods.get(TRAINER)
        return pod.logs().count(text) if pod else 0

    async def until_logged(self, text: str) -> None:
        await self.cluster.until(lambda: self.logged(text) > 0, TRAINS_S, f"the trainer logs {text!r}")

    async def audit(self) -> dict[str, Any]:
        command = ["python", "-m", "pipelinerl.cli", "audit", RUN_DIR, "--json"]
        process = await self.cluster.execute(TRAINER, "trainer", command)
        output, errors = await process.communicate()
        assert process.returncode == 0, errors
        return dict(json.loads(output))

    def nothing_was_forbidden(self) -> None:
        """Neither by the roles, nor would the policies have kept two pods apart that talked."""
        self.cluster.check()
        assert self.cluster.forbidden_connections() == []

    def connections(self) -> set[tuple[str, str, int]]:
        """Components of both ends, with the port: ("actor", "nats", 4222)."""

        def component(peer: Peer) -> str:
            return labels_of(peer.pod)["app.kubernetes.io/component"] if peer.pod else peer.name

        return {(component(source), component(target), port) for source, target, port in self.cluster.connections}


Install = Callable[..., AbstractAsyncContextManager[Release]]


@pytest.fixture
def install(kernel: None, verified: None, tmp_path: Path) -> Install:
    """`helm install`: values over values-cpu.yaml."""

    @asynccontextmanager
    async def installed_release(recipe: dict[str, Any], **values: Any) -> AsyncIterator[Release]:
        threads = {"actor": {"threads": 1}, "trainer": PAGE}

        def rendered(recipe: dict[str, Any], **more: Any) -> Rendered:
            return render({**threads, "recipe": {"set": recipe}, **values, **more}, [CPU_VALUES])

        objects = rendered(recipe)
        tests = {name_of(pod): pod for pod in objects.of_kind("Pod")}
        objects.objects[:] = [item for item in objects.objects if item not in tests.values()]
        objects.objects.extend(issued(objects, tmp_path))
        async with mini_cluster(tmp_path / "cluster", objects) as cluster:
            write_untrained(cluster.folder / "claims" / "pipelinerl-trainer" / "runs" / "untrained")
            yield Release(cluster, tests, rendered)

    return installed_release


def write_untrained(folder: Path) -> None:
    """Write a model on the trainer's volume that guesses any characters, for as long as it may."""
    made = SMALL_MODELS / "guess"
    folder.mkdir(parents=True)
    for file in made.glob("*.json"):
        text = file.read_text().replace('"max_position_embeddings": 64', '"max_position_embeddings": 128')
        (folder / file.name).write_text(text)
    torch.manual_seed(0)
    weights = load_file(made / "model.safetensors")
    untrained = {name: 0.02 * torch.randn(weight.shape) for name, weight in weights.items()}
    save_file(untrained, folder / "model.safetensors", {"format": "pt"})


def issued(rendered: Rendered, folder: Path) -> list[Object]:
    authority = Authority()
    return [
        secret(one["spec"]["secretName"], authority.issue(folder / name_of(one), *one["spec"]["dnsNames"]))
        for one in rendered.of_kind("Certificate")
    ]


def secret(name: str, folder: Path) -> Object:
    data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in folder.iterdir()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


async def one_comes_and_one_leaves(release: Release) -> int:
    cluster = release.cluster
    (first,) = cluster.of("actor")
    cluster.scale(ACTOR, 2)
    await release.ready(actors=2)
    (second,) = (pod for pod in cluster.of("actor") if pod is not first)
    await release.until_logged(f"actor {second.name} joined")
    await release.more_steps(2)
    evictions = release.logged("was evicted")
    cluster.scale(ACTOR, 1)
    (leaving,) = (pod for pod in (first, second) if pod.deleting)
    await release.until_logged(f"actor {leaving.name} left")
    await cluster.until(lambda: leaving in cluster.gone, 60, f"{leaving.name} is gone within its grace period")
    assert leaving.containers["actor"].exit_code == 0
    assert release.logged("was evicted") == evictions
    handed_over = re.search(r"stopped; handed over (\d+) groups", leaving.logs())
    assert handed_over, leaving.logs()
    return int(handed_over[1])


async def test_a_release_trains_is_scaled_and_upgraded_and_comes_to_its_end_over_tls(install: Install) -> None:
    async with install(RELEASE, tls=CERTIFICATES) as release:
        cluster = release.cluster
        cluster.start()
        await release.ready()
        await release.more_steps(3)
        await release_test_succeeds(release)
        for _ in range(TRIES):
            if await one_comes_and_one_leaves(release):
                break
        else:
            pytest.fail(f"none of {TRIES} actors that were stopped had anything in hand")

        before = len(release.steps)
        release.upgrade({**RELEASE, "trainer": {**RELEASE["trainer"], "steps": before + 20}})
        old = await cluster.delete(TRAINER)
        assert old.containers["trainer"].exit_code == 0
        await release.until_logged("incarnation 2 resumes from version")
        assert 'id="live"' in await release.page()
        await release.until_state(phase="Finished", run="arithmetic", policyVersion=str(before + 20), actors="1")
        await cluster.until(
            lambda: not {*cluster.pods} & {TRAINER, *(pod.name for pod in cluster.of("actor"))}, 120, "all is free"
        )
        (page,) = cluster.of("page")
        report = Path(cluster.builder.volume_folder(page, "report"), "report.html.gz")
        await cluster.until(report.exists, 300, "the page's pod sees the report")
        assert 'id="report"' in await release.page()

        more = {**RELEASE, "trainer": {**RELEASE["trainer"], "steps": before + 30}}
        release.upgrade(more, trainer={**PAGE, "onCompletion": "keep"})
        await release.until_state(phase="Running")
        await release.until_state(phase="Finished", policyVersion=str(before + 30))
        assert 'id="live"' in await release.page()
        assert [step["policy_version"] for step in release.steps] == list(range(1, len(release.steps) + 1))
        summary = json.loads((release.run_dir / "summary.json").read_text())
        assert (summary["policy_version"], summary["interrupted"]) == (before + 30, False)
        assert summary["parity_failures"] == 0
        audit = await release.audit()
        assert (audit["ok"], audit["streams"] is not None, len(audit["restarts"])) == (True, True, 2)
        await release.ready()  # a run that is finished can still be asked
        assert release.connections() >= {
            ("actor", "nats", 4222),
            ("actor", "verifier", 50051),
            ("verifier", "actor", 8090),
            ("trainer", "nats", 4222),
            ("trainer", "actor", 50051),
            ("trainer", "kubernetes", 443),
        }
        assert ("actor", "kubernetes", 443) not in release.connections()  # the trainer alone, and it alone has a token
        release.nothing_was_forbidden()


async def release_test_succeeds(release: Release) -> None:
    """The pod of `helm test` that looks at the release, but for one check: nothing here enforces policies."""
    manifest = release.tests["pipelinerl-test-release"]
    assert manifest["spec"]["containers"][0]["args"].pop().startswith("--closed=")
    pod = release.cluster.create(manifest)
    assert pod is not None, release.cluster.failures
    await release.cluster.until(lambda: pod.finished, STARTS_S, "the release's test ends")
    assert pod.phase == "Succeeded", pod.logs()
    assert "the release works" in pod.logs()
    await release.cluster.delete(pod.name)


@dataclass
class Person:
    """Somebody on another machine who may do everything in the namespace."""

    cluster: Cluster
    folder: Path

    async def start(self, command: str, *arguments: str) -> Callable[[], Awaitable[tuple[int, str]]]:
        """Starts a command of pipelinerl. Returns a function that waits for its exit code and output."""
        kubeconfig = self.cluster.api.kubeconfig(self.folder / "kubeconfig", f"https://{self.cluster.builder.api_ip}")
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": f"{HELM.parent}:{os.environ['PATH']}"}
        log, module = self.folder / f"{command}.log", [sys.executable, "-m", "pipelinerl.cli"]
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *guarded([*module, command, "--namespace", NAMESPACE, *arguments], signal.SIGKILL),
                cwd=self.folder, env=environment | {"PYTHONPATH": str(ROOT)}, stdout=file, stderr=file,
            )  # fmt: skip

        async def ended() -> tuple[int, str]:
            what = f"pipelinerl {command} ends"
            await self.cluster.until(lambda: process.returncode is not None, STARTS_S + TRAINS_S, what)
            assert process.returncode is not None
            return process.returncode, log.read_text()

        return ended


async def test_a_recipe_is_submitted_checked_trained_and_brought_back_and_helm_test_succeeds(
    install: Install, tmp_path: Path
) -> None:
    async with install(HELM_TEST) as release:
        cluster, person = release.cluster, Person(release.cluster, tmp_path)
        before = [*cluster.rendered.objects]
        for item in before:
            item["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"  # as if they had been made over the API
        await is_refused(person)
        await is_trained_and_brought_back(person)
        await cluster.until(lambda: not cluster.pods, 120, "all pods are gone")
        left = [f"{item['kind']} {name_of(item)}" for item in cluster.rendered.objects if item not in before]
        assert (left, [*(cluster.folder / "claims").glob("*own*")]) == ([], [])
        cluster.check()
        pod = cluster.create(release.tests["pipelinerl-test"])
        assert pod is not None, cluster.failures
        await cluster.until(lambda: pod.finished, STARTS_S + TRAINS_S, "the test pod ends")
        assert pod.phase == "Succeeded", pod.logs()
        assert "run ended" in pod.containers["trainer"].logs()


async def is_refused(person: Person) -> None:
    """By the Job before the installation, since only the chart's values break the recipe, or each other."""
    values = person.folder / "refused.yaml"
    for wrong, reason in (
        ({"recipe": {"set": {"trainer": {"batch_size": 7}}}}, "trainer.batch_size"),
        ({"nats": {"sequencesMaxGib": 1000}}, "nats.sequencesMaxGib = 1000: is more than"),
    ):
        values.write_text(json.dumps(wrong))
        ended = await person.start("submit", "arithmetic", "--release", "own", *OWN_VALUES, "--values", str(values), "--watch")
        code, said = await ended()
        assert (code, reason in said, "nothing is left installed" in said) == (2, True, True), said
        assert person.cluster.rendered.find("StatefulSet", SUBMITTED) is None


async def is_trained_and_brought_back(person: Person) -> None:
    """With a reward of the user's own, although the trainer's pod is replaced amid the run."""
    values, cluster = person.folder / "own.yaml", person.cluster
    values.write_text(json.dumps({"rewards": REWARDS, "actor": {"threads": 1}, "trainer": {"threads": 1}}))
    sets = [part for name, value in OWN_RECIPE.items() for part in ("--set", f"{name}={value}")]
    command = ("submit", "arithmetic", "--release", "own", *OWN_VALUES, "--values", str(values), *sets, "--watch")
    ended, steps = await person.start(*command), OWN_RECIPE["trainer.steps"]
    metrics = cluster.folder / "claims" / SUBMITTED / "runs" / "own" / "metrics.jsonl"
    await cluster.until(lambda: metrics.exists() and metrics.stat().st_size > 0, STARTS_S, "a step is taken")
    await cluster.delete(f"{SUBMITTED}-0")
    code, listed = await (await person.start("runs", "--json"))()
    (row,) = (row for row in json.loads(listed) if row["release"] == "own")
    assert (code, row["run"], row["phase"], row["steps"]) == (0, "own", "Running", str(steps))
    code, said = await ended()
    folder = person.folder / "runs" / "own"
    assert (code, f"step {steps}/{steps}" in said) == (0, True), said
    assert '<script type="application/json" id="data">' in (folder / "report.html").read_text()
    assert json.loads((folder / "summary.json").read_text())["policy_version"] == steps
    assert load_file(folder / "checkpoint" / "model.safetensors")
