"""How benchmarks sum up what they measured, and draw it; the measuring itself is not tested."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import episode_endpoint, episodes, trainer_memory
from benchmarks.audit import keep_ledger, measure
from benchmarks.decode_trace import DecodeTrace, Step, median_step, rate_in, stall_before, step_times, tokens_in
from benchmarks.freshness_dashboard import PICTURE, RECORDING, answered, bucket_names, draw, rows
from benchmarks.peak_memory import measured, resident_bytes
from benchmarks.recovery import Recovery, row
from benchmarks.result_files import kept_cases, kept_rows, write_result
from benchmarks.run_plot import along, flat
from benchmarks.samples import paired_ratio, percentile
from deploy.dashboards.freshness import FRESHNESS
from deploy.dashboards.panels import Panel, Query
from pipelinerl.rl.ledger import LedgerCounts

STEPS = [Step(1.0, 10, "1:0"), Step(2.0, 10, "1:0"), Step(3.0, 10, "1:0"), Step(5.5, 10, "1:1"), Step(6.5, 20, "1:1")]
"""One step a second, and 1.5 s in which a swap let nothing run."""


def test_a_percentile_is_the_nearest_measured_value_and_a_ratio_that_of_neighbouring_rounds() -> None:
    """A disturbance that hits both sides of a round leaves the ratio alone."""
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.0
    assert percentile([float(n) for n in range(1, 101)], 99) == 99.0
    assert percentile([float(n) for n in range(1, 11)], 99) == 10.0
    assert percentile([7.0], 0) == 7.0
    assert paired_ratio([2.0, 20.0, 2.0], [4.0, 40.0, 1.0]) == 0.5


def test_an_actor_with_episodes_is_compared_with_the_bare_rounds_beside_it() -> None:
    bare = [episodes.Round(rate, 0.002, 0.009, 64) for rate in (100.0, 100.0, 200.0, 50.0, 150.0, 100.0, 100.0)]
    actor = [episodes.Round(90.0, 0.004, 0.01, 48), episodes.Round(130.0, 0.005, 0.01, 32)]  # the first and the fourth round
    row = episodes.row_of(episodes.LOADS["tiny"], 0, actor, bare)
    assert (row["ratio"], row["bare_tokens_per_s"], row["decoding"]) == (pytest.approx((0.9 + 1.3) / 2), 100.0, 0.625)
    assert (row["actor_front_cpu_ms"], row["bare_front_cpu_ms"], row["ratio_engine_cpu"]) == (4.5, 2.0, 0.9)


def test_an_endpoint_costs_what_a_turn_takes_longer_in_the_round_beside_it() -> None:
    def rounds(*turns_s: float) -> list[episode_endpoint.Round]:
        return [episode_endpoint.Round([turn_s, turn_s, 3 * turn_s], 0.5, 0.003, 0.006) for turn_s in turns_s]

    row = episode_endpoint.row_of(
        0.5, {"ours": rounds(0.1, 0.2, 0.3), "bare": rounds(0.1, 0.19, 0.27), "plain": rounds(0, 0, 0)}
    )
    assert (row["overhead_ms"], row["overhead_p95_ms"], row["over_plain_ms"]) == (10.0, 30.0, 200.0)
    assert (row["ours_turn_ms"], row["ours_front_cpu_ms"], row["ours_turns_per_s"]) == (200.0, 1.0, 6.0)


def test_tokens_of_a_window_count_steps_by_the_part_within_it() -> None:
    assert tokens_in(STEPS, [(1.0, 3.0)]) == pytest.approx(20)
    assert tokens_in(STEPS, [(1.5, 2.0), (6.0, 6.5)]) == pytest.approx(5 + 10)
    assert rate_in(STEPS, [(1.0, 3.0), (5.5, 6.5)]) == pytest.approx((20 + 20) / 3)


def test_a_stall_is_what_the_gap_exceeds_a_step_by() -> None:
    quiet = [(0.5, 3.2), (5.0, 7.0)]
    assert step_times(STEPS, quiet) == [1.0, 1.0, 1.0]
    assert median_step(STEPS, quiet) == 1.0
    assert stall_before(STEPS, "1:1", 1.0) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="no step of version 1:0"):
        stall_before(STEPS, "1:0", 1.0)


@dataclass
class ScriptedCore:
    """vLLM's client to the engine, as far as it is watched."""

    waiting: list[SimpleNamespace] = field(default_factory=list)

    async def get_output_async(self) -> SimpleNamespace:
        return self.waiting.pop(0)


async def test_a_trace_notes_the_steps_that_an_engine_reports_and_nothing_else() -> None:
    step = SimpleNamespace(new_token_ids=[4, 5])
    answer_to_a_call = SimpleNamespace(outputs=[], timestamp=1.0, weight_version=None)
    core = ScriptedCore([answer_to_a_call, SimpleNamespace(outputs=[step, step], timestamp=2.0, weight_version="1:7")])
    trace = DecodeTrace()
    trace.watch(core)
    waiting = asyncio.create_task(trace.until_version("1:7", 1, timeout_s=10))
    for _ in range(2):
        await core.get_output_async()
    await waiting
    assert trace.steps == [Step(2.0, 4, "1:7")]


def test_a_row_of_the_recovery_table_has_medians_and_maxima() -> None:
    measured = [Recovery(1.0, 2.0, 0.001, 1), Recovery(3.0, 4.0, 0.002, 2), Recovery(2.0, 9.0, 0.009, 1)]
    made = row("staged", "freezes", "short", measured)
    assert (made["served_s"], made["served_max_s"], made["trainer_s"], made["trainer_max_s"]) == (2.0, 3.0, 4.0, 9.0)
    assert (made["pause_ms"], made["pause_max_ms"], made["meetings"], made["repeats"]) == (2.0, 9.0, 2, 3)


def test_a_result_keeps_what_was_not_measured_this_time(tmp_path: Path) -> None:
    path = tmp_path / "results" / "speed.json"
    assert (kept_rows(path, "model", []), kept_cases(path, ["tiny"])) == ([], {})
    rows = [{"model": "1m", "ratio": 0.1}, {"model": "1b", "ratio": 0.2}]
    write_result(path, {"rows": rows, "cases": {"tiny": {"ratio": 1}, "gone": {}}})
    assert kept_rows(path, "model", ["1b"]) == rows[:1]
    assert kept_cases(path, ["tiny", "large"]) == {"tiny": {"ratio": 1}}


def test_resident_memory_is_read_in_bytes() -> None:
    status = "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n"
    assert (resident_bytes("VmHWM", status), resident_bytes("VmRSS", status)) == (2 * 2**20, 2**20)
    with pytest.raises(ValueError, match="no VmSwap"):
        resident_bytes("VmSwap", status)


def test_a_peak_is_of_one_computation_and_holds_what_it_freed() -> None:
    """64 MiB that are written and freed show; 128 MiB before them do not."""
    torch.ones(128 * 2**18)
    found = measured(lambda: torch.ones(64 * 2**18).sum(), torch.device("cpu"))
    assert 60 < found.peak_mib < 100


def test_gradients_of_the_head_are_counted_by_their_dtype() -> None:
    """(151,936 words + 1,024 tokens) x 896 numbers."""
    mebi = 152_960 * 896 / 2**20
    assert trainer_memory.gradients_mib("head", torch.float32, 1024) == 4 * mebi
    assert trainer_memory.gradients_mib("head", torch.bfloat16, 1024) == 2 * mebi


def test_every_sequence_of_the_audits_made_up_run_ends_and_its_row_has_every_figure() -> None:
    # 2,000 in steps of 128: 15 whole ones with 2 failed (the 1st and the 65th), and one of 80 with 2.
    assert keep_ledger(2_000).counts == LedgerCounts(issued=2_000, trained=1_968, failed=32)
    row = measure(2_000, rounds=1)
    assert row["sequences"] == 2_000
    assert all(row[name] > 0 for name in ("ledger_us", "books_us", "audit_us", "journal_bytes", "audit_bytes"))


class Answering:
    """Stands for a Prometheus: one series, whatever is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def query_range(self, expression: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        self.asked.append(f"{expression} from {start_s} to {end_s} by {step_s}")
        return [{"metric": {"actor": "a"}, "values": [[100.0, "0.123456"], [110.0, "2"]]}]


def panel(width: int = 8) -> Panel:
    queries = (Query('rate(x{run=~"$run", namespace=~"$namespace"}[$window])', "{{actor}} {{gone}}"),)
    return Panel("t", "s", "g", "b", queries, width=width)


def test_a_panel_is_asked_as_grafana_would_and_kept_on_a_grid_of_times() -> None:
    server = Answering()
    curves = answered(panel(), server, 100.0, 5.0, 4)  # type: ignore[arg-type]
    assert server.asked == ['rate(x{run=~".*", namespace=~".*"}[8s]) from 100.0 to 115.0 by 5.0']
    assert curves == [{"legend": "a", "values": [0.1235, None, 2.0, None]}]


def test_panels_fill_rows_of_24_cells() -> None:
    laid_out = list(rows([panel(24), panel(12), panel(12), panel(8), panel(8), panel(8), panel(8)]))
    assert [[one.width for one in row] for row in laid_out] == [[24], [12, 12], [8, 8, 8], [8]]


def test_buckets_are_called_by_the_lags_they_hold() -> None:
    assert bucket_names(["0.0", "1.0", "2.0", "4.0", "+Inf"]) == ["0", "1", "2", "3–4", "5+"]


def test_the_recording_has_every_panel_and_makes_a_picture(tmp_path: Path) -> None:
    recording = json.loads(RECORDING.read_text(encoding="utf-8"))
    assert list(recording["panels"]) == [one.title for one in FRESHNESS.panels]
    assert all(recording["panels"].values())
    draw(recording, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000
    assert PICTURE.exists()


def test_a_curve_has_what_a_run_reported_and_held_out_figures_at_the_step_that_they_judge() -> None:
    record = {"step": 5, "time_s": 60.0, "lag": {"mean": 1.0}, "reported": {"guess": {"guesses": 7.0}}}
    sets = {"guess": {"reported": {"guesses": 6.5}}}
    judging = {**record, "step": 6, "heldout_version": 4, "heldout_accuracy": 0.25, "heldout_sets": sets}
    rows = [flat(record, ["guesses"]), flat(judging, ["guesses"])]
    assert along(rows, "step", "guesses") == ([5, 6], [7.0, 7.0])
    assert along(rows, "step", "heldout_guesses") == ([4], [6.5])
    assert along(rows, "minutes", "heldout_accuracy") == ([1.0], [0.25])
