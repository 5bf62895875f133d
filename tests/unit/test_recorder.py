"""Figures of a run, in its files and as metrics: what skipped steps count for, what a broken probe and unanswered problems look
like; lags counted in tokens, spread inside groups, the ledger, streams. The summary out of metrics.jsonl, what the runner adds,
and the closing lines, by hand-computed numbers.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl.bus.protocol import StreamInfo
from pipelinerl.doctor.findings import Finding
from pipelinerl.errors import ServiceError
from pipelinerl.local.ending import Ending, closing_lines, complete_summary, finish
from pipelinerl.local.processes import Launch, ServiceDied
from pipelinerl.messages.sequences import FinishReason, VersionSpan
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_from_data, recipe_yaml
from pipelinerl.rl.accuracy import accuracy_of
from pipelinerl.rl.ledger import Outcome, SequenceTracker, ledger_counts
from pipelinerl.run_dir import RunDir
from pipelinerl.run_summary import RunFiles, lag_summary, read_jsonl, summary_from_metrics
from pipelinerl.telemetry.metrics import OTHER, BoundedLabels, Reading, RunRegistry, short_reason
from pipelinerl.v1 import trainer_pb2
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
    cut = replace(make_sequence(second, 0, completion=(4,)), finish_reason=FinishReason.LENGTH)
    batch = [make_sequence(first, 0, reward=1.0), make_sequence(first, 1, reward=0.0), cut]
    figures = task_figures(batch)
    assert figures == {
        "chain_sum": {"sequences": 2, "reward_mean": 0.5, "completion_tokens_mean": 2.0, "truncated_fraction": 0.0},
        "words": {"sequences": 1, "reward_mean": 1.0, "completion_tokens_mean": 1.0, "truncated_fraction": 1.0},
    }
    exported = Exported()
    exported.step(tasks=figures)
    exported.step(tasks=task_figures(batch[:2]))
    assert [exported("task_reward_mean", task=task) for task in ("chain_sum", "words")] == [0.5, None]


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


def test_a_reason_is_the_text_before_the_colon_and_a_counter_gets_the_first_ones() -> None:
    assert short_reason("reward_timeout: after 3 s: x") == "reward_timeout"
    assert (short_reason(": x"), len(short_reason("y" * 1000))) == ("unknown", 60)
    reasons = BoundedLabels(most=2)
    assert [reasons.of(one) for one in ("a: 1", "b: 2", "c: 3", "a: 4", "d" * 100)] == ["a", "b", OTHER, "a", OTHER]


# The end of a run, as its runner tells it

TRAINER = Launch("trainer", (), {}, Path("log"), Path("address"))


def recipe() -> Recipe:
    return recipe_from_data({"name": "tiny", "model": {"source": "hub", "name": "a/b"}, "task": {}}, "tiny")


def update(version: int, transfer_s: float, stall_s: float) -> dict[str, Any]:
    return {"version": version, "bytes": 10, "transfer_s": transfer_s, "stall_s": stall_s}


def step(number: int, lags: dict[str, int], **more: Any) -> dict[str, Any]:
    sequences = {"issued": 20, "trained": 16, "in_flight": 4}
    common: dict[str, Any] = {"step": number, "policy_version": number, "lag_histogram": lags, "sequences": sequences}
    common |= {"step_s": {"compute": 0.5}, "tokens_computed": 80}
    return {**common, "tokens_trained": sum(lags.values()), "mismatch_kl": 0.25, **more}


def records() -> list[dict[str, Any]]:
    return [
        step(1, {"0": 90, "1": 10}, heldout_accuracy=0.25, tokens_generated=150, ess=0.9, multi_version_fraction=0.5,
             reward_mean=0.125, truncated_fraction=0.0,
             ended_by_length={"64": [3, 1]}, largest_lag=9, step_s={"compute": 1.5}, mfu=0.75,
             weight_update=update(0, 1.0, 0.1), logprob_mismatch=2e-6),
        step(2, {"1": 95, "10": 5}, heldout_accuracy=None, tokens_generated=250, ess=0.7, multi_version_fraction=0.7,
             reward_mean=0.375, truncated_fraction=0.0, ended_by_length={"16": [2, 0], "64": [5, 3]}, largest_lag=7,
             weight_update=update(1, 3.0, 0.3), logprob_mismatch=None),
        step(3, {"2": 50}, heldout_accuracy=0.75, heldout_unanswered=1,
             heldout_accuracy_lower_bound=0.7, tokens_generated=390, ess=None, multi_version_fraction=0.6,
             truncated_fraction=0.36,
             weight_update=None, actor_busy_fraction=0.875, trainer_busy_fraction=0.5,
             mfu=0.25, memory_peak_gib=2.5, idle_s=0.125),
    ]  # fmt: skip


def test_everything_that_the_steps_tell() -> None:
    summary = summary_from_metrics(recipe(), records())
    assert (summary["recipe"], summary["mode"], summary["seed"]) == ("tiny", "pipeline", 0)
    assert (summary["steps"], summary["policy_version"]) == (3, 3)
    assert (summary["heldout_accuracy_first"], summary["heldout_accuracy_last"]) == (0.25, 0.75)
    assert (summary["tokens_generated"], summary["tokens_trained"]) == (390, 250)
    assert summary["sequences"] == {
        "issued": 20, "trained": 16, "dropped_stale": 0, "dropped_filtered": 0, "failed": 0, "in_flight": 4,
    }  # fmt: skip
    # 250 tokens: 90 of lag 0, 105 of 1, 50 of 2, 5 of 10; mean (105 + 100 + 50) / 250; 245 >= 0.95 * 250 = 237.5 at lag 2
    assert summary["lag"] == {"mean": 1.02, "p95": 2.0, "max": 10.0}
    assert summary["largest_lag"] == 7
    assert summary["stale_share_by_length"] == {"16": 0.0, "64": 4 / 12}
    assert summary["ess"] == {"mean": 0.8, "min": 0.7}
    assert summary["weight_updates"] == {
        "count": 2, "bytes": 20, "transfer_s_p50": 2.0, "stall_s_p50": 0.2, "stall_s_p99": 0.298,
    }  # fmt: skip
    # Over compute time: of 2.5 s, and of the 1.5 s and 0.5 s whose utilization is known
    assert (summary["tokens_per_s"], summary["mfu_mean"]) == ({"trained": 100, "computed": 96}, (0.75 * 1.5 + 0.25 * 0.5) / 2)
    assert (summary["memory_peak_gib"], summary["idle_s_mean"]) == (2.5, 0.125)
    assert summary["logprob_mismatch_max"] == 2e-6
    assert summary["sequences_truncated_fraction"] == 0.12, "a third of 0.36"
    assert (summary["mismatch_kl_mean"], summary["actor_busy_fraction"]) == (0.25, 0.875)
    assert summary["trainer_busy_fraction"] == 0.5


def test_reductions_by_hand_and_the_lag_percentile_is_the_smallest_that_95_percent_do_not_exceed() -> None:
    """A skipped step counts for `equal_reward_groups` and `largest_lag` alone; numbers that are not finite never count."""
    told = [
        step(1, {}, ess=0.5, equal_reward_groups=1.0, largest_lag=4, skipped="loss not finite", clipped=True),
        step(2, {}, ess=float("nan"), equal_reward_groups=0.5, largest_lag=9, memory_peak_gib=2.0, clipped=True),
        step(3, {}, ess=0.25, equal_reward_groups=1, largest_lag=None, memory_peak_gib=1.0, idle_s=3.0),
        step(4, {}, ess=0.75, memory_peak_gib=float("inf"), idle_s=1.0, mfu=0.5, step_s=None),
    ]
    summary = summary_from_metrics(recipe(), told)
    assert (summary["ess"], summary["steps_clipped"]) == ({"mean": 0.5, "min": 0.25}, 1)
    assert (summary["steps_equal_rewards"], summary["largest_lag"]) == (2, 9)
    assert (summary["memory_peak_gib"], summary["idle_s_mean"], summary["mfu_mean"]) == (2.0, 2.0, None)
    assert lag_summary({0: 95, 7: 5})["p95"] == 0
    assert lag_summary({0: 94, 7: 6})["p95"] == 7


def test_a_line_cut_short_and_numbers_that_are_no_json(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": NaN}\n[1]\n\n{"step": 2}\n{"step": 3, "lo')
    assert read_jsonl(file) == [{"step": 1, "loss": None}, {"step": 2}]
    assert read_jsonl(tmp_path / "absent") == []


def run_folder(tmp_path: Path, summary: dict[str, Any] | None) -> RunDir:
    run = RunDir(tmp_path, "tiny-run")
    run.recipe.write_text(recipe_yaml(recipe()))
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records()))
    if summary is not None:
        run.summary.write_text(json.dumps(summary))
    return run


def test_the_trainers_summary_is_kept_and_completed(tmp_path: Path) -> None:
    run = run_folder(tmp_path, {"steps": 7, "wall_s": 1.0, "interrupted": True})
    summary = complete_summary(recipe(), run, Ending(12.3456, {"actor-0": 2}))
    assert summary == {"steps": 7, "wall_s": 12.346, "interrupted": True, "restarts": {"actor-0": 2}}


def test_without_one_the_steps_speak_and_the_error_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path, None)
    ending = Ending(3.0, error=ServiceError("trainer died"))
    assert finish(recipe(), run, ending) == 1
    summary = json.loads(run.summary.read_text())
    nothing = summary_from_metrics(recipe(), [])
    assert summary.keys() >= nothing.keys()
    assert [nothing[name] for name in ("mfu_mean", "idle_s_mean", "memory_peak_gib")] == [None] * 3
    assert nothing["tokens_per_s"] == {"trained": None, "computed": None}
    assert (summary["steps"], summary["error"], summary["interrupted"]) == (3, "trainer died", False)
    assert run.report.is_file()
    assert capsys.readouterr().err == "pipelinerl: the run failed: trainer died\n"


def accuracy(value: float) -> dict[str, Any]:
    return {"accuracy": {"value": value, "low": 0.0, "high": 1.0}, "pass_at": {}}


def test_closing_lines(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "report.html").touch()
    run, summary = RunDir(tmp_path, "tiny-run"), summary_from_metrics(recipe(), records())
    lines = closing_lines(summary, run, Ending(75.0))
    text = "\n".join(lines)
    for told in (
        "done after 1m 15s: 3 optimizer steps",
        "train reward       0.250 -> 0.250",
        "held-out accuracy  25.0% -> 75.0%; 70.0% if unanswered problems count as wrong",
        "mean 1.02, p95 2, max 10, predicted max 7; 60.0% of the sequences span several policy versions",
        "trainer            96 tokens/s while it computes, MFU 62.5%",
        "cut short          12.0% of the sequences",
        f"report             {tmp_path}/report.html",
        f"checkpoint         {tmp_path}/checkpoint",
    ):
        assert told in text
    steps = [*records()[:2], records()[2] | {"heldout_sets": {"sums": accuracy(0.9), "words": accuracy(0.6)}}]
    of_sets = closing_lines(summary_from_metrics(recipe(), steps), run, Ending(75.0))
    assert [line for line in of_sets if line not in lines] == ["    sums             90.0%", "    words            60.0%"]
    note, grave = (Finding("x", gravity, "all", "reward.scorer", "check it", meaning="Bad") for gravity in ("note", "grave"))
    assert [line for line in closing_lines(summary, run, Ending(75.0), [grave, note]) if line not in lines] == [
        "  GRAVE              Bad (all); reward.scorer: check it",
        f"  more               pipelinerl doctor {tmp_path}",
    ]
    assert closing_lines(summary, run, Ending(75.0), [note]) == lines
    lost = {"failed": {"engine": 1, "reward_timeout": 1200, "a": 2, "b": 3}, "dropped_filtered": {"equal rewards": 8}}
    told = closing_lines({"sequence_reasons": lost}, run, Ending(1.0))[2:-1]
    assert told[0].startswith("  failed             1,200: reward_timeout (the reward took longer than reward.timeout_s; its")
    assert [line.split()[:3] for line in told[1:3]] == [["failed", "3:", "b"], ["failed", "2:", "a"]]
    assert told[3].startswith("  dropped filtered   8: equal rewards (all answers of the group earned the same")


@pytest.mark.parametrize(
    ("ending", "code", "goes_on"),
    [
        (Ending(1.0), 0, False),
        (Ending(1.0, error=ServiceError("x")), 1, True),
        (Ending(1.0, error=ServiceDied(TRAINER, 1)), 1, True),
        (Ending(1.0, error=ServiceDied(TRAINER, 2)), 2, False),
        (Ending(1.0, interrupted=True), 130, True),
        (Ending(1.0, interrupted=True, error=ServiceError("x")), 130, True),
    ],
)
def test_exit_codes_and_how_a_run_that_ended_early_goes_on(tmp_path: Path, ending: Ending, code: int, goes_on: bool) -> None:
    run = RunDir(tmp_path / "my run", "tiny-run")
    assert ending.exit_code == code
    assert not any("--resume" in line for line in closing_lines({}, run, ending)), "it cannot: it has no name"
    run.path.mkdir()
    run.identity.write_text("{}")
    lines = closing_lines({}, run, ending)
    assert (f"  continue with      pipelinerl run --resume '{run.path}'" in lines) is goes_on


def test_a_run_that_never_began_has_no_figures_to_tell(tmp_path: Path) -> None:
    run, summary = RunDir(tmp_path, "tiny-run"), summary_from_metrics(recipe(), [])
    assert (summary["steps"], summary["policy_version"], summary["heldout"]) == (0, None, [])
    assert (summary["lag"]["mean"], summary["weight_updates"]["stall_s_p50"]) == (None, None)
    lines = closing_lines(summary, run, Ending(24.0, error=ServiceError("x")))
    assert lines == ["", "failed after 24s: 0 optimizer steps"], "a report that could not be written is not named"
