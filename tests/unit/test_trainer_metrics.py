"""What the trainer exports, by hand: lags counted in tokens, spread inside groups, the ledger, streams, members, phase."""

import time
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.bus.protocol import StreamInfo
from pipelinerl.messages.sequences import FinishReason
from pipelinerl.rl.ledger import Outcome, SequenceTracker
from pipelinerl.v1 import trainer_pb2
from services.trainer.learn.batch import TrainingGroup
from services.trainer.reporting.metrics import TrainerMetrics, bounded
from services.trainer.reporting.recorder import answer_figures, group_figures, task_figures
from services.trainer.weight_sync.coordinator import EvictionCause
from services.trainer.weight_sync.membership import UpdateRecord
from tests.unit.builders import make_group, make_recipe, make_sequence
from tests.unit.trainer_fakes import run_view, step_figures


class Exported:
    """The trainer's metrics on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = TrainerMetrics(self.registry)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pipelinerl_trainer_{name}", labels)

    def watch(self, tracker: SequenceTracker | None = None, **streams: StreamInfo) -> None:
        self.metrics.watch(lambda: run_view(tracker=tracker, **streams), lambda: trainer_pb2.TRAINER_PHASE_TRAINING)

    def step(self, **figures: object) -> None:
        measured = {"heldout_tokens": None, "commits_held_s": 0, "parity_failures": 0}
        record = {"step_s": {}, "actor_busy_fraction": None, "trainer_busy_fraction": 0.5}
        self.metrics.steps.observe({**step_figures(), **measured, **record, **figures})


def test_each_token_counts_once_under_its_lag_whose_bound_is_a_series_only_where_there_is_one() -> None:
    exported = Exported()
    exported.step(lag_histogram={0: 10, 1: 5, 3: 2}, lag={"max": 3})
    exported.step(lag_histogram={"0": 1, "8": 4, "65": 1}, lag={"max": 65})
    edges = {"0.0": 11, "1.0": 16, "2.0": 16, "4.0": 18, "8.0": 22, "16.0": 22, "32.0": 22, "64.0": 22, "+Inf": 23}
    assert {le: exported("token_lag_steps_bucket", le=le) for le in edges} == edges
    assert exported("token_lag_steps_count") == 23
    assert exported("token_lag_steps_sum") == 5 + 6 + 32 + 65
    assert exported("token_lag_max_steps") == 65
    exported.metrics.steps.lag_bound.set(4)
    assert exported("token_lag_bound_steps") == 4
    exported.metrics.steps.lag_bound.set(None)
    assert exported("token_lag_bound_steps") is None


def group_of(number: int, *rewards: float) -> TrainingGroup:
    group = make_group(number, num_samples=len(rewards))
    sequences = tuple(make_sequence(group, index, reward=reward) for index, reward in enumerate(rewards))
    return TrainingGroup(sequences, np.zeros(len(rewards)))


def test_the_spread_is_inside_groups_and_not_between_them() -> None:
    # Standard deviations 0.5, 0 and 0 (rewards 0 and 1; 1 and 1; 0 and 0), though the batch as a whole spreads.
    figures = group_figures([group_of(0, 0.0, 1.0), group_of(1, 1.0, 1.0), group_of(2, 0.0, 0.0)])
    assert figures == {"group_reward_std": pytest.approx(0.5 / 3), "equal_reward_groups": pytest.approx(2 / 3)}
    exported = Exported()
    exported.step(**figures)
    assert exported("group_reward_std") == pytest.approx(0.5 / 3)
    assert exported("equal_reward_groups_ratio") == pytest.approx(2 / 3)


def test_figures_of_answers_tell_what_groups_earned_and_what_the_reward_did_not_find() -> None:
    def answers(number: int, *told: tuple[str, float, str]) -> TrainingGroup:
        group = make_group(number, num_samples=len(told))
        made = [replace(make_sequence(group, index), reference_json='{"answer": "7"}') for index in range(len(told))]
        sequences = (
            replace(one, completion_text=text, reason=reason, reward_components={"answer": earned, "format": 0.1 * index})
            for index, (one, (text, earned, reason)) in enumerate(zip(made, told, strict=True))
        )
        return TrainingGroup(tuple(sequences), np.zeros(len(told)))

    right, wrong, lost = ("#7", 1.0, ""), ("#9", 0.0, ""), ("it is 7", 0.0, "reward.answer_pattern found no answer")
    figures = answer_figures([answers(0, right, right), answers(1, wrong, lost), answers(2, right, wrong)], make_recipe())
    assert figures == {
        **dict.fromkeys(("groups_all_right", "groups_all_wrong", "identical_groups"), pytest.approx(1 / 3)),
        "answers_absent": pytest.approx(1 / 6), "answers_missed": pytest.approx(1 / 6),
        "term_spread": {"answer": pytest.approx(0.5 / 3), "format": pytest.approx(0.05)},
    }  # fmt: skip
    other = lost[0].replace("7", "17"), *lost[1:]
    assert answer_figures([answers(0, other, right)], make_recipe())["answers_missed"] == 0


def test_figures_by_task_are_of_the_tasks_in_the_step() -> None:
    first, second = make_group(0), make_group(1, task="words")
    batch = [
        make_sequence(first, 0, reward=1.0),
        make_sequence(first, 1, reward=0.0),
        make_sequence(second, 0, completion=(4,)),
    ]
    batch[2] = replace(batch[2], finish_reason=FinishReason.LENGTH)
    figures = task_figures(batch)
    assert figures == {
        "chain_sum": {"sequences": 2, "reward_mean": 0.5, "completion_tokens_mean": 2.0, "truncated_fraction": 0.0},
        "words": {"sequences": 1, "reward_mean": 1.0, "completion_tokens_mean": 1.0, "truncated_fraction": 1.0},
    }
    exported = Exported()
    exported.step(tasks=figures)
    assert exported("task_reward_mean", task="chain_sum") == 0.5
    assert exported("task_truncated_ratio", task="words") == 1.0
    exported.step(tasks=task_figures(batch[:2]))
    assert exported("task_reward_mean", task="words") is None


def test_what_a_step_does_not_have_is_no_series_and_what_is_measured_now_and_then_stays() -> None:
    exported = Exported()
    exported.step(ess=0.8, loss=0.5, heldout_accuracy=0.25, ess_by_lag={"0": 1.0, "3-4": 0.5}, reward_mean=1.0)
    assert exported("value_loss") is None
    assert exported("mfu_ratio") == 0.4
    exported.step(ess=None, loss=0.25, heldout_accuracy=None, ess_by_lag={"0": 0.9}, mfu=None)
    assert (exported("ess_ratio"), exported("loss"), exported("mfu_ratio")) == (None, 0.25, None)
    assert exported("heldout_accuracy_ratio") == 0.25
    assert (exported("ess_by_lag_ratio", lag="0"), exported("ess_by_lag_ratio", lag="3-4")) == (0.9, None)


def test_the_ledger_and_the_tokens_that_went_each_way() -> None:
    exported, books = Exported(), SequenceTracker()
    exported.watch(tracker=books)
    groups = [make_group(number) for number in range(4)]
    for group in groups:
        books.issue(group)
    first, second, third, _ = groups
    for group, version in ((first, 0), (second, 1)):
        for index in (0, 1):
            books.arrive(make_sequence(group, index, completion=(1, 2, 3), version=version))
    books.arrive(make_sequence(third, 0, completion=(1,), failure="engine: it broke"))
    books.arrive(make_sequence(third, 1, completion=()))
    trained = [make_sequence(first, index, completion=(1, 2, 3)) for index in range(2)]
    books.close(trained, Outcome.TRAINED, version=1)
    books.close([make_sequence(second, 0, completion=(1, 2, 3))], Outcome.DROPPED_STALE, "lag above max_lag")
    wanted = {"issued": 8, "trained": 2, "dropped_stale": 1, "dropped_filtered": 0, "failed": 1, "in_flight": 4}
    assert {state: exported("ledger_sequences", state=state) for state in wanted} == wanted
    assert exported("ledger_discrepancy_sequences") == 0
    assert (exported("failed_sequences", reason="engine"), exported("bad_messages")) == (1, 1)
    assert exported("quarantined_actors") == 1
    assert exported("dropped_stale_sequences", reason="lag above max_lag") == 1
    assert exported("dropped_stale_sequences", reason="version undone by a restart") == 0
    tokens = {"trained": 6, "dropped_stale": 3, "dropped_filtered": 0, "failed": 1}
    assert {outcome: exported("tokens_total", outcome=outcome) for outcome in tokens} == tokens
    assert exported("tokens_arrived_total") == 12


def test_reasons_beyond_the_most_frequent_are_one() -> None:
    assert bounded({"a": 1, "b": 5, "c": 2, "d": 2}, most=2) == {"b": 5, "c": 2, "(other)": 3}
    assert bounded({"a": 1}, most=2) == {"a": 1}


def test_streams_parts_of_the_run_updates_and_members_by_hand() -> None:
    exported = Exported()
    assert exported("phase", phase="loading") == 1
    exported.watch()
    assert (exported("unread_sequences"), exported("stream_messages", stream="prompts")) == (None, None)
    began_s = time.time()
    exported.watch(prompts=StreamInfo(0, 0, 4, 3), sequences=StreamInfo(6, 600, 5, 10, first_at_s=began_s - 10))
    seen = [exported(f"stream_{what}", stream="sequences") for what in ("messages", "bytes", "oldest_seconds")]
    assert seen == [6, 600, pytest.approx(10 + time.time() - began_s, abs=time.time() - began_s)]
    assert [exported(f"stream_{what}", stream="prompts") for what in ("messages", "oldest_seconds")] == [0, 0]
    assert (exported("unread_sequences"), exported("ready_groups"), exported("feeder_allowance_groups")) == (3, 3, 5)
    assert [exported("phase", phase=name) for name in ("loading", "training", "finished")] == [0, 1, 0]
    assert (exported("policy_version"), exported("served_version"), exported("epoch")) == (3, None, 2)
    assert exported("members", state="serving") == 4
    assert (exported("checkpoint_version"), exported("checkpoint_timestamp_seconds")) == (4, 9100)
    assert (exported("checkpoint_upload_version"), exported("checkpoint_upload_timestamp_seconds")) == (None, None)
    exported = Exported()
    membership = exported.metrics.membership
    membership.served(UpdateRecord(1, num_bytes=100, transfer_s=0.5, round_trip_s=2.0))
    membership.evictions.labels(EvictionCause.DEADLINE.value).inc()
    exported.watch()
    assert [exported("weight_updates_total", outcome=outcome) for outcome in ("served", "aborted")] == [6, 2]
    assert exported("regroups_total") == 3
    assert (exported("weight_update_bytes_total"), exported("weight_update_round_trip_seconds_sum")) == (100, 2)
    assert exported("evictions_total", reason="deadline") == 1
    assert exported("evictions_total", reason="checksum") == 0
