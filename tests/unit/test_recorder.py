"""Figures of a run, in its files and as metrics: what skipped steps count for, what a broken probe and unanswered problems look
like; lags counted in tokens, spread inside groups, the ledger, streams; series have the run's name, and none without a value.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl.bus.protocol import StreamInfo
from pipelinerl.messages.sequences import FinishReason, VersionSpan
from pipelinerl.rl.accuracy import accuracy_of
from pipelinerl.rl.ledger import Outcome, SequenceTracker, ledger_counts
from pipelinerl.run_summary import RunFiles
from pipelinerl.telemetry.metrics import OTHER, BoundedLabels, Reading, RunRegistry, short_reason
from pipelinerl.v1 import trainer_pb2
from pipelinerl.v1.actor_pb2 import ActorState
from services.trainer.data.evaluation import HeldoutResult, Parity
from services.trainer.learn.batch import TrainingGroup
from services.trainer.reporting.metrics import TrainerMetrics, bounded
from services.trainer.reporting.page import PageBoard
from services.trainer.reporting.recorder import Recorder, answer_figures, group_figures, task_figures
from services.trainer.reporting.trackers import RunTrackers
from services.trainer.weight_sync.coordinator import EvictionCause, Member
from services.trainer.weight_sync.membership import MemberChange, UpdateRecord
from tests.support.learner import letters_tokenizer
from tests.unit.builders import accuracy_at, make_episode, make_group, make_recipe, make_sequence
from tests.unit.trainer_fakes import Tracked, run_view, step_figures

TWO_VERSIONS = (VersionSpan(0, 0, 1), VersionSpan(1, 1, 2))


class Desk:
    def __init__(self, run_dir: Path, files: RunFiles, **sections: object) -> None:
        self.run_dir, self.registry, self.taken = run_dir, CollectorRegistry(), 0
        self.recorder = Recorder(make_recipe(**sections), files, TrainerMetrics(self.registry))

    def step(self, skipped: str = "", episodes: bool = False, **more: Any) -> dict[str, Any]:
        """Trains on a group of two sequences; the second is of two versions, and was cut. `episodes`: the first is one."""
        group = make_group(self.taken)
        cut = replace(make_sequence(group, 1, spans=TWO_VERSIONS), finish_reason=FinishReason.LENGTH)
        first = make_episode(group, 0) if episodes else make_sequence(group, 0)
        first = replace(first, metrics={"said": 3.0}, reward_components={"answer": 1.0}, reference_json='{"answer": "7"}')
        members = (first, replace(cut, reward_components={"answer": 0.0, "format": 0.5}, answer="8", reason="7 is right"))
        self.taken += 1
        figures = {
            **step_figures(skipped),
            "step": self.taken,
            "policy_version": self.taken,
            "step_s": {"compute": 0.1, "wait": 7.0, "total": 9.0},
            "idle_s": 0.02,
            "sequences": ledger_counts(trained=4 * self.taken, dropped_stale=6 * self.taken),
            **more,
        }
        self.recorder.step(figures, [TrainingGroup(members, np.array([0.5, -0.5]))], tokens_arrived=10)
        return json.loads((self.run_dir / "metrics.jsonl").read_text().splitlines()[-1])

    def summary(self) -> dict[str, Any]:
        self.recorder.watch(lambda: run_view(version=self.taken))
        self.recorder.write_summary(finished=True)
        return json.loads((self.run_dir / "summary.json").read_text())

    def of(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pipelinerl_trainer_{name}", labels)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with RunFiles(tmp_path) as files:
        yield Desk(tmp_path, files)


def test_a_skipped_step_trained_on_nothing(desk: Desk) -> None:
    desk.step()
    record = desk.step("loss not finite", ess=0.1)
    assert (record["tokens_trained_per_s"], record["multi_version_fraction"]) == (0, 0.5)
    summary = desk.summary()
    assert [summary[name] for name in ("steps", "steps_skipped", "steps_clipped", "tokens_trained")] == [2, 1, 1, 8]
    assert (summary["sequences_multi_version_fraction"], summary["lag"]["max"]) == (0.5, 0.0)
    assert (record["truncated_fraction"], desk.of("truncated_ratio")) == (0.5, 0.5)
    assert summary["sequences_truncated_fraction"] == 0.5
    assert summary["ess"] == {"mean": 0.9, "min": 0.9}
    assert [desk.of(name) for name in ("token_lag_steps_count", "steps_skipped_total", "steps_clipped_total")] == [8, 1, 1]


def test_turns_and_what_was_observed_are_figures_of_episodes_alone(desk: Desk) -> None:
    """An episode of 3 sampled and 2 observed tokens in two turns, and a branch of one; beside a sequence of 2 tokens."""
    plain, mixed = desk.step(), desk.step(episodes=True)
    figures = {"turns_mean": 3.0, "branches_mean": 2.0, "observed_fraction": pytest.approx(2 / 6)}
    assert figures.keys() & plain.keys() == set()
    assert {name: mixed[name] for name in figures} == figures
    assert (mixed["completion_tokens_mean"], mixed["truncated_fraction"]) == (3.0, 0.5)
    assert [desk.of(name) for name in ("episode_turns", "episode_branches")] == [3.0, 2.0]
    assert mixed["reported"] == {"chain_sum": {"answer": 0.5, "format": 0.5, "said": 3.0, "turns": 3.0}}
    assert desk.of("task_reported_mean", task="chain_sum", figure="said") == 3.0
    *_, first, second = map(json.loads, (desk.run_dir / "samples.jsonl").read_text().splitlines())
    assert [first[name] for name in ("reference", "terms", "metrics")] == ["7", {"answer": 1.0}, {"said": 3.0}]
    assert [second[name] for name in ("reference", "answer", "reason")] == [None, "8", "7 is right"]
    desk.step()
    assert desk.of("observed_ratio") is None


def test_a_lag_limit_that_costs_something_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Desk's steps wait for most of their time."""
    with RunFiles(tmp_path) as files:
        desk = Desk(tmp_path, files, algorithm={"max_lag": 1})
        told = [
            desk.step(largest_lag=1),
            desk.step(largest_lag=2),  # the longest of the first sequences may be on their way
            desk.step(largest_lag=2, held_by_max_lag=False),  # nothing is lost: actors are faster than the trainer
        ]
        assert ([one["max_lag_too_small"] for one in told], caplog.records) == ([False] * 3, [])
        assert desk.step(largest_lag=2)["max_lag_too_small"]
        assert "algorithm.max_lag = 1: is below the largest lag" in caplog.text
        stale = {"held_by_max_lag": False, "ended_by_length": {"16": [90, 0], "64": [9, 2]}}
        assert desk.step(largest_lag=2, **stale)["max_lag_too_small"]
        assert len(caplog.records) == 1
    assert desk.summary()["largest_lag"] == 2


def test_a_clip_range_that_cuts_too_many_tokens_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not before ten steps: nine of 0.3 and one of 0.1 are 0.28 in the mean, and a reinforce run is never told."""
    for loss, cut in (("gspo", pytest.approx(0.28)), ("reinforce", None)):
        with RunFiles(tmp_path / loss) as files:
            desk = Desk(tmp_path / loss, files, algorithm={"loss": loss, "max_lag": 4})
            told = [desk.step(clip_fraction=share)["clip_range_cut"] for share in [0.3] * 5 + [0.1] + [0.3] * 6]
            assert told == [None] * 9 + [cut] * 3
    (warning,) = (record.message for record in caplog.records)
    assert warning.startswith("algorithm.clip_low = 0.0003: together with algorithm.clip_high (0.0004) it clips 28% of the")


def test_a_broken_probe_is_a_failure_and_the_maximum_is_over_the_others(desk: Desk) -> None:
    desk.recorder.parity(Parity(2e-6))
    desk.recorder.parity(Parity(None, ("a", "b")))
    record = desk.step()
    assert (record["logprob_mismatch"], record["parity_failures"]) == (2e-6, 2)
    desk.recorder.parity(Parity(1e-6, ("a",)))
    record = desk.step()
    assert (record["logprob_mismatch"], record["parity_failures"]) == (1e-6, 1)
    assert desk.step()["logprob_mismatch"] is None
    summary = desk.summary()
    assert (summary["logprob_mismatch_max"], summary["parity_failures"]) == (2e-6, 3)
    assert desk.of("parity_failures_total") == 3


def test_what_an_evaluation_cost_and_problems_without_a_verdict_are_recorded(desk: Desk) -> None:
    accuracy = accuracy_of([[True, True], [True, False]])
    assert accuracy is not None
    accuracy = replace(accuracy, reported={"answer": 0.75, "turns": 2.5})
    sets = {"chain_sum": asdict(accuracy)}
    desk.recorder.heldout(HeldoutResult(1, accuracy_at(0.75, 0.5, 4), 30, (), {"chain_sum": accuracy}))
    desk.recorder.commits_held(1.5)
    record = desk.step()
    assert (record["heldout_accuracy"], record["heldout_unanswered"]) == (0.75, 4)
    assert (record["heldout_tokens"], record["commits_held_s"]) == (30, 1.5)
    assert (desk.step()["heldout_tokens"], desk.step()["commits_held_s"]) == (None, 0)
    summary = desk.summary()
    assert summary["heldout"] == [{"version": 1, "accuracy": 0.75, "unanswered": 4, "lower_bound": 0.5, "sets": sets}]
    assert (record["heldout_sets"], sets["chain_sum"]["accuracy"]["value"]) == (sets, 0.75)
    of_set = [desk.of(f"heldout_set_{name}_ratio", set="chain_sum") for name in ("accuracy", "pass")]
    assert (of_set, desk.of("heldout_set_reported_mean", set="chain_sum", figure="turns")) == ([0.75, 1.0], 2.5)
    assert (record["heldout_accuracy_lower_bound"], desk.of("heldout_accuracy_lower_bound_ratio")) == (0.5, 0.5)
    assert (summary["heldout_tokens"], summary["commits_held_s"]) == (30, 1.5)
    assert (desk.of("heldout_tokens_total"), desk.of("commits_held_seconds_total")) == (30, 1.5)


def test_throughput_is_exported_and_summed_up(desk: Desk) -> None:
    desk.step()
    desk.step("loss not finite")
    assert [desk.of(name) for name in ("mfu_ratio", "imbalance_ratio", "memory_peak_bytes")] == [0.4, 0.05, 1.5 * 2**30]
    assert (desk.of("tokens_per_second", tokens="computed"), desk.of("tokens_per_second", tokens="trained")) == (100, 0)
    assert desk.of("compute_phase_seconds_sum", phase="forward_backward") == pytest.approx(0.14)
    summary = desk.summary()
    # 8 and 0 of 10 and 10 tokens trained in 0.1 s each
    assert summary["tokens_per_s"] == {"trained": pytest.approx(40), "computed": pytest.approx(100)}
    assert (summary["mfu_mean"], summary["idle_s_mean"]) == (pytest.approx(0.4), pytest.approx(0.02))


@pytest.mark.parametrize("wanted", [True, False])
def test_trackers_get_samples_unless_the_recipe_says_otherwise_and_the_page_all_tokens(tmp_path: Path, wanted: bool) -> None:
    """The file of a long run has the tokens of few versions."""
    board, tracked = PageBoard(), Tracked()
    recipe = make_recipe(trainer={"steps": 1000, "batch_size": 4}, tracker_samples=wanted)
    with RunFiles(tmp_path) as files:
        trackers = RunTrackers([tracked])  # type: ignore[list-item]
        reports = {"board": board, "tokenizer": letters_tokenizer(), "trackers": trackers}
        recorder = Recorder(recipe, files, TrainerMetrics(CollectorRegistry()), **reports)  # type: ignore[arg-type]
        for version in (2, 3):
            problem = replace(make_sequence(make_group(), 0, completion=(0, 1), version=version), completion_text="ab")
            recorder.heldout(HeldoutResult(version, accuracy_at(1.0, 1.0, 0), 3, (problem,)))
    written = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [one["tokens"] for one in written] == [["a", "b"], None]
    assert [one["tokens"] for one in board._samples] == [["a", "b"]] * 2
    sent = [(axis, [row["completion"] for row in rows]) for axis, _, rows in tracked.tables]
    assert sent == [("heldout/version", ["ab"])] * 2 * wanted


def test_joins_and_evictions_are_in_the_next_record_and_in_the_summary(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.recorder.joined("actor-1", UpdateRecord(3, round_trip_s=0.5))
    desk.recorder.joined("actor-2", UpdateRecord(4, round_trip_s=1.5))
    record = desk.step()
    told = [(one["actor"], one["version"], one["join_s"]) for one in record["joins"]]
    assert told == [("actor-1", 3, 0.5), ("actor-2", 4, 1.5)]
    assert desk.step()["joins"] == []
    assert desk.summary()["membership"] == {"joins": 2, "join_s_p50": 1.0, "evictions": 0}
    change = MemberChange("evicted", Member("actor-1", "p"), 4, 3, "the deadline passed", EvictionCause.DEADLINE)
    desk.recorder.member_changed(change)
    assert "actor actor-1 was evicted from epoch 4: the deadline passed" in caplog.text
    assert desk.of("evictions_total", reason="deadline") == 1


def test_what_steps_use_up_without_waiting_tells_how_many_actors_are_wanted(tmp_path: Path) -> None:
    with RunFiles(tmp_path) as files:
        trainer = {"steps": 10, "batch_size": 4, "tokens_per_microbatch": 64}
        desk = Desk(tmp_path, files, actor={"sequences_in_progress": 8}, algorithm={"max_lag": 19}, trainer=trainer)
        for finished in (0, 60):  # one a second, with all slots in use
            load = ActorState(uptime_s=1e3, sequences_in_progress=8, sequences_finished=finished, busy_s=finished)
            desk.recorder.actor_loads({"actor-0": load}, measuring=False)
        wanted = partial(desk.registry.get_sample_value, "pipelinerl_actor_replicas_wanted")
        for _ in range(4):
            assert wanted() is None
            assert "# TYPE pipelinerl_actor_replicas_wanted gauge" in generate_latest(desk.registry).decode()
            desk.step()  # uses up 10 in 2 s: 5 a second
        assert wanted() == 5
        desk.recorder.end(desk.summary(), finished=True)
    assert wanted() == 1


def test_steps_that_a_restart_undid_are_set_aside(desk: Desk) -> None:
    for _ in range(3):
        desk.step()
    with (desk.run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    with RunFiles(desk.run_dir, keep_steps=1) as files:
        assert [record["step"] for record in files.kept] == [1]
    undone = (desk.run_dir / "metrics-undone.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in undone] == [2, 3], "the line that was cut off is dropped"


# What the trainer exports, by hand


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
    exported.step(ess=0.8, heldout_accuracy=0.25, ess_by_lag={"0": 1.0, "3-4": 0.5}, reward_mean=1.0)
    exported.step(ess=None, heldout_accuracy=None, ess_by_lag={"0": 0.9})
    assert (exported("ess_ratio"), exported("heldout_accuracy_ratio")) == (None, 0.25)
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
    assert exported("stream_oldest_seconds", stream="prompts") == 0
    assert (exported("unread_sequences"), exported("ready_groups"), exported("feeder_allowance_groups")) == (3, 3, 5)
    assert [exported("phase", phase=name) for name in ("loading", "training", "finished")] == [0, 1, 0]
    assert (exported("policy_version"), exported("served_version"), exported("epoch")) == (3, None, 2)
    assert (exported("members", state="serving"), exported("regroups_total")) == (4, 3)
    assert (exported("checkpoint_version"), exported("checkpoint_upload_version")) == (4, None)
    assert [exported("weight_updates_total", outcome=outcome) for outcome in ("served", "aborted")] == [6, 2]
    exported.metrics.membership.served(UpdateRecord(1, num_bytes=100, transfer_s=0.5, round_trip_s=2.0))
    assert (exported("weight_update_bytes_total"), exported("weight_update_round_trip_seconds_sum")) == (100, 2)


# Any service's metrics


def series(registry: CollectorRegistry) -> dict[str, float]:
    """Value by `name{labels}`, as a scraper reads it."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        f"{sample.name}{dict(sorted(sample.labels.items()))}": sample.value for family in families for sample in family.samples
    }


def test_the_run_is_on_every_sample_of_every_kind() -> None:
    registry = RunRegistry("gsm")
    Gauge("g", "a gauge", ["state"], registry=registry).labels("up").set(2)
    Counter("c", "a counter", registry=registry).inc(3)
    Histogram("h", "a histogram", buckets=(1.0,), registry=registry).observe(0.5)
    reading = Reading("r", "a reading", ["lag"])
    reading.set({"0": 0.5})
    registry.register(reading)
    assert series(registry) == {
        "g{'run': 'gsm', 'state': 'up'}": 2,
        "c_total{'run': 'gsm'}": 3,
        "h_bucket{'le': '1.0', 'run': 'gsm'}": 1,
        "h_bucket{'le': '+Inf', 'run': 'gsm'}": 1,
        "h_count{'run': 'gsm'}": 1,
        "h_sum{'run': 'gsm'}": 0.5,
        "r{'lag': '0', 'run': 'gsm'}": 0.5,
    }
    assert registry.get_sample_value("c_total", {"run": "gsm"}) == 3


def test_what_has_no_value_has_no_series() -> None:
    registry, reading, by_lag = CollectorRegistry(), Reading("r", "text"), Reading("l", "text", ["lag"])
    registry.register(reading)
    registry.register(by_lag)
    assert series(registry) == {}
    reading.set(0.0)
    by_lag.set({"0": 1.0, "1": 0.5})
    by_lag.set({"1": 0.25, "2": None})
    assert series(registry) == {"r{}": 0, "l{'lag': '1'}": 0.25}
    reading.set(None)
    assert series(registry) == {"l{'lag': '1'}": 0.25}


def test_a_reason_is_the_text_before_the_colon_and_a_counter_gets_the_first_ones() -> None:
    assert short_reason("reward_timeout: after 3 s: x") == "reward_timeout"
    assert (short_reason(": x"), len(short_reason("y" * 1000))) == ("unknown", 60)
    reasons = BoundedLabels(most=2)
    assert [reasons.of(one) for one in ("a: 1", "b: 2", "c: 3", "a: 4", "d" * 100)] == ["a", "b", OTHER, "a", OTHER]
