"""Figures of a run: what skipped steps count for, what a broken probe and unanswered problems look like."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pipelinerl.messages.sequences import FinishReason, VersionSpan
from pipelinerl.rl.accuracy import accuracy_of
from pipelinerl.rl.ledger import ledger_counts
from pipelinerl.run_summary import RunFiles
from pipelinerl.v1.actor_pb2 import ActorState
from services.trainer.data.evaluation import HeldoutResult, Parity
from services.trainer.learn.batch import TrainingGroup
from services.trainer.reporting.metrics import TrainerMetrics
from services.trainer.reporting.page import PageBoard
from services.trainer.reporting.recorder import Recorder
from services.trainer.reporting.samples import MOST_WITH_TOKENS, has_tokens
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
    """An episode of 3 sampled and 2 observed tokens in two turns, and a branch of one; beside a sequence of 2 tokens. Each
    reports numbers, of which samples and records tell."""
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
    shares = [0.3] * 5 + [0.1] + [0.3] * 6
    for loss, cut in (("gspo", True), ("reinforce", False)):
        with RunFiles(tmp_path / loss) as files:
            desk = Desk(tmp_path / loss, files, algorithm={"loss": loss, "max_lag": 4})
            told = [desk.step(clip_fraction=share)["clip_range_cut"] for share in shares]
            assert told == [None] * 9 + ([pytest.approx(0.28)] * 3 if cut else [None] * 3)
    (warning,) = (record.message for record in caplog.records)
    assert warning.startswith("algorithm.clip_low = 0.0003: together with algorithm.clip_high (0.0004) it clips 28% of the")
    assert "widen algorithm.clip_low and algorithm.clip_high, or lower algorithm.max_lag" in warning


def test_a_run_of_skipped_steps_only_has_no_shares(desk: Desk) -> None:
    desk.step("gradient not finite")
    summary = desk.summary()
    assert (summary["tokens_trained"], summary["sequences_multi_version_fraction"]) == (0, None)
    assert summary["ess"] == {"mean": None, "min": None}


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
    assert desk.step()["heldout_unanswered"] is None
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
    assert desk.of("heldout_set_accuracy_ratio", set="chain_sum") == 0.75
    assert desk.of("heldout_set_pass_ratio", set="chain_sum") == 1.0
    assert sets["chain_sum"]["reported"] == {"answer": 0.75, "turns": 2.5}
    assert desk.of("heldout_set_reported_mean", set="chain_sum", figure="turns") == 2.5
    assert (record["heldout_accuracy_lower_bound"], desk.of("heldout_accuracy_lower_bound_ratio")) == (0.5, 0.5)
    assert (summary["heldout_tokens"], summary["commits_held_s"]) == (30, 1.5)
    assert desk.of("heldout_unanswered_problems") == 4
    assert (desk.of("heldout_tokens_total"), desk.of("commits_held_seconds_total")) == (30, 1.5)


def test_throughput_is_exported_and_summed_up(desk: Desk) -> None:
    desk.step()
    desk.step("loss not finite")
    assert desk.of("mfu_ratio") == 0.4
    assert desk.of("imbalance_ratio") == 0.05
    assert desk.of("memory_peak_bytes") == 1.5 * 2**30
    assert (desk.of("tokens_per_second", tokens="computed"), desk.of("tokens_per_second", tokens="trained")) == (100, 0)
    assert desk.of("compute_phase_seconds_sum", phase="forward_backward") == pytest.approx(0.14)
    assert desk.of("update_idle_seconds_sum") == pytest.approx(0.04)
    summary = desk.summary()
    # 8 and 0 of 10 and 10 tokens trained in 0.1 s each
    assert summary["tokens_per_s"] == {"trained": pytest.approx(40), "computed": pytest.approx(100)}
    assert (summary["mfu_mean"], summary["idle_s_mean"]) == (pytest.approx(0.4), pytest.approx(0.02))
    assert summary["memory_peak_gib"] == 1.5


def test_tokens_are_written_of_at_most_about_500_steps() -> None:
    for steps in (1, 3, 500, 501, 1234, 100_000):
        with_tokens = [step for step in range(steps + 1) if has_tokens(step, steps)]
        assert (with_tokens[0], with_tokens[-1]) == (0, steps)
        assert len(with_tokens) <= MOST_WITH_TOKENS + 3
        assert steps > 500 or len(with_tokens) == steps + 1


def test_the_page_gets_the_tokens_that_a_long_runs_file_leaves_out(tmp_path: Path) -> None:
    board, tokenizer = PageBoard(), letters_tokenizer()
    recipe = make_recipe(trainer={"steps": 1000, "batch_size": 4})
    with RunFiles(tmp_path) as files:
        recorder = Recorder(recipe, files, TrainerMetrics(CollectorRegistry()), board=board, tokenizer=tokenizer)
        for version in (2, 3):
            problem = replace(make_sequence(make_group(), 0, completion=(0, 1), version=version), completion_text="ab")
            recorder.heldout(HeldoutResult(version, accuracy_at(1.0, 1.0, 0), 3, (problem,)))
    written = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [one["tokens"] for one in written] == [["a", "b"], None]
    assert [one["tokens"] for one in board._samples] == [["a", "b"]] * 2


@pytest.mark.parametrize("wanted", [True, False])
def test_trackers_get_samples_unless_the_recipe_says_otherwise(tmp_path: Path, wanted: bool) -> None:
    tracked, recipe = Tracked(), make_recipe(tracker_samples=wanted)
    answer = replace(make_sequence(make_group(), 0), prompt_text="12+7=", completion_text="19")
    with RunFiles(tmp_path) as files:
        trackers = RunTrackers([tracked])  # type: ignore[list-item]
        recorder = Recorder(recipe, files, TrainerMetrics(CollectorRegistry()), trackers=trackers)
        recorder.heldout(HeldoutResult(0, accuracy_at(1.0, 1.0, 0), 2, (answer,)))
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == len(tracked.points) == 1
    sent = [(axis, at, [(row["problem"], row["completion"]) for row in rows]) for axis, at, rows in tracked.tables]
    assert sent == ([("heldout/version", 0, [("12+7=", "19")])] if wanted else [])


async def test_the_page_says_why_a_run_does_not_learn(desk: Desk) -> None:
    board = PageBoard()
    desk.recorder = Recorder(make_recipe(), desk.recorder._files, TrainerMetrics(CollectorRegistry()), board=board)
    desk.recorder.watch(lambda: run_view(version=0))
    for _ in range(3):
        desk.step(skipped="loss not finite")
    publishing = asyncio.create_task(desk.recorder.publish_state())
    async with asyncio.timeout(120):
        while not (found := json.loads(board.history())["state"].get("findings")):
            await asyncio.sleep(0.01)
    publishing.cancel()
    told = [(one["gravity"], one["id"], one["evidence"]) for one in found]
    assert told[0] == ("grave", "steps-skipped", "3 of 3 steps, the first at step 1")


def test_joins_are_in_the_next_record_and_in_the_summary(desk: Desk) -> None:
    desk.recorder.joined("actor-1", UpdateRecord(3, round_trip_s=0.5))
    desk.recorder.joined("actor-2", UpdateRecord(4, round_trip_s=1.5))
    record = desk.step()
    told = [(one["actor"], one["version"], one["join_s"]) for one in record["joins"]]
    assert told == [("actor-1", 3, 0.5), ("actor-2", 4, 1.5)]
    assert desk.step()["joins"] == []
    assert desk.summary()["membership"] == {"joins": 2, "join_s_p50": 1.0, "evictions": 0}
    assert desk.of("join_seconds_count") == 2


def test_each_arrival_and_departure_of_an_actor_is_logged(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    desk.recorder.watch(run_view)
    member = Member("actor-1", "p")
    for change in (
        MemberChange("joined", member, 4, 3),
        MemberChange("left", member, 4, 3, "its pod is being deleted"),
        MemberChange("evicted", member, 4, 3, "the deadline passed", EvictionCause.DEADLINE),
    ):
        desk.recorder.member_changed(change)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "actor actor-1 joined and serves version 3; actors that serve the newest version: 1"),
        ("INFO", "actor actor-1 left: its pod is being deleted; actors that serve the newest version: 0"),
        ("WARNING", "actor actor-1 was evicted from epoch 4: the deadline passed; actors that serve the newest version: 0"),
    ]
    assert desk.registry.get_sample_value("pipelinerl_trainer_evictions_total", {"reason": "deadline"}) == 1


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
