"""Write the results in benchmarks/README.md and two pages of docs from results/*.json, so that text and figures agree.

    python -m benchmarks.table

What stands between a line `<!-- result: NAME -->` and `<!-- end -->` is replaced by the table of results/NAME.json, and for the
name `summary` by the page of results, with the conditions under which they were measured. A result file holds its measurements
as `rows` (a list of objects) or `cases` (an object of objects). Their numbers and texts become columns, which `COLUMNS` can
limit. This module measures nothing.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
DOCUMENTS = (README, FOLDER.parent / "docs" / "reliability.md", FOLDER.parent / "docs" / "doctor.md")
_BLOCK = re.compile(r"(<!-- result: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_CONDITIONS = ("machine", "device", "cpus", "cores", "threads", "torch", "vllm", "nccl", "load_average_before")
_USUAL: dict[str, Any] = {
    "cores": 2,
    "cpus": 2,
    "engine_threads": 1,
    "device": "cpu",
    "system": "x86_64",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "start": 16,
}
"""Conditions that README.md states once for all results."""
_NAMES = {"load_average_before": "load average (before)", "load_average_after": "load average (after)"}
_BUSY_LOAD = 4.0
"""Load average from which the page of results says how busy the machine was."""

_COLUMNS = {
    "trainer_gpu": (
        "model row_tokens recomputed compiled tokens_per_s bare_tokens_per_s ratio mfu goal_mfu bare_mfu peak_gib bare_peak_gib"
    ),
    "gpu_runs": (
        "run weights steps heldout_first heldout_last lag_mean ess_mean mib_per_update transfer_ms stall_ms stall_ms_p99 "
        "failed_probes largest_mismatch"
    ),
    "weight_log": (
        "case changed delta_mb share bare_share encode_s_per_gb bare_encode_s_per_gb encode_ratio decode_s_per_gb "
        "bare_decode_s_per_gb decode_ratio sha256_s_per_gb"
    ),
    "versus_trl": (
        "recipe side accuracy reached time_to_accuracy_s time_interval_s speed_of_pipeline speed_interval step_s lag_mean "
        "completion_tokens accuracy_first accuracy_last steps"
    ),
    "pipeline_vs_conventional": (
        "recipe side samples_per_s step_s lag_mean lag_max accuracy time_to_accuracy_s time_interval_s completion_tokens "
        "actor_busy trainer_busy"
    ),
    "pipeline_at_equal_lag": (
        "recipe largest_lag pipeline_fastest conventional_fastest throughput_ratio token_ratio pipeline_soonest "
        "conventional_soonest time_ratio time_ratio_interval seeds"
    ),
    "stale_kv": "recipe updates positions lag tokens kept kept_error recomputed recomputed_error never never_error",
    "weight_update": (
        "model way updates copy_ms goal_ms stall_p50_ms stall_p99_ms gap_p50_ms gap_p99_ms step_ms "
        "decoding_during_receive tokens_lost receive_ms prepare_ms"
    ),
    "far_actor": (
        "case max_lag lag_max steps step_s near_tokens_per_s near_tokens_per_cpu_s near_stall_ms near_ratio far_tokens_per_s "
        "join_s join_mb far_versions mb_per_version s_per_version reward_first_half reward_second_half"
    ),
    "weight_bandwidth": "model megabytes chunk_megabytes rounds bare_mb_per_s alone_mb_per_s ratio goal into_engine_mb_per_s",
    "virtual_accelerators": (
        "case g tokens_per_flash simulated_tokens_per_flash measured_by_simulated speed_of_pipeline "
        "simulated_speed_of_pipeline lag_mean simulated_lag_mean lag_max ess_mean time_to_reward_by_pipeline steps"
    ),
    "simulated_runs": (
        "recipe case tokens_per_s simulated_tokens_per_s measured_by_simulated lag_mean simulated_lag_mean lag_max "
        "simulated_lag_max trainer_idle simulated_trainer_idle decode_step_ms"
    ),
    "scaling": (
        "case accelerators batch actors in_progress tokens_per_s conventional_tokens_per_s lag_mean lag_max trainer_idle "
        "step_s control_s update_s"
    ),
}
COLUMNS: dict[str, tuple[str, ...]] = {name: tuple(columns.split()) for name, columns in _COLUMNS.items()}
"""Columns of the table of a benchmark. A benchmark that is missing here shows all its numbers and texts."""

ROWS: dict[str, dict[str, set[Any]]] = {
    "fault_matrix": {"signal": {"SIGKILL", "SIGTERM"}},
    "membership": {"members": {1, 8, 64}},
    "pipeline_vs_conventional": {
        "side": {
            "pipeline",
            "pipeline-7-h128",
            "conventional-1-h256",
            "conventional-4-h256",
            "conventional-8-h256",
            "conventional-12-h512",
        }
    },
    "recovery": {"times": {"default"}, "phase": {"joining", "receiving", "staged", "serving"}},
    "scaling": {"accelerators": {128, 4096}},
    "stale_kv": {"positions": {"all", "192-"}},
    "trainer_gpu": {"row_tokens": {8192}},
}
"""Rows of long results that the page shows, by the values of columns. The result file has all rows."""

WITHOUT_TABLE = {
    "actor_overhead",
    "adapters",
    "audit",
    "bus",
    "checkpoint",
    "completion_lengths",
    "episode_endpoint",
    "episodes",
    "observing",
    "prefix_cache",
    "rank_orders",
    "sandbox",
    "trainer_memory",
    "trainer_overhead",
}
"""Benchmarks without a section: the page of results has their figures, with a link to the result file."""


@dataclass(frozen=True)
class Figure:
    """One line of the page of results. A goal is a number, or the name of the column that has it."""

    benchmark: str
    compared: str
    """The quantity and what it is compared with."""
    where: Mapping[str, Any]
    """Values that select the row."""
    column: str = "ratio"
    unit: str = "×"
    interval: str = ""
    """Column with the interval of the figure."""
    at_least: float | str | None = None
    at_most: float | str | None = None
    file: str = ""
    """Name of the result file, if it is not that of the benchmark."""

    def line(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return the line in Markdown. Raises `ValueError` unless exactly one row has the values of `where`."""
        (row,) = (row for row in rows if all(row.get(key) == value for key, value in self.where.items()))
        value = row[self.column]
        interval = f" ({row[self.interval]})" if self.interval else ""
        least, most = (row[goal] if isinstance(goal, str) else goal for goal in (self.at_least, self.at_most))
        goals = [f"{sign} {number(goal, self.unit)}" for sign, goal in (("≥", least), ("≤", most)) if goal is not None]
        met = (least is None or value >= least) and (most is None or value <= most)
        verdict = ("yes" if met else "**no**") if goals else "-"
        target = f"results/{self.benchmark}.json" if self.benchmark in WITHOUT_TABLE else f"#{self.benchmark}"
        cells = (f"[{self.benchmark}]({target})", self.compared, number(value, self.unit) + interval, ", ".join(goals) or "-")
        return "| " + " | ".join((*cells, verdict)) + " |"


def number(value: float, unit: str) -> str:
    """Return a ratio with two decimals, a share with three, or milliseconds with three significant digits."""
    if unit == "ms":
        return f"{value:.3g} ms"
    return f"{value:.2f}×" if unit == "×" else f"{value:.3f}"


SUMMARY = (
    Figure(
        "versus_trl",
        "time to a held-out accuracy of 0.85, `repeated-addition`: TRL's divided by ours",
        {"recipe": "repeated-addition", "side": "trl-continuous-m8"},
        "speed_of_pipeline",
        interval="speed_interval",
        at_least=4.0,
    ),
    Figure(
        "versus_trl",
        "time to 0.9, `arithmetic`: TRL's divided by ours",
        {"recipe": "arithmetic", "side": "trl"},
        "speed_of_pipeline",
        interval="speed_interval",
        at_least=1.2,
    ),
    Figure(
        "pipeline_vs_conventional",
        "time to 0.85, `repeated-addition`, both modes with lags up to 7: conventional mode's divided by the pipeline's",
        {"recipe": "repeated-addition", "largest_lag": 7},
        "time_ratio",
        interval="time_ratio_interval",
        file="pipeline_at_equal_lag",
    ),
    Figure(
        "pipeline_vs_conventional",
        "the same for `arithmetic`, time to 0.9",
        {"recipe": "arithmetic", "largest_lag": 7},
        "time_ratio",
        interval="time_ratio_interval",
        file="pipeline_at_equal_lag",
    ),
    Figure(
        "pipeline_vs_conventional",
        "sequences per second, best settings, `repeated-addition`, lags up to 7: pipeline's divided by conventional mode's",
        {"recipe": "repeated-addition", "largest_lag": 7},
        "throughput_ratio",
        file="pipeline_at_equal_lag",
    ),
    Figure(
        "pipeline_vs_conventional",
        "the same for `arithmetic`",
        {"recipe": "arithmetic", "largest_lag": 7},
        "throughput_ratio",
        file="pipeline_at_equal_lag",
    ),
    Figure(
        "virtual_accelerators",
        "throughput in trained tokens, pipeline against conventional mode at the same mean lag; times are modelled",
        {"case": "conventional, same mean lag"},
        "speed_of_pipeline",
    ),
    Figure(
        "virtual_accelerators",
        "the same comparison at the same largest lag; times are modelled",
        {"case": "conventional, same largest lag"},
        "speed_of_pipeline",
    ),
    Figure(
        "simulated_runs",
        "throughput of a run of `arithmetic` against the simulator's",
        {"recipe": "arithmetic", "case": "pipeline"},
        "measured_by_simulated",
        at_least=0.9,
        at_most=1.1,
    ),
    Figure("trainer_overhead", "learner against a bare torch loop, 1M parameters", {"case": "tiny"}, at_least="goal"),
    Figure("trainer_overhead", "the same with 135M parameters", {"case": "smollm2"}, at_least="goal"),
    Figure("trainer_overhead", "the same on two ranks, 1M parameters", {"case": "tiny-2-ranks"}, at_least="goal"),
    Figure(
        "trainer_overhead",
        "two ranks of one thread against one rank of two threads, 1M parameters",
        {"case": "tiny-2-ranks"},
        "by_one_rank",
    ),
    Figure(
        "trainer_overhead",
        "learner whose groups share a prompt against the bare loop, 1M parameters",
        {"case": "tiny"},
        "by_shared_prompts",
    ),
    Figure(
        "trainer_overhead", "the same if a fourth of the groups also have equal rewards", {"case": "tiny"}, "by_zero_advantages"
    ),
    Figure(
        "rank_orders",
        "share of a 7B step in which 64 ranks wait for orders and figures of rank 0, 16M tokens; extrapolated from 4 processes",
        {"way": "ranks"},
        "share_of_step",
        "",
        at_most="goal",
    ),
    Figure(
        "rank_orders",
        "the same if rank 0 computed all figures and sent all batches between the steps",
        {"way": "rank 0"},
        "share_of_step",
        "",
    ),
    Figure(
        "trainer_gpu",
        "learner's MFU on an H200, 1.5B parameters, compiled, rows of 8,192 tokens",
        {"model": "Qwen2 1.5B", "row_tokens": 8192, "compiled": True},
        "mfu",
        "",
        at_least="goal_mfu",
    ),
    Figure(
        "trainer_memory",
        "peak memory of log-probabilities and loss against direct computation, bfloat16",
        {"part": "head", "way": "ours", "dtype": "bfloat16"},
        at_most="goal",
    ),
    Figure(
        "trainer_memory",
        "peak memory of half of Qwen2.5-0.5B's layers with gradient checkpointing against that without, bfloat16",
        {"part": "layers", "way": "checkpointed", "dtype": "bfloat16"},
    ),
    Figure("checkpoint", "time of 20 steps without a checkpoint against 20 steps with one", {"case": "tiny"}, at_least="goal"),
    Figure("actor_overhead", "actor against bare vLLM, 1M parameters", {"case": "tiny"}, at_least="goal"),
    Figure("actor_overhead", "the same with 135M parameters", {"case": "smollm2"}, at_least="goal"),
    Figure("bus", "sequences of 1 KB against bare nats-py", {"payload": "1 KB"}, at_least="goal"),
    Figure("bus", "sequences of 256 KB against bare nats-py", {"payload": "256 KB"}, at_least="goal"),
    Figure(
        "weight_update",
        "generation's stall for an update in flight, 135M parameters; the goal is three memory copies + 25 ms",
        {"model": "135m", "way": "in flight"},
        "stall_p50_ms",
        "ms",
        at_most="goal_ms",
    ),
    Figure(
        "weight_update",
        "decoding while weights arrive against undisturbed decoding, 135M parameters",
        {"model": "135m", "way": "in flight"},
        "decoding_during_receive",
        at_least=0.6,
    ),
    Figure(
        "weight_update",
        "speed of a weight transfer against a bare Gloo broadcast, 135M parameters",
        {"model": "135m"},
        at_least="goal",
        file="weight_bandwidth",
    ),
    Figure(
        "weight_update",
        "speed of a weight transfer to seven actors over links of 200 Mbit/s against a bare Gloo broadcast to one",
        {"model": "7 actors"},
        at_least="goal",
        file="weight_bandwidth",
    ),
    Figure(
        "weight_log",
        "a delta's bytes against those of the weights, bfloat16, 135M parameters, Adam at 1e-6, step 6",
        {"case": "step 6"},
        "share",
        "",
        at_most="goal_share",
    ),
    Figure(
        "weight_log",
        "encoding this delta against bare zstd on the same bytes",
        {"case": "step 6"},
        "encode_ratio",
        at_most="goal_ratio",
    ),
    Figure(
        "weight_log",
        "decoding it against bare zstd on the same bytes",
        {"case": "step 6"},
        "decode_ratio",
        at_most="goal_ratio",
    ),
    Figure(
        "weight_log",
        "bytes that the trainer sends while 16 actors join at once from the log in NATS, divided by those of a version",
        {"way": "nats"},
        "sent_by_version",
        "",
        at_most="goal",
        file="weight_log_joins",
    ),
    Figure(
        "weight_log",
        "a swap's stall with the log against that with Gloo, same engine, 135M parameters",
        {"model": "135m"},
        at_most="goal",
        file="weight_log_swaps",
    ),
    Figure(
        "membership",
        "copies of the weights that leave the trainer when 16 actors join at once; 16 if each had its own side group",
        {"newcomers": 16},
        "copies",
        at_most=1.25,
    ),
    Figure(
        "far_actor",
        "largest lag of a run in which one of two actors is behind a link of 20 Mbit/s; its limit is 4",
        {"case": "20 Mbit/s"},
        "lag_max",
        "",
        at_most="max_lag",
    ),
    Figure(
        "far_actor",
        "the near actor's tokens per CPU second with this link against those with an unlimited link",
        {"case": "20 Mbit/s"},
        "near_ratio",
        at_least=0.95,
    ),
    Figure(
        "prefix_cache",
        "sampling with a shared prompt of 256 tokens against sampling without the prefix cache, 135M parameters",
        {"case": "smollm2", "prompt_tokens": 256},
    ),
    Figure(
        "prefix_cache",
        "the same for conversations of four turns with prompts of 64 tokens",
        {"case": "smollm2", "prompt_tokens": 64, "turns": 4},
    ),
    Figure(
        "episodes",
        "actor whose environments take 1 s a turn against bare vLLM without waiting, 1M parameters",
        {"case": "tiny", "wait_s": 1.0},
        at_least="goal",
    ),
    Figure("episodes", "the same with 135M parameters", {"case": "smollm2", "wait_s": 1.0}, at_least="goal"),
    Figure("episodes", "the same with 0.1 s a turn, 1M parameters", {"case": "tiny", "wait_s": 0.1}, at_least="goal"),
    Figure(
        "episode_endpoint",
        "a turn's time minus that of vLLM's OpenAI server, 64 requests always open",
        {"think_s": 0.0},
        "overhead_ms",
        "ms",
        at_most="goal_ms",
    ),
    Figure(
        "episode_endpoint",
        "the same with pauses of 0.5 s between the turns of a conversation",
        {"think_s": 0.5},
        "overhead_ms",
        "ms",
        at_most="goal_ms",
    ),
    Figure("sandbox", "programs in bubblewrap against a bare subprocess", {"means": "bubblewrap"}, at_least="goal"),
    Figure("sandbox", "programs under Landlock against a bare subprocess", {"means": "landlock"}, at_least="goal"),
    Figure(
        "observing", "training with metrics and an open page against training without", {"case": "trainer"}, at_least="goal"
    ),
    Figure("observing", "decoding with metrics against decoding without", {"case": "actor"}, at_least="goal"),
    Figure(
        "adapters",
        "share of a LoRA update's effect that remains in a bfloat16 actor after 10 steps at 1e-5",
        {"step": 10},
        "actor",
        "",
    ),
    Figure("adapters", "the same with adapters merged into bfloat16 weights", {"step": 10}, "merged", ""),
    Figure(
        "audit",
        "microseconds per sequence of `pipelinerl audit`, one million sequences",
        {"sequences": 1_000_000},
        "audit_us",
        "",
    ),
    Figure("audit", "the same for one thousand sequences", {"sequences": 1_000}, "audit_us", ""),
    Figure(
        "completion_lengths",
        "longest completion divided by the mean, `repeated-addition`, trained policy",
        {"policy": "after training"},
        "longest_by_mean",
    ),
)
"""The page of results, in its order."""


def filled(text: str, folder: Path = FOLDER / "results") -> str:
    """Return `text` with the newest result in every block."""
    return _BLOCK.sub(lambda block: f"{block[1]}{result(block[2], folder)}\n{block[3]}", text)


def result(name: str, folder: Path) -> str:
    """Return one benchmark's newest result in Markdown, or the page of results for the name `summary`."""
    if name == "summary":
        lines = (figure.line(measurements(_read(figure.file or figure.benchmark, folder))) for figure in SUMMARY)
        table_of_all = "\n".join(("| benchmark | what is compared | result | goal | met |", "|---" * 5 + "|", *lines))
        return f"{table_of_all}\n\n{conditions(folder)}"
    if not (folder / f"{name}.json").is_file():
        return f"Not run yet: there is no `results/{name}.json`."
    rows = measurements(_read(name, folder))
    rows = [row for row in rows if all(row[column] in shown for column, shown in ROWS.get(name, {}).items())]
    return table(rows, COLUMNS.get(name) or scalar_columns(rows))


def _read(name: str, folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return data


def measurements(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a result. A `goal` that the result states once is repeated in each row."""
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
    """Format a value: three digits behind the point below 10, none from 1,000 on, and a dash if there is no value."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def conditions(folder: Path) -> str:
    """Return a sentence with the conditions of all results, as far as they differ from those that README.md states."""
    named = []
    for path in sorted(folder.glob("*.json")):
        data = _read(path.stem, folder)
        found = {**{key: data[key] for key in _CONDITIONS if key in data and key != "machine"}, **data.get("machine", {})}
        unusual = [f"{_NAMES.get(key, key)} {cell(value)}" for key, value in found.items() if not usual(key, value)]
        named += [f"`{path.stem}`: {', '.join(unusual)}"] if unusual else []
    return textwrap.fill(f"Other conditions: {'; '.join(named)}.", 160, break_on_hyphens=False)


def usual(condition: str, value: Any) -> bool:
    if condition.startswith("load_average"):
        return isinstance(value, int | float) and value < _BUSY_LOAD
    return _USUAL.get(condition) == value


def main() -> None:
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
