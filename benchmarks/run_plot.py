"""One run as a picture and a table, for the docs.

    python -m benchmarks.run_plot runs/NAME docs/NAME.svg [--csv docs/NAME.csv] [--rows 10]

The picture shows train reward and held-out accuracy, lag and ESS over the run's minutes; the table, on standard output in
Markdown, every so many optimizer steps (with the held-out accuracy known by then); the CSV file, the same columns for each
step.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import table
from pipelinerl.run_summary import read_jsonl

COLUMNS = (
    "step", "time_s", "reward_mean", "heldout_accuracy", "lag_mean", "ess", "grad_norm", "completion_tokens_mean",
    "tokens_trained", "tokens_generated_per_s", "stall_ms", "logprob_mismatch",
)  # fmt: skip
_SMOOTHED_OVER = 5


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of one record of metrics.jsonl; None where it has no value. Pure."""
    stall_s = record.get("stall_s")
    named = {**record, "lag_mean": record["lag"]["mean"], "stall_ms": None if stall_s is None else 1000 * stall_s}
    return {column: _rounded(named.get(column)) for column in COLUMNS}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def latest_known(rows: Sequence[Mapping[str, Any]], column: str) -> list[dict[str, Any]]:
    """The rows with each missing value of `column` taken from the row before. Pure."""
    values: list[Any] = []
    for row in rows:
        values.append(row[column] if row[column] is not None or not values else values[-1])
    return [{**row, column: value} for row, value in zip(rows, values, strict=True)]


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and up to `width` - 1 before it. Pure."""
    windows = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [row["time_s"] / 60 for row in rows]
    figure, (learning, data) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    rewards = [row["reward_mean"] for row in rows]
    learning.plot(minutes, rewards, ".", color="#9ecae1", markersize=4, label="train reward, each step")
    learning.plot(minutes, moving_mean(rewards, _SMOOTHED_OVER), color="#3182bd", label=f"over {_SMOOTHED_OVER} steps")
    judged = [(minute, row["heldout_accuracy"]) for minute, row in zip(minutes, rows, strict=True)]
    judged = [point for point in judged if point[1] is not None]
    learning.plot(*zip(*judged, strict=True), color="#d1495b", marker="o", markersize=4, label="held-out accuracy")
    learning.set_ylim(0, 1)
    learning.legend(frameon=False)
    data.plot(minutes, [row["ess"] for row in rows], color="#2a9d8f", label="ESS")
    data.set_ylim(0, 1.05)
    lag = data.twinx()
    lag.plot(minutes, [row["lag_mean"] for row in rows], color="0.6", label="mean lag, optimizer steps")
    lag.set_ylim(bottom=0)
    data.legend(handles=[*data.get_lines(), *lag.get_lines()], frameon=False, loc="lower right")
    for axis in (learning, data):
        axis.set_xlabel("minutes")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("picture", type=Path, help=".svg or .png to write")
    parser.add_argument("--csv", type=Path, help="file for the figures of each step")
    parser.add_argument("--rows", type=int, default=10, help="optimizer steps between two rows of the table")
    arguments = parser.parse_args()
    rows = [flat(record) for record in read_jsonl(arguments.run / "metrics.jsonl")]
    if not rows:
        parser.error(f"{arguments.run / 'metrics.jsonl'} has no steps")
    plot(rows, arguments.picture)
    if arguments.csv:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    known = latest_known(rows, "heldout_accuracy")
    print(table([row for row in known if row["step"] == 1 or row["step"] % arguments.rows == 0], COLUMNS))


if __name__ == "__main__":
    main()
