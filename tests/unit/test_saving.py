"""A learner that is saved and restored in another process goes on as it would have gone on, on any number of ranks."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.service.settings import RankSettings
from services.trainer.checkpoint.state_files import StateSaver, trained_parameters
from services.trainer.learn.lora import whole
from services.trainer.learn.step import Learner
from services.trainer.loading import load_learner, sharded_learner
from services.trainer.worker import worker_loop
from services.trainer.world import END, join_ranks, leave_ranks
from tests.support.learner import group_of, sequences_of, told_anywhere
from tests.unit.ranks import UNEVEN, Cases, Job, jobs_of, on_ranks, saved_beside

SAVED_AT, STEPS = 2, 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trace:
    """What one rank sees of the steps from `SAVED_AT` on."""

    draws: list[float]
    """torch's next random numbers when they begin."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    """The trained ones after the last step, of float32."""


def steps(learner: Learner, job: Job, first: int, end: int) -> list[dict[str, Any]]:
    metrics = []
    for version in range(first, end):
        group = group_of(sequences_of(UNEVEN, seed=version), seed=version)
        if job.broken and version == 1:
            group.advantages[3] = np.nan
        metrics.append(told_anywhere(learner.step(learner.prepare([group], version))))
    return metrics


def traced(learner: Learner, job: Job, saved_in: Path | None) -> Trace:
    """`saved_in`: where the state is saved on the way; None when the learner is resumed."""
    trained = trained_parameters(learner)
    if saved_in is not None:
        torch.rand(5 + learner.world.layout.rank)  # so that random states are those of no seed
    metrics = lead(learner, job, saved_in) if learner.world.is_first else worker_loop(learner) or []
    draws = torch.rand(3).tolist()
    return Trace(draws, metrics, {name: whole(weight).detach().numpy().copy() for name, weight in trained.items()})


def lead(learner: Learner, job: Job, saved_in: Path | None) -> list[dict[str, Any]]:
    if saved_in is None:
        metrics = steps(learner, job, SAVED_AT, STEPS)
    else:
        steps(learner, job, 0, SAVED_AT)
        saving = saved_beside(StateSaver(learner), saved_in)
        metrics = steps(learner, job, SAVED_AT, STEPS)
        saving.result()
    learner.order(END)
    return metrics


def trace_all(work: dict[str, tuple[Job, Path]], resumed: bool) -> dict[str, Trace]:
    ranks, traces = RankSettings(), {}
    if ranks.world_size > 1:
        join_ranks(CPU)
    for name, (job, state) in work.items():
        resume = state if resumed and ranks.rank == 0 else None
        if ranks.world_size > 1:
            torch.manual_seed(job.recipe().seed)  # of new adapters
            learner = sharded_learner(job.recipe(), job.folder, CPU, resume)
        else:
            single = replace(job, trainer={**job.trainer, "shard_ranks": 0})
            learner = load_learner(single.recipe(), job.folder, ranks, resume)
        traces[name] = traced(learner, job, None if resumed else state)
    leave_ranks()
    return traces


CASES: Cases = {
    "decaying rate": ("qwen2-untied", {"trainer": {"schedule": "cosine", "warmup_steps": 1, "steps": 5}}),
    "value head and reference": (
        "llama-tied",
        {"trainer": {"value_learning_rate": 2e-2}, "algorithm": {"advantage": "value", "kl_coefficient": 0.1}},
    ),
    "adapters and reference": ("qwen2-untied", {"trainer": {"lora": {"rank": 3}}, "algorithm": {"kl_coefficient": 0.1}}),
    "a step that was skipped": ("llama-tied", {"broken": True}),
}
ROUNDED: Cases = {
    "bfloat16": ("qwen2-untied", {"model": {"dtype": "bfloat16"}}),
    "adapters in bfloat16": ("llama-tied", {"model": {"dtype": "bfloat16"}, "trainer": {"lora": {"rank": 4}}}),
}
"""One rank rounds differently than two: equality is of equally many ranks only."""
HYBRID = "hybrid"
HYBRIDS: Cases = {HYBRID: ("qwen2-untied", {"trainer": {"shard_ranks": 2}})}


SAVED_BY = {1: CASES | ROUNDED, 2: CASES | ROUNDED, 4: HYBRIDS}
"""By the number of ranks."""
RESUMED_BY = {1: {1: CASES | ROUNDED, 2: CASES, 4: HYBRIDS}, 2: {2: CASES | ROUNDED, 1: CASES}}
"""By the number of ranks that resume, and that of those that saved."""


Traces = dict[int, list[dict[str, Trace]]]
"""Of each rank, by their number and the case."""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Traces, Traces]:
    """How ranks went on after they had saved, and how ranks go on from what others have saved, whose number is in the name."""
    jobs, root = jobs_of(CASES | ROUNDED | HYBRIDS, tmp_path_factory), tmp_path_factory.mktemp("states")

    def work(ranks: int, cases: Cases) -> dict[str, tuple[Job, Path]]:
        folders = {name: root / f"of-{ranks}" / name.replace(" ", "-") / "resume" / "state" for name in cases}
        return {f"{ranks} {name}": (jobs[name], folder) for name, folder in folders.items()}

    saved = {ranks: on_ranks(ranks, trace_all, work(ranks, cases), False) for ranks, cases in SAVED_BY.items()}
    resumed = {}
    for ranks, sources in RESUMED_BY.items():
        found = {name: job for before, cases in sources.items() for name, job in work(before, cases).items()}
        resumed[ranks] = on_ranks(ranks, trace_all, found, True)
    return saved, resumed


@pytest.mark.parametrize("case", CASES | ROUNDED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_equally_many_ranks_go_on_exactly_as_if_never_stopped(traces: tuple[Traces, Traces], ranks: int, case: str) -> None:
    saved, resumed = traces
    for first, second in zip(saved[ranks], resumed[ranks], strict=True):
        before, after = first[f"{ranks} {case}"], second[f"{ranks} {case}"]
        np.testing.assert_equal(after.metrics, before.metrics)
        np.testing.assert_equal(after.weights, before.weights)
        assert after.draws == before.draws


@pytest.mark.parametrize(
    ("before", "after", "case"), [*((1, 2, case) for case in CASES), *((2, 1, case) for case in CASES), (4, 1, HYBRID)]
)
def test_another_number_of_ranks_resumes_the_state(traces: tuple[Traces, Traces], before: int, after: int, case: str) -> None:
    saved, resumed = traces
    first, second = saved[before][0][f"{before} {case}"], resumed[after][0][f"{before} {case}"]
    assert first.weights.keys() == second.weights.keys()
    for name, values in first.weights.items():
        np.testing.assert_allclose(second.weights[name], values, rtol=1e-5, atol=1e-5, err_msg=name)
    for left, right in zip(first.metrics, second.metrics, strict=True):
        for key in ("loss", "grad_norm", "entropy", "reference_kl", "value_loss"):
            assert (right[key] or 0.0) == pytest.approx(left[key] or 0.0, rel=1e-4, abs=1e-5), key
        assert right["learning_rate"] == left["learning_rate"]
    assert second.draws == first.draws


def test_what_is_compared_could_differ(traces: tuple[Traces, Traces]) -> None:
    one, two = traces[0][1][0], traces[0][2]
    assert len({step["learning_rate"] for step in one["1 decaying rate"].metrics}) == STEPS - SAVED_AT
    for case in ("value head and reference", "adapters and reference"):
        assert one[f"1 {case}"].metrics[0]["reference_kl"] > 1e-3, "the reference is not what is restored"
    assert "value_head.weight" in one["1 value head and reference"].weights
    assert all(".lora_" in name for name in one["1 adapters and reference"].weights)
    assert two[0]["2 bfloat16"].draws != two[1]["2 bfloat16"].draws
