"""A trainer of several ranks computes what one rank computes: losses, gradients, weights, metrics, scores. Restored ranks go on
as they would have gone on."""

import asyncio
import os
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.recipe.fields import TrainerConfig
from pipelinerl.recipe.loading import load_recipe, recipe_yaml
from pipelinerl.recipe.rules import undivided
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import RankSettings, TrainerSettings
from pipelinerl.transfer.chunks import Unpacker, chunk_of
from services.trainer import loading, worker
from services.trainer.checkpoint.state_files import StateSaver, learner_state, local_part, trained_parameters
from services.trainer.learn.attention import key_repeats
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.lora import whole
from services.trainer.learn.meter import LAG_0_TOKENS, SAMPLED_WEIGHTS
from services.trainer.learn.step import Learner
from services.trainer.loading import load_learner, sharded_learner, weight_sender
from services.trainer.worker import carry_out, worker_loop
from services.trainer.world import (
    ADAPTER,
    END,
    HEARTBEAT,
    TENSOR_TIMEOUT,
    TRAIN,
    VALUE_HEAD,
    WEIGHTS,
    Links,
    Message,
    join_ranks,
    leave_ranks,
)
from tests.support.exposition import get
from tests.support.learner import EPISODES, episodes_of, group_of, sequences_of, told_anywhere
from tests.support.machine import free_port, wait_until
from tests.unit.ranks import UNEVEN, Cases, Job, jobs_of, on_ranks, saved_beside

pytestmark = pytest.mark.timeout(1200)

CPU = torch.device("cpu")
SHORT = [(3, 12), (2, 5), (4, 3)]
"""Fewer sequences than four ranks."""
NO_PROMPT_TWICE = [[(prompt + place, parts) for place, (prompt, parts) in enumerate(shape)] for shape in EPISODES * 2]
"""Branches that share none, whose tokens are computed as often however they are packed."""


@dataclass(frozen=True)
class Result:
    """Of rank 0."""

    outcomes: list[dict[str, Any]]
    gradients: list[dict[str, np.ndarray]]
    """Before clipping, of each step."""
    weights: dict[str, np.ndarray]
    adapter: dict[str, np.ndarray]
    scores: np.ndarray
    microbatches: list[int]
    state_bytes: int
    """Of weights and moments on rank 0."""


def state_bytes(learner: Learner) -> int:
    state = learner_state(learner)
    return sum(local_part(tensor).nbytes for name, tensor in state.items() if name.startswith(("weight/", "exp_avg")))


def train(learner: Learner, job: Job) -> Result | None:
    gradients, orders = keep_gradients(learner), list[Message]()
    if not learner.world.is_first:
        worker_loop(learner, orders.append)
        assert not any(order.arrays for order in orders if order.kind == TRAIN), "batches are not sent between two steps"
        return None
    outcomes, microbatches, steps = [], [], []
    for version in range(3):
        lengths = list(job.lengths)
        sampled = episodes_of(NO_PROMPT_TWICE, version) if job.episodes else sequences_of(lengths, version)
        groups = [group_of(sampled, seed=version)]
        if job.broken and version == 0:
            groups[0].advantages[3] = np.nan
        if job.groups > 1:
            groups = split(groups[0], job.groups)
        prepared = learner.prepare(groups, version)  # batches of the last step arrive, but are never computed
        steps.append(prepared)
        if version == 2:
            break
        microbatches.append(len(prepared.shares[0]))
        assert (job.groups > 1) == any(not batch.has_gradient for batch in prepared.shares[0])
    for prepared in steps[:2]:
        outcomes.append(learner.step(prepared))
        learner.order(HEARTBEAT)
        learner.use(learner.trainer.model_copy(update={"learning_rate": 2 * learner.trainer.learning_rate}))
    scores = np.stack([learner.score(np.arange(11) % 23, adapters=adapters) for adapters in (True, False)])
    adapter = {name: tensor.float().cpu().numpy().copy() for name, tensor in learner.gather(ADAPTER)}
    weights = {name: tensor.float().cpu().numpy().copy() for name, tensor in learner.gather(WEIGHTS)}
    weights |= {f"value_head.{name}": tensor.cpu().numpy().copy() for name, tensor in learner.gather(VALUE_HEAD)}
    learner.order(END)
    return Result(outcomes, gradients, weights, adapter, scores, microbatches, state_bytes(learner))


def split(group: TrainingGroup, num_groups: int) -> list[TrainingGroup]:
    """Groups of one prompt each; every second one tells nothing."""
    groups = []
    for index in range(num_groups):
        prompt = group.sequences[index].prompt_token_ids
        sequences = tuple(replace(each, prompt_token_ids=prompt) for each in group.sequences[index::num_groups])
        groups.append(TrainingGroup(sequences, group.advantages[index::num_groups] * (index % 2 == 0)))
    return groups


def keep_gradients(learner: Learner) -> list[dict[str, np.ndarray]]:
    kept: list[dict[str, np.ndarray]] = []
    step = learner.optimizer.step

    def keeping(**sums: float) -> dict[str, Any]:
        named = learner.policy.model.named_parameters()
        kept.append({name: whole(weight.grad).cpu().numpy().copy() for name, weight in named if weight.grad is not None})
        return step(**sums)

    learner.optimizer.step = keeping  # type: ignore[method-assign]
    return kept


def train_all(jobs: dict[str, Job]) -> dict[str, Result | None]:
    join_ranks(CPU)
    results = {}
    for name, job in jobs.items():
        torch.manual_seed(job.recipe().seed)  # of new adapters
        results[name] = train(sharded_learner(job.recipe(), job.folder, CPU), job)
    leave_ranks()
    return results


OF_RANKS = {"compute_s", "tokens_per_s", "mfu", "memory_peak_gib", "microbatches", "packing_fill", "imbalance"}
"""Figures of a step that differ by the number of ranks."""


def same(one: Result, many: Result, atol: float = 1e-5) -> None:
    """`many` is `one` to `atol`, in everything but what it costs."""
    lefts, rights = [one.weights, one.adapter, *one.gradients], [many.weights, many.adapter, *many.gradients]
    for left, right in zip(lefts, rights, strict=True):
        assert left.keys() == right.keys()
        for name, values in left.items():
            np.testing.assert_allclose(right[name], values, rtol=1e-5, atol=atol, err_msg=name)
    np.testing.assert_allclose(many.scores, one.scores, atol=10 * atol)
    for left, right in zip(one.outcomes, many.outcomes, strict=True):
        assert right.keys() == left.keys()
        for key in left.keys() - OF_RANKS - {SAMPLED_WEIGHTS}:
            is_exact = left[key] is None or key in ("skipped", LAG_0_TOKENS)
            assert right[key] == (left[key] if is_exact else pytest.approx(left[key], rel=1e-4, abs=1e-5, nan_ok=True)), key
        assert (left["value_loss"] is not None) == any(name.startswith("value_head") for name in one.weights)
        assert set(right[SAMPLED_WEIGHTS]) == set(left[SAMPLED_WEIGHTS]) == {"g.0", "g.1"}
        for key, weights in left[SAMPLED_WEIGHTS].items():
            np.testing.assert_allclose(right[SAMPLED_WEIGHTS][key], weights, rtol=100 * atol)


CASES: Cases = {
    "tied": ("llama-tied", {"trainer": {"max_grad_norm": None}}),
    "untied": ("qwen2-untied", {"algorithm": {"normalization": "token"}}),
    "fewer sequences than ranks": ("llama-tied", {"lengths": tuple(SHORT)}),
    "sequence normalisation": ("llama-tied", {"algorithm": {"loss": "grpo"}}),
    "entropy and reference": ("qwen2-untied", {"algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.05}}),
    "value head": ("llama-tied", {"algorithm": {"advantage": "value"}, "trainer": {"value_learning_rate": 2e-2}}),
    "ratios of sequences, masked": (
        "llama-tied",
        {
            "algorithm": {"loss": "gspo", "clip_low": 0.9, "clip_high": 9.0, "mask": "icepop", "mask_low": 0.01},
            "trainer": {"context_parallel": 2},
        },
    ),
    "adapters": ("llama-tied", {"trainer": {"lora": {"rank": 4}}}),
    "adapters, recomputed, reference inside": (
        "qwen2-untied",
        {
            "trainer": {"lora": {"rank": 3, "target_modules": ["q_proj", "down_proj"]}, "gradient_checkpointing": True},
            "algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.05},
        },
    ),
    "adapters, rows shared": ("llama-tied", {"trainer": {"lora": {"rank": 1}, "context_parallel": 2}}),
    "a step that is skipped": ("llama-tied", {"broken": True}),
    "prompts shared, half of them without a gradient, weights kept": (
        "qwen2-untied",
        {"groups": 2, "lengths": tuple(UNEVEN * 3), "trainer": {"reshard_after_forward": False}},
    ),
    "episodes": ("llama-tied", {"episodes": True, "algorithm": {"loss": "gspo", "clip_low": 0.9, "clip_high": 9.0}}),
    "episodes, rows shared": (
        "qwen2-untied",
        {
            "episodes": True,
            "algorithm": {"advantage": "value", "normalization": "token"},
            "trainer": {"context_parallel": 2, "value_learning_rate": 1e-2},
        },
    ),
    "rows shared by two": ("llama-tied", {"trainer": {"context_parallel": 2}}),
    "rows shared, no key heads in the configuration": ("gpt2", {"trainer": {"context_parallel": 2}}),
    "rows shared, recomputed, short": (
        "qwen2-untied",
        {
            "trainer": {"context_parallel": 2, "gradient_checkpointing": True},
            "algorithm": {"loss": "grpo", "kl_coefficient": 0.1},
            "lengths": tuple(SHORT),
        },
    ),
}
ON_FOUR: Cases = {
    "rows shared by four": ("llama-tied", {"trainer": {"context_parallel": 4}}),
    "hybrid": ("qwen2-untied", {"trainer": {"shard_ranks": 2}}),
    "hybrid, adapters": ("qwen2-untied", {"trainer": {"shard_ranks": 2, "lora": {"rank": 4}}}),
    "hybrid, rows shared": ("llama-tied", {"trainer": {"shard_ranks": 2, "context_parallel": 2}}),
}
ROUNDED: Cases = {"adapters in bfloat16": ("qwen2-untied", {"model": {"dtype": "bfloat16"}, "trainer": {"lora": {"rank": 4}}})}
"""Ranks round gradients and sums differently, so that equality is to the dtype's rounding only."""
ON_MORE_THAN_ONE_ROW = ("untied", "fewer sequences than ranks", "rows shared by two", "episodes, rows shared")
SIZES = {2: CASES | ROUNDED, 4: {name: CASES[name] for name in ON_MORE_THAN_ONE_ROW} | ON_FOUR}


class Trained(NamedTuple):
    jobs: dict[str, Job]
    alone: dict[str, Result]
    """What one rank gives."""
    together: dict[int, dict[str, Result]]
    """What 2 and 4 ranks give, by their number."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    jobs = jobs_of(CASES | ON_FOUR | ROUNDED, tmp_path_factory)
    alone = {}
    for name, job in jobs.items():
        single = replace(job, trainer={**job.trainer, "context_parallel": 1, "shard_ranks": 0})
        alone[name] = train(load_learner(single.recipe(), job.folder, RankSettings()), single)
    together = {size: on_ranks(size, train_all, {name: jobs[name] for name in cases})[0] for size, cases in SIZES.items()}
    return Trained(jobs, alone, together)


def moved(job: Job, result: Result) -> float:
    """The largest change of a weight: equal results say nothing where nothing happened."""
    before = load_file(Path(job.folder) / "model.safetensors")
    return max(float((torch.from_numpy(result.weights[name]) - before[name]).abs().max()) for name in before)


@pytest.mark.parametrize(
    ("size", "case"), [(size, case) for size, cases in SIZES.items() for case in cases if case not in ROUNDED]
)
def test_ranks_train_as_one(trained: Trained, size: int, case: str) -> None:
    assert moved(trained.jobs[case], trained.alone[case]) > 1e-3
    same(trained.alone[case], trained.together[size][case])


def test_each_rank_keeps_its_share_of_weights_and_moments_and_all_have_equally_many_micro_batches(trained: Trained) -> None:
    """docs/training.md: 4 + 8 bytes a parameter, over the ranks that share one copy."""
    num_parameters = sum(weight.size for weight in trained.alone["untied"].weights.values())
    assert trained.alone["untied"].state_bytes == 12 * num_parameters
    for size, case, sharing in ((2, "untied", 2), (4, "untied", 4), (4, "hybrid", 2)):
        assert trained.together[size][case].state_bytes == pytest.approx(12 * num_parameters / sharing, rel=0.1)
    assert trained.together[2]["untied"].microbatches[0] < len(trained.jobs["untied"].lengths)
    assert trained.together[4]["fewer sequences than ranks"].microbatches == [1, 1]


def test_worlds_and_heads_that_do_not_divide_are_refused_and_a_rank_alone_shares_no_rows(trained: Trained) -> None:
    refused = [str(one) for one in undivided(TrainerConfig(context_parallel=3, shard_ranks=3), 4)]
    assert [said.partition(": ")[0] for said in refused] == ["trainer.context_parallel = 3", "trainer.shard_ranks = 3"]
    assert "does not divide the 4 ranks of the trainer; use one of [1, 2, 4]" in refused[0]
    with pytest.raises(FieldError, match=r"trainer\.context_parallel = 8: does not divide the model's 28 attention heads"):
        key_repeats(28, 4, 8)
    assert [key_repeats(*heads) for heads in ((28, 4, 2), (12, 2, 6), (8, 8, 8))] == [1, 3, 1], "until ranks divide the copies"
    job = trained.jobs["rows shared by two"]
    with pytest.raises(FieldError, match=r"trainer\.context_parallel = 2: does not divide the 1 rank of the trainer"):
        load_learner(job.recipe(), job.folder, RankSettings())


FIELDS = {"version": 3, "counts": [{"n": 1}]}
ARRAYS = {
    "a": np.arange(10)[::2],
    "b": np.zeros((0, 2), np.float32),
    "c": np.asarray(True),
    "d": np.broadcast_to(np.float32(1.5), 3),
}
"""Arrays that are not contiguous, empty, without a dimension or read-only."""


def one_message() -> Message | None:
    join_ranks(CPU)
    links = Links(TENSOR_TIMEOUT)
    if os.environ["RANK"] == "1":
        message = links.receive_order()
        assert links.receive_order().kind == END
        return message
    works = links.begin_send(Message("one", FIELDS, ARRAYS), 1)
    links.broadcast(Message(END))
    for work in works:
        work.wait()
    return None


def test_messages_come_back_as_they_were() -> None:
    got = on_ranks(2, one_message)[1]
    assert (got.kind, got.fields, got.arrays.keys()) == ("one", FIELDS, ARRAYS.keys())
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(got.arrays[name], array, strict=True)


def test_a_rank_computes_no_batches_of_another_version() -> None:
    order, batches = Message(TRAIN, {"version": 3}), iter([Message("batches", {"version": 2})])
    with pytest.raises(ServiceError, match="orders the step at version 3, but has sent the batches of version 2"):
        carry_out(order, cast("Any", None), batches)


def test_frozen_weights_in_bfloat16_stay_so_beside_float32_shards_of_adapters(trained: Trained) -> None:
    case = "adapters in bfloat16"
    one, two = trained.alone[case], trained.together[2][case]
    assert moved(trained.jobs[case], one) > 0.02
    for left, right in ((one.weights, two.weights), (one.adapter, two.adapter)):
        assert left.keys() == right.keys()
        for name, values in right.items():
            np.testing.assert_array_equal(values, torch.from_numpy(values).bfloat16().float().numpy(), err_msg=name)
            np.testing.assert_allclose(values, left[name], atol=0.02, err_msg=name)
    frozen = {name for name in one.weights if name.removesuffix("weight") + "lora_A.weight" not in one.adapter}
    assert all(np.array_equal(one.weights[name], two.weights[name]) for name in frozen)
    assert [step["loss"] for step in two.outcomes] == pytest.approx([step["loss"] for step in one.outcomes], rel=0.05)


def snapshot_after_score(folder: str) -> tuple[dict[str, list[float]], dict[str, list[float]]] | None:
    join_ranks(CPU)
    recipe = Job(folder, model={"dtype": "bfloat16"}).recipe()
    learner = sharded_learner(recipe, folder, CPU)
    masters = [(name, whole(weight)) for name, weight in learner.policy.model.named_parameters()]
    if not learner.world.is_first:
        worker_loop(learner)
        return None
    sender = weight_sender(learner, recipe, "gloo")
    learner.score(np.arange(9))
    snapshot = sender.snapshot(PolicyVersion(1, 0), learner.gather(WEIGHTS, sender.manifest.wire_dtype))
    later = sender.snapshot(PolicyVersion(1, 0), learner.gather(WEIGHTS))
    learner.order(END)
    assert torch.equal(snapshot.stream, later.stream), "rounded before or after they are gathered"
    unpacker, sent = Unpacker(sender.manifest, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8)), {}
    for chunk in sender.manifest.chunks:
        unpacker.memory_for(chunk).copy_(chunk_of(snapshot.stream, chunk))
        sent |= {name: tensor.float().flatten().tolist() for name, tensor in unpacker.add(chunk)}
    rounded = {name: master.bfloat16().float().flatten().tolist() for name, master in masters}
    return sent, rounded


def test_sharded_masters_are_sent_in_sixteen_bit_also_after_scoring(trained: Trained) -> None:
    sent, rounded = on_ranks(2, snapshot_after_score, trained.jobs["tied"].folder)[0]
    assert sent == rounded


# A learner that is saved and restored in another process goes on as it would have gone on, on any number of ranks

SAVED_AT, STEPS = 2, 4


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


SAVED: Cases = {
    "decaying rate": ("qwen2-untied", {"trainer": {"schedule": "cosine", "warmup_steps": 1, "steps": 5}}),
    "value head and reference": (
        "llama-tied",
        {"trainer": {"value_learning_rate": 2e-2}, "algorithm": {"advantage": "value", "kl_coefficient": 0.1}},
    ),
    "adapters and reference": ("qwen2-untied", {"trainer": {"lora": {"rank": 3}}, "algorithm": {"kl_coefficient": 0.1}}),
    "a step that was skipped": ("llama-tied", {"broken": True}),
}
SAVED_ROUNDED: Cases = {
    "bfloat16": ("qwen2-untied", {"model": {"dtype": "bfloat16"}}),
    "adapters in bfloat16": ("llama-tied", {"model": {"dtype": "bfloat16"}, "trainer": {"lora": {"rank": 4}}}),
}
"""One rank rounds differently than two: equality is of equally many ranks only."""
HYBRID = "hybrid"
HYBRIDS: Cases = {HYBRID: ("qwen2-untied", {"trainer": {"shard_ranks": 2}})}


SAVED_BY = {1: SAVED | SAVED_ROUNDED, 2: SAVED | SAVED_ROUNDED, 4: HYBRIDS}
"""By the number of ranks."""
RESUMED_BY = {1: {1: SAVED | SAVED_ROUNDED, 2: SAVED, 4: HYBRIDS}, 2: {2: SAVED | SAVED_ROUNDED, 1: SAVED}}
"""By the number of ranks that resume, and that of those that saved."""


Traces = dict[int, list[dict[str, Trace]]]
"""Of each rank, by their number and the case."""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Traces, Traces]:
    """How ranks went on after they had saved, and how ranks go on from what others have saved, whose number is in the name."""
    jobs, root = jobs_of(SAVED | SAVED_ROUNDED | HYBRIDS, tmp_path_factory), tmp_path_factory.mktemp("states")

    def work(ranks: int, cases: Cases) -> dict[str, tuple[Job, Path]]:
        folders = {name: root / f"of-{ranks}" / name.replace(" ", "-") / "resume" / "state" for name in cases}
        return {f"{ranks} {name}": (jobs[name], folder) for name, folder in folders.items()}

    saved = {ranks: on_ranks(ranks, trace_all, work(ranks, cases), False) for ranks, cases in SAVED_BY.items()}
    resumed = {}
    for ranks, sources in RESUMED_BY.items():
        found = {name: job for before, cases in sources.items() for name, job in work(before, cases).items()}
        resumed[ranks] = on_ranks(ranks, trace_all, found, True)
    return saved, resumed


@pytest.mark.parametrize("case", SAVED | SAVED_ROUNDED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_equally_many_ranks_go_on_exactly_as_if_never_stopped(traces: tuple[Traces, Traces], ranks: int, case: str) -> None:
    saved, resumed = traces
    for first, second in zip(saved[ranks], resumed[ranks], strict=True):
        before, after = first[f"{ranks} {case}"], second[f"{ranks} {case}"]
        np.testing.assert_equal(after.metrics, before.metrics)
        np.testing.assert_equal(after.weights, before.weights)
        assert after.draws == before.draws


@pytest.mark.parametrize(
    ("before", "after", "case"), [*((1, 2, case) for case in SAVED), *((2, 1, case) for case in SAVED), (4, 1, HYBRID)]
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


# Nodes


def of_another_revision(folder: str, name: str) -> str:
    rank = os.environ["RANK"]
    loading.__version__ = f"1.{rank}" if name == "version" else "1.0"
    recipe = Job(folder, trainer={"learning_rate": 1e-4 * (1 + int(rank) * (name == "recipe"))}).recipe()
    with pytest.raises(ServiceError) as raised:
        load_learner(recipe, folder, RankSettings(), revision=f"trainer-{rank}" if name == "pod template" else "trainer-0")
    leave_ranks()
    return str(raised.value)


@pytest.mark.parametrize("name", ["version", "pod template", "recipe"])
def test_nodes_of_different_revisions_do_not_train_together(trained: Trained, name: str) -> None:
    first, second = on_ranks(2, of_another_revision, trained.jobs["tied"].folder, name)
    both = {"version": "'1.1', rank 0 has '1.0'", "pod template": "'trainer-1', rank 0 has 'trainer-0'"}.get(name, "")
    assert first == second
    assert first.startswith(f"the trainer's ranks do not match: rank 1 has {name} {both}")
    assert first.endswith(". Delete all pods of the trainer at once, so that all are replaced")


def left_alone(folder: str) -> str:
    join_ranks(CPU)
    learner = sharded_learner(Job(folder).recipe(), folder, CPU)
    if learner.world.is_first:
        leave_ranks()
        return ""
    with pytest.raises(ServiceError) as raised:
        worker_loop(learner)
    return str(raised.value)


def test_a_rank_that_rank_0_leaves_says_so(trained: Trained) -> None:
    assert on_ranks(2, left_alone, trained.jobs["tied"].folder)[1].startswith("the connection to rank 0 is lost (")


# The first rank of a further node answers for its pod, from before its model is loaded to rank 0's last order


def node_settings(folder: Path, port: int) -> TrainerSettings:
    where = {"recipe": folder / "recipe.yaml", "run_dir": folder, "http_port": port}
    return TrainerSettings(run="r", instance="trainer-1", nodes=2, node=1, **where)


def two_nodes(folder: Path, source: str, port: int) -> Any:
    return lead_node(folder, source, port) if os.environ["RANK"] == "0" else further_node(folder, port)


def lead_node(folder: Path, source: str, port: int) -> tuple[int, str]:
    lead = load_learner(load_recipe(folder / "recipe.yaml"), source, RankSettings(rank=0, world_size=2))
    wait_until(lambda: get(port, "/readyz") == (200, "ready\n"))
    lead.order(HEARTBEAT)
    lead.order(HEARTBEAT)
    wait_until(lambda: 'pipelinerl_trainer_rank_orders_total{kind="beat",run="r"} 2.0' in get(port, "/metrics")[1])
    healthy = get(port, "/healthz")
    lead.step(lead.prepare([group_of(sequences_of(SHORT))], version=5))
    lead.order(END)
    leave_ranks()
    return healthy


def further_node(folder: Path, port: int) -> tuple[tuple[int, str], str, int | None]:
    asked, load, answers = threading.Event(), worker.load_learner, []

    def load_when_asked(*arguments: Any, **options: Any) -> Any:
        asked.wait(60)
        return load(*arguments, **options)

    def ask() -> None:
        wait_until(lambda: get(port, "/readyz")[0] != 0)
        answers.append(get(port, "/readyz"))
        asked.set()

    worker.load_learner = load_when_asked
    asking, context = threading.Thread(target=ask), LogContext("r", "trainer", "trainer-1")
    asking.start()
    asyncio.run(worker.serve_rank(node_settings(folder, port), RankSettings(rank=1, world_size=2, local_rank=0), context))
    asking.join()
    return answers[0], context.instance, context.policy_version


def test_the_pod_of_another_node_answers(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(trained.jobs["tied"].recipe()))
    first, second = on_ranks(2, two_nodes, tmp_path, trained.jobs["tied"].folder, free_port())
    assert first == (200, "ok\n")
    assert second == ((503, "the model is loading\n"), "trainer-1-rank1", 6)
