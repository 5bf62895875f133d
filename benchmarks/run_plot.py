"""One run as a picture and a table, for the docs.

    python -m benchmarks.run_plot runs/NAME docs/NAME.svg [--csv docs/NAME.csv] [--rows 10]
        [--by step] [--reported guesses guesses_by_halving] [--beside runs/OTHER LABEL]

The picture shows train reward and held-out accuracy, lag and ESS over the run's minutes; the table, on standard output in
Markdown, every so many optimizer steps (with the held-out figures known by then); the CSV file, the same columns for each
step. `--reported`: also means of what rewards and environments report, of training and held out; of the recipe's first task.
`--beside`: the held-out accuracy of another run in the same picture.
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
    "step", "time_s", "reward_mean", "heldout_version", "heldout_accuracy", "lag_mean", "ess", "grad_norm",
    "completion_tokens_mean", "tokens_trained", "tokens_generated_per_s", "stall_ms", "logprob_mismatch",
)  # fmt: skip
HELDOUT = "heldout_"
_SMOOTHED_OVER = 5


def flat(record: Mapping[str, Any], reported: Sequence[str] = ()) -> dict[str, Any]:
    """The columns of one record of metrics.jsonl, and two for each name in `reported`; None where it has no value. Pure."""
    stall_s = record.get("stall_s")
    named = {**record, "lag_mean": record["lag"]["mean"], "stall_ms": None if stall_s is None else 1000 * stall_s}
    row = {column: _rounded(named.get(column)) for column in COLUMNS}
    trained, heldout = _first(record.get("reported")), _first(record.get("heldout_sets")).get("reported", {})
    for name in reported:
        row |= {name: _rounded(trained.get(name)), HELDOUT + name: _rounded(heldout.get(name))}
    return row


def _first(by_task: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return next(iter(by_task.values()), {}) if by_task else {}


def along(rows: Sequence[Mapping[str, Any]], by: str, column: str) -> tuple[list[float], list[Any]]:
    """Steps or minutes, and values of `column`, of the rows that have one; held-out ones at the step that they judge. Pure."""
    step = "heldout_version" if column.startswith(HELDOUT) else "step"
    known = [row for row in rows if row[column] is not None]
    return [row[step] if by == "step" else row["time_s"] / 60 for row in known], [row[column] for row in known]


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


def plot(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    by: str = "minutes",
    reported: Sequence[str] = (),
    beside: tuple[str, Sequence[Mapping[str, Any]]] | None = None,
) -> None:
    """`beside`: a label and the rows of another run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3 if reported else 2, figsize=(15 if reported else 10, 3.6), layout="constrained")
    learning, data, *numbers = axes
    x, rewards = along(rows, by, "reward_mean")
    learning.plot(x, rewards, ".", color="#9ecae1", markersize=4, label="train reward, each step")
    learning.plot(x, moving_mean(rewards, _SMOOTHED_OVER), color="#3182bd", label=f"over {_SMOOTHED_OVER} steps")
    heldout = {"marker": "o", "markersize": 4}
    learning.plot(*along(rows, by, "heldout_accuracy"), color="#d1495b", label="held-out accuracy", **heldout)
    if beside:
        label, others = beside
        judged = along(others, by, "heldout_accuracy")
        learning.plot(*judged, color="#d1495b", linestyle="--", label=f"held-out accuracy, {label}", **heldout)
    learning.set_ylim(0, 1)
    learning.legend(frameon=False)
    data.plot(*along(rows, by, "ess"), color="#2a9d8f", label="ESS")
    data.set_ylim(0, 1.05)
    lag = data.twinx()
    lag.plot(*along(rows, by, "lag_mean"), color="0.6", label="mean lag, optimizer steps")
    lag.set_ylim(bottom=0)
    data.legend(handles=[*data.get_lines(), *lag.get_lines()], frameon=False, loc="lower right")
    for axis in numbers:
        for number, name in enumerate(reported):
            axis.plot(*along(rows, by, name), color=f"C{number}", alpha=0.35)
            axis.plot(*along(rows, by, HELDOUT + name), color=f"C{number}", label=f"{name}, held out", **heldout)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, title="faint: in training")
    for axis in axes:
        axis.set_xlabel("optimizer steps" if by == "step" else by)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def read_rows(run: Path, reported: Sequence[str] = ()) -> list[dict[str, Any]]:
    return [flat(record, reported) for record in read_jsonl(run / "metrics.jsonl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("picture", type=Path, help=".svg or .png to write")
    parser.add_argument("--csv", type=Path, help="file for the figures of each step")
    parser.add_argument("--rows", type=int, default=10, help="optimizer steps between two rows of the table")
    parser.add_argument("--by", choices=["minutes", "step"], default="minutes", help="what the curves are over")
    parser.add_argument("--reported", nargs="*", default=[], metavar="NAME", help="numbers of rewards and environments")
    parser.add_argument("--beside", nargs=2, metavar=("RUN", "LABEL"), help="another run, and what sets it apart")
    arguments = parser.parse_args()
    rows = read_rows(arguments.run, arguments.reported)
    if not rows:
        parser.error(f"{arguments.run / 'metrics.jsonl'} has no steps")
    beside = (arguments.beside[1], read_rows(Path(arguments.beside[0]))) if arguments.beside else None
    plot(rows, arguments.picture, arguments.by, arguments.reported, beside)
    if arguments.csv:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    known = rows
    for column in rows[0]:
        known = latest_known(known, column) if column.startswith(HELDOUT) else known
    print(table([row for row in known if row["step"] == 1 or row["step"] % arguments.rows == 0], list(rows[0])))


if __name__ == "__main__":
    main()
