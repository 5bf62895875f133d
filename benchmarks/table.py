"""The results in benchmarks/README.md and docs/reliability.md, generated from results/*.json: text and figures cannot differ.

    python -m benchmarks.table

For each benchmark one of them has a line `<!-- result: NAME -->` and, after it, `<!-- end -->`; what stands between them is
replaced. A result file holds its measurements as `rows` (a list of objects) or `cases` (an object of objects); numbers
and texts in them become columns, `COLUMNS` says which. It measures nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
DOCUMENTS = (README, FOLDER.parent / "docs" / "reliability.md")
_BLOCK = re.compile(r"(<!-- result: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_CONDITIONS = ("machine", "device", "cpus", "cores", "threads", "torch", "vllm", "nccl", "load_average_before", "every_steps")

COLUMNS: dict[str, tuple[str, ...]] = {
    "bus": ("payload", "payload_bytes", "ours_per_s", "bare_per_s", "ratio", "goal"),
    "trainer_overhead": (
        "case",
        "ranks",
        "threads_per_rank",
        "learner_tokens_per_s",
        "bare_tokens_per_s",
        "ratio",
        "ratio_best",
        "ratio_cpu_time",
        "goal",
        "by_shared_prompts",
        "by_zero_advantages",
        "by_one_rank",
        "packing_fill",
        "stream_fill",
        "load_before",
    ),
    "trainer_gpu": (
        "model",
        "row_tokens",
        "recomputed",
        "compiled",
        "tokens_per_s",
        "bare_tokens_per_s",
        "ratio",
        "mfu",
        "goal_mfu",
        "bare_mfu",
        "peak_gib",
        "bare_peak_gib",
    ),
    "gpu_runs": (
        "run",
        "weights",
        "steps",
        "heldout_first",
        "heldout_last",
        "lag_mean",
        "ess_mean",
        "mib_per_update",
        "transfer_ms",
        "stall_ms",
        "stall_ms_p99",
        "failed_probes",
        "largest_mismatch",
        "mismatch_kl",
    ),
    "checkpoint": (
        "case",
        "parameters",
        "step_s",
        "blocking_ms",
        "writing_s",
        "restore_s",
        "state_mib",
        "export_mib",
        "ratio",
        "ratio_best",
        "ratio_cpu_time",
        "goal",
        "load_before",
    ),
    "actor_overhead": (
        "case",
        "weights",
        "actor_tokens_per_s",
        "bare_tokens_per_s",
        "bare_without_logprobs_tokens_per_s",
        "ratio",
        "ratio_best",
        "goal",
    ),
    "adapters": (
        "step",
        "tokens",
        "effect_nats",
        "actor",
        "actor_error",
        "trainer",
        "trainer_error",
        "merged",
        "merged_error",
        "actor_by_trainer",
        "actor_by_trainer_error",
    ),
    "prefix_cache": (
        "case",
        "prompt_tokens",
        "prompt_cached",
        "tokens_per_s",
        "uncached_tokens_per_s",
        "ratio",
        "ratio_cpu_time",
    ),
    "episodes": (
        "case",
        "wait_s",
        "turn_s",
        "episodes",
        "decoding",
        "actor_tokens_per_s",
        "bare_tokens_per_s",
        "ratio",
        "goal",
        "ratio_engine_cpu",
        "actor_front_cpu_ms",
        "bare_front_cpu_ms",
        "load_before",
    ),
    "episode_endpoint": (
        "think_s",
        "ours_turn_ms",
        "bare_turn_ms",
        "plain_turn_ms",
        "overhead_ms",
        "overhead_p95_ms",
        "over_plain_ms",
        "goal_ms",
        "ours_front_cpu_ms",
        "bare_front_cpu_ms",
        "plain_front_cpu_ms",
        "ours_engine_cpu_ms",
        "bare_engine_cpu_ms",
        "plain_engine_cpu_ms",
        "load_before",
    ),
    "observing": (
        "case",
        "goal",
        "ratio",
        "ratio_quartiles",
        "ratio_cpu_time",
        "ratio_cpu_time_quartiles",
        "ratio_cpu_time_best",
        "ratio_by_cost",
        "observers_cpu_ms",
        "step_cpu_ms",
        "pairs",
        "load_before",
    ),
    "versus_trl": (
        "recipe",
        "side",
        "accuracy",
        "reached",
        "time_to_accuracy_s",
        "time_interval_s",
        "speed_of_pipeline",
        "speed_interval",
        "step_s",
        "lag_mean",
        "completion_tokens",
        "dropped_stale",
        "saving_s",
        "accuracy_first",
        "accuracy_last",
        "problems",
        "steps",
        "load_before",
    ),
    "pipeline_vs_conventional": (
        "recipe",
        "side",
        "samples_per_s",
        "step_s",
        "lag_mean",
        "lag_max",
        "accuracy",
        "reached",
        "time_to_accuracy_s",
        "time_interval_s",
        "completion_tokens",
        "dropped_stale",
        "actor_busy",
        "trainer_busy",
        "saving_s",
        "accuracy_last",
        "problems",
        "steps",
        "load_before",
    ),
    "pipeline_at_equal_lag": (
        "recipe",
        "largest_lag",
        "pipeline_fastest",
        "conventional_fastest",
        "throughput_ratio",
        "token_ratio",
        "pipeline_soonest",
        "conventional_soonest",
        "time_ratio",
        "time_ratio_interval",
        "seeds",
    ),
    "stale_kv": (
        "recipe",
        "updates",
        "positions",
        "lag",
        "tokens",
        "kept",
        "kept_error",
        "recomputed",
        "recomputed_error",
        "never",
        "never_error",
    ),
    "weight_update": (
        "model",
        "way",
        "updates",
        "copy_ms",
        "goal_ms",
        "stall_p50_ms",
        "stall_p99_ms",
        "gap_p50_ms",
        "gap_p99_ms",
        "step_ms",
        "decoding_tokens_per_s",
        "decoding_during_receive",
        "tokens_lost",
        "receive_ms",
        "prepare_ms",
        "load_before",
    ),
    "virtual_accelerators": (
        "case",
        "g",
        "tokens_per_flash",
        "simulated_tokens_per_flash",
        "measured_by_simulated",
        "closed_form_tokens_per_flash",
        "speed_of_pipeline",
        "simulated_speed_of_pipeline",
        "closed_form_speed_of_pipeline",
        "lag_mean",
        "simulated_lag_mean",
        "lag_max",
        "simulated_lag_max",
        "ess_mean",
        "flashes_to_reward",
        "time_to_reward_by_pipeline",
        "steps",
        "decode_steps_overran",
        "optimizer_steps_overran",
        "load_before",
    ),
    "simulated_runs": (
        "recipe",
        "case",
        "tokens_per_s",
        "simulated_tokens_per_s",
        "measured_by_simulated",
        "lag_mean",
        "simulated_lag_mean",
        "lag_max",
        "simulated_lag_max",
        "trainer_idle",
        "simulated_trainer_idle",
        "dropped_stale",
        "simulated_dropped_stale",
        "decode_step_ms",
        "steps",
        "load_before",
    ),
    "scaling": (
        "case",
        "accelerators",
        "batch",
        "actors",
        "in_progress",
        "tokens_per_s",
        "conventional_tokens_per_s",
        "lag_mean",
        "lag_max",
        "trainer_idle",
        "empty_slots",
        "stale",
        "step_s",
        "control_s",
        "update_s",
    ),
}
"""Columns shown; a benchmark that is not here shows all its numbers and texts."""


def filled(text: str, folder: Path = FOLDER / "results") -> str:
    """`text` with the result of every benchmark that it has a block for."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{result(block[2], folder)}\n\n{block[3]}", text)


def result(name: str, folder: Path) -> str:
    """Markdown of one benchmark's last result."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return f"Not run yet: there is no `results/{name}.json`."
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = measurements(data)
    parts = [table(rows, COLUMNS.get(name) or scalar_columns(rows)), conditions(data)]
    return "\n\n".join(part for part in parts if part)


def measurements(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a result; what the result says once for all of them (`goal`) is repeated in each."""
    shared = {"goal": data["goal"]} if "goal" in data else {}
    if "rows" in data:
        return [{**shared, **row} for row in data["rows"]]
    return [{"case": name, **shared, **case} for name, case in data.get("cases", {}).items()]


def scalar_columns(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return tuple(key for key in keys if all(not isinstance(row.get(key), list | dict) for row in rows))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join(lines + ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows])


def cell(value: Any) -> str:
    """Three digits behind the point for ratios, none for large numbers, a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def conditions(data: Mapping[str, Any]) -> str:
    """Where it was measured, as far as the result says."""
    found = {**{key: data[key] for key in _CONDITIONS if key in data and key != "machine"}, **data.get("machine", {})}
    return (
        "Measured with " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in found.items()) + "." if found else ""
    )


def main() -> None:
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
