"""A case of `trainer_overhead` on several ranks of one machine, each with one thread.

Ours: the learner under FSDP2, told what to do by rank 0. Bare: `fully_shard` on each layer and on the model, and a loop over
the same micro-batches of each rank. Both live on the same ranks, talk over Gloo and step in turn.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import PreTrainedModel

from benchmarks.bare_loop import BareLoop
from benchmarks.loops_in_turn import Timings, compared, in_turn, of_all_ranks, timed
from benchmarks.trainer_cases import Case
from benchmarks.training_data import VERSION
from pipelinerl.recipe.fields import AlgorithmConfig
from services.trainer.learn.attention import VARLEN
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.meter import SAMPLED_WEIGHTS
from services.trainer.learn.model import decoder_layers, wrap_model
from services.trainer.learn.step import Learner, PreparedStep
from services.trainer.loading import shard_policy
from services.trainer.worker import carry_out, receive_batches
from services.trainer.world import END, Message, World, join_ranks, leave_ranks, world_of_ranks

CPU = torch.device("cpu")


def run_ranks(case: Case, pairs: int) -> dict[str, Any]:
    """Result of `case` on its ranks, and beside it one rank of ours with as many threads."""
    of_rank: Mapping[int, tuple[Timings, dict[str, Any]]] = on_ranks(case.ranks, play, case, pairs)
    metrics = of_rank[0][1]
    timings = of_all_ranks([timings for timings, _ in of_rank.values()])
    fastest_s = min(step.wall_s for step in timings.ours)
    by_one_rank = fastest_step_of_one_rank_s(case, max(3, pairs // 4)) / fastest_s
    return {**compared(timings, metrics["tokens_trained"]), "by_one_rank": by_one_rank, "metrics": metrics}


def on_ranks(num_ranks: int, role: Callable[..., Any], *arguments: Any) -> Mapping[int, Any]:
    """Return what `role(*arguments)` returns on each of several ranks of this machine."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    results: Mapping[int, Any] = elastic_launch(config, role)(*arguments)
    return results


def play(case: Case, pairs: int) -> tuple[Timings, dict[str, Any]]:
    """On every rank: the timings of its steps; on rank 0 also the metrics of a step."""
    torch.set_num_threads(1)
    join_ranks(CPU)
    world = world_of_ranks(1, 0, CPU)
    torch.manual_seed(0)
    model = case.build_model()
    groups = case.groups(model.config.vocab_size)
    policy = shard_policy(wrap_model(copy.deepcopy(model)), world, torch.float32)
    learner = Learner(policy, AlgorithmConfig(), case.trainer(), world=world)
    bare = bare_loop(model, case, learner.prepare(groups, VERSION), world)
    received = receive_batches(world.batches)
    if not world.is_first:
        next(received)  # rank 0 has sent the batches of the bare loop, too
    ours = order_of(learner, groups, received)
    metrics = ours()
    bare.step()
    timings = in_turn(ours, bare.step, pairs, meet=dist.barrier)
    learner.order(END)
    if not world.is_first:
        world.links.receive_order()
        list(received)
    leave_ranks()
    return timings, metrics


def order_of(learner: Learner, groups: list[TrainingGroup], received: Iterator[Message]) -> Callable[[], dict[str, Any]]:
    """This rank's part in one step: plan it and lead, or follow."""
    links = learner.world.links
    assert links is not None

    def follow() -> dict[str, Any]:
        carry_out(links.receive_order(), learner, received)
        return {}

    def lead() -> dict[str, Any]:
        figures = learner.step(learner.prepare(groups, VERSION))
        del figures[SAMPLED_WEIGHTS]
        return figures

    return lead if learner.world.is_first else follow


def bare_loop(model: PreTrainedModel, case: Case, prepared: PreparedStep, world: World) -> BareLoop:
    """On this rank's micro-batches of `prepared`."""
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batches = [batch.on(CPU) for batch in prepared.shares[world.layout.rank // world.layout.sequence_ranks]]
    return BareLoop(model, VARLEN, batches, case.trainer())


def fastest_step_of_one_rank_s(case: Case, steps: int) -> float:
    """Seconds, of the learner alone, with a thread for each rank of `case`."""
    before = torch.get_num_threads()
    torch.set_num_threads(case.ranks)
    torch.manual_seed(0)
    model = case.build_model()
    groups = case.groups(model.config.vocab_size)
    learner = Learner(wrap_model(model), AlgorithmConfig(), case.trainer())
    learner.step(learner.prepare(groups, VERSION))
    fastest = min(timed(lambda: learner.step(learner.prepare(groups, VERSION))).wall_s for _ in range(steps))
    torch.set_num_threads(before)
    return fastest
