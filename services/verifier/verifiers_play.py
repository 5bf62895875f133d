"""Run episodes of the package `verifiers` (0.4, v1 environments) with its own loop, in which the policy is the agents' model.

An agent's program calls an interception server, which the package runs in the episode's process and which forwards requests
unchanged to the actor. Programs run within the limits of the episode's process, unless the environment's configuration names
another runtime.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import sys
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import TaskConfig
from pipelinerl.recipe.preflight import VERIFIERS, VERIFIERS_MISSING
from pipelinerl.tasks.source import Division, Split
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK, EpisodeRequest, VerifyResult
from services.verifier.episode import EpisodeFailed, Play, Policy, row_of

if TYPE_CHECKING:
    from verifiers.v1 import Env, Episode, ModelContext, Task, Trace

FIRST_OF_ENDLESS = 4096
"""Number of tasks taken from an endless taskset."""


def play_verifiers(task: TaskConfig, seed: int, *, is_trained_on: bool) -> Play:
    """Import the environment, make its tasks and return the function that runs episodes. Raises `FieldError`."""
    if VERIFIERS.is_dir():
        sys.path.insert(0, str(VERIFIERS))
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the programs and tool servers that it starts
    os.environ["UV_PYTHON"] = sys.executable  # for uv, which prepares programs of the package
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    try:
        import verifiers.v1 as vf
    except ModuleNotFoundError as error:
        raise FieldError("task.source", task.source, f"{VERIFIERS_MISSING} ({error})") from error
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    importlib.import_module(
        "openai.resources"
    )  # once, as clients would import it at their first call in each episode's process
    try:
        taskset = {**task.config.get("taskset", {}), "id": task.name}
        config = resolve_env_config({**task.config, "taskset": taskset})
        for agent in agent_config_fields(config).values():
            if "runtime" not in agent.model_fields_set:  # the package's default is a paid service
                agent.runtime = vf.SubprocessConfig()
            if agent.max_turns is None:  # the environment scores episodes that end here; a refusal by the actor would earn 0
                agent.max_turns = task.max_turns
        env = load_environment(config)
        tasks = list(islice(env.taskset, FIRST_OF_ENDLESS if env.taskset.INFINITE else None))
    except Exception as error:
        raise FieldError("task.name", task.name, f"verifiers cannot load it: {type(error).__name__}: {error}") from error
    division = Division(len(tasks), task, seed, is_trained_on=is_trained_on, where=task.name)

    def play(request: EpisodeRequest, policy: Policy) -> VerifyResult:
        row = row_of(request)
        number = division.number(Split(row["split"]), row["index"])
        client = vf.EvalClientConfig(base_url=policy.base_url, api_key_var="OPENAI_API_KEY")
        episode = asyncio.run(_played(env, tasks[number], vf.ModelContext(model="policy", client=client)))
        return result_of(episode, policy.base_url)

    return play


async def _played(env: Env, task: Task, context: ModelContext) -> Episode:
    async with env.serving():
        (slot,) = env.slots(task)
        return await env.run_slot(slot, context)


def result_of(episode: Episode, base_url: str) -> VerifyResult:
    """Return the mean over the trained agents' runs. Raises `EpisodeFailed` if no run can be trained on. Pure."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EpisodeFailed("verifiers: " + (f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode is not ok"))
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.base_url == base_url:
            raise EpisodeFailed(
                f"agent {trace.agent.name} must not be trained, but the policy plays it: give it its own model, "
                f"task.config.{trace.agent.name}.client and .model"
            )
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise EpisodeFailed("none of its agents is trained")
    reward = fmean(trace.reward for trace in traces)
    told = [one for trace in traces for one in _told_by(trace)]
    last = [node.message.content for node in traces[-1].nodes if node.sampled]
    return VerifyResult(
        status=VERIFY_STATUS_OK,
        reward=reward,
        components={"answer": reward},
        metrics={name: fmean(value for known, value in told if known == name) for name, _ in told},
        answer=str(last[-1] or "") if last else "",
    )


def _told_by(trace: Trace) -> list[tuple[str, float]]:
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    named = {**trace.metrics, **rewards}
    return [(name, float(value)) for name, value in named.items() if value is not None and math.isfinite(value)]
