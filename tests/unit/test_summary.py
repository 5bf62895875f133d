"""The summary out of metrics.jsonl, what the runner adds, and the closing lines, by hand-computed numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.doctor.findings import Finding
from pipelinerl.errors import ServiceError
from pipelinerl.local.ending import Ending, closing_lines, complete_summary, finish
from pipelinerl.local.processes import Launch, ServiceDied
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_from_data, recipe_yaml
from pipelinerl.run_dir import RunDir
from pipelinerl.run_summary import lag_summary, read_jsonl, summary_from_metrics

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


def test_evaluations_skipped_steps_and_joins_are_counted_from_the_steps() -> None:
    joins = [{"actor": "actor-1", "version": 1, "join_s": 0.5}, {"actor": "actor-2", "version": 1, "join_s": 1.5}]
    told = [
        step(1, {}, skipped="loss not finite", clipped=True, parity_failures=0, heldout_accuracy=0.5, heldout_version=0,
             heldout_unanswered=2, heldout_accuracy_lower_bound=0.25, joins=joins),
        step(2, {"0": 4}, skipped="", clipped=True, parity_failures=3, heldout_tokens=70, commits_held_s=1.5),
        step(3, {"0": 4}, skipped="", clipped=False, parity_failures=1),
    ]  # fmt: skip
    summary = summary_from_metrics(recipe(), told)
    assert (summary["steps_skipped"], summary["steps_clipped"], summary["parity_failures"]) == (1, 1, 4)
    assert (summary["heldout_tokens"], summary["commits_held_s"]) == (70, 1.5)
    assert summary["sequence_reasons"] is None, "the steps do not tell"
    assert summary["heldout"] == [{"version": 0, "accuracy": 0.5, "unanswered": 2, "lower_bound": 0.25, "sets": None}]
    assert summary["membership"] == {"joins": 2, "join_s_p50": 1.0, "evictions": None}


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
        "held-out accuracy  25.0% -> 75.0%; 70.0% if unanswered problems count as wrong",
        "mean 1.02, p95 2, max 10, predicted max 7; 60.0% of the sequences span several policy versions",
        "trainer            96 tokens/s while it computes, MFU 62.5%",
        "cut short          12.0% of the sequences",
        f"report             {tmp_path}/report.html",
        f"checkpoint         {tmp_path}/checkpoint",
    ):
        assert told in text
    graded = [
        step(n, {"0": 4}, reward_mean=n / 16, heldout_accuracy=0.0,
             heldout_sets={"sums": accuracy(0.0) | {"reported": {"answer": n / 32, "format": 1.0}}})
        for n in range(1, 17)
    ]  # fmt: skip
    # (1 + 2 + 3 + 4 + 5) / 5 / 16 and (12 + 13 + 14 + 15 + 16) / 5 / 16
    assert closing_lines(summary_from_metrics(recipe(), graded), run, Ending(75.0))[2:4] == [
        "  train reward       0.188 -> 0.875",
        "  held-out accuracy  0.0% -> 0.0%; mean reward 0.031 -> 0.500",
    ]
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
    assert [line.partition(":")[2] for line in told[1:3]] == [" b", " a"]
    assert told[3].startswith("  dropped filtered   8: equal rewards (all answers of the group earned the same")


@pytest.mark.parametrize(
    ("code", "how"), [(3, "exited with code 3"), (-9, "was killed by SIGKILL"), (-35, "was killed by signal 35")]
)
def test_a_service_that_died_is_told_with_its_signal_if_that_has_a_name(code: int, how: str) -> None:
    assert str(ServiceDied(TRAINER, code)).startswith(f"{TRAINER.name} {how}; end of ")


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
