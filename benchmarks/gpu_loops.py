"""The two loops of `trainer_gpu.py` on one device: built, stepped and timed, one after the other.

A loop that does not fit into the device's memory is a result too. Not here: what is made of the figures.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.bare_loop import BareLoop
from benchmarks.gpu_cases import GpuCase, Plan
from benchmarks.training_data import VERSION
from pipelinerl.recipe.fields import AlgorithmConfig
from services.trainer.learn.attention import VARLEN
from services.trainer.learn.batch import HostMicroBatch
from services.trainer.learn.model import compile_policy, wrap_model
from services.trainer.learn.policy import Policy
from services.trainer.learn.step import Learner, PreparedStep


@dataclass(frozen=True)
class Measured:
    """Of one loop. Nothing is known of one that does not fit."""

    seconds: float | None = None
    """Median of a step."""
    peak_bytes: int | None = None
    """Most that tensors held in a step; None on a CPU."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Medians, where the loop tells."""


class Loop(Protocol):
    def step(self) -> dict[str, Any] | None:
        """One optimizer step, and what it says of itself, if anything."""
        ...


class OurLoop:
    """The learner as the trainer runs it: while a step is computed, the next is prepared."""

    def __init__(self, case: GpuCase, device: torch.device) -> None:
        self._learner = Learner(random_policy(case, device), AlgorithmConfig(), case.trainer())
        self._groups = case.groups(self._learner.policy.vocab_size)
        self._thread = ThreadPoolExecutor(1)
        self._next = self._thread.submit(self._prepare)

    def step(self) -> dict[str, Any]:
        prepared, self._next = self._next.result(), self._thread.submit(self._prepare)
        figures = self._learner.step(prepared)
        assert not figures["skipped"], figures["skipped"]
        return figures

    def _prepare(self) -> PreparedStep:
        return self._learner.prepare(self._groups, VERSION)


def measure_ours(case: GpuCase, device: torch.device, plan: Plan) -> Measured:
    return measure(lambda: OurLoop(case, device), device, plan)


def measure_bare(case: GpuCase, device: torch.device, plan: Plan, batches: list[HostMicroBatch]) -> Measured:
    """On the micro-batches that the learner has, which are on the device before the clock starts."""

    def build() -> BareLoop:
        model = random_policy(case, device).model
        return BareLoop(model, VARLEN, [batch.on(device) for batch in batches], case.trainer())

    return measure(build, device, plan)


def random_policy(case: GpuCase, device: torch.device) -> Policy:
    """Weights are made on the device, in bfloat16 on a GPU."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(case.config(), dtype=dtype)
    policy = wrap_model(model, gradient_checkpointing=case.recomputed)
    if case.compiled:
        compile_policy(policy, device)
    return policy


def measure(build: Callable[[], Loop], device: torch.device, plan: Plan) -> Measured:
    """Builds a loop and steps it, when the device's memory holds nothing of the loop before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        return _measure(build(), device, plan)
    except torch.OutOfMemoryError:
        return Measured()


def _measure(loop: Loop, device: torch.device, plan: Plan) -> Measured:
    for _ in range(plan.warm_up):
        loop.step()
    _wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, outcomes = [], []
    for _ in range(plan.steps):
        began = time.perf_counter()
        outcomes.append(loop.step())
        _wait(device)
        seconds.append(time.perf_counter() - began)
    told = [outcome for outcome in outcomes if outcome is not None]
    return Measured(statistics.median(seconds), _peak(device, told), _phases(told))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device, told: list[dict[str, Any]]) -> int | None:
    """A learner that tells its peak has begun a new one with that."""
    if device.type != "cuda":
        return None
    return max([torch.cuda.max_memory_allocated(device), *(round(figures["memory_peak_gib"] * 1024**3) for figures in told)])


def _phases(told: list[dict[str, Any]]) -> dict[str, float]:
    phases = [figures["compute_s"] for figures in told]
    names = dict.fromkeys(name for seconds in phases for name in seconds)
    return {name: statistics.median(seconds.get(name, 0.0) for seconds in phases) for name in names}
