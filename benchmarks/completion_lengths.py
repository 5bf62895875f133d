"""How long a run's completions are before and after training, and how many are right: a histogram, and a row for each policy.

    python -m benchmarks.completion_lengths runs/NAME [--problems 1024]

The initial model, out of the cache, and the run's last policy complete held-out problems, each once, at the temperature of the
run's sampling (`saved_policies.py`). These are all completions: a run leaves out of its training what is dropped as stale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.result_files import kept_rows, write_result
from benchmarks.saved_policies import PolicyJudge, heldout_problems, load_tokenizer
from benchmarks.saved_runs import initial_policy
from benchmarks.table import table
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.run_dir import RunDir

NAME = "completion_lengths"
RESULTS = Path(__file__).parent / "results"
_BIN_TOKENS = 16


def figures(lengths: NDArray[np.int64], right: NDArray[np.bool_], max_tokens: int) -> dict[str, Any]:
    """Of completions [P]; lengths in tokens, the end token included. `cut`: how many reached `max_tokens`."""
    mean, longest = float(lengths.mean()), int(lengths.max())
    percentiles = {f"p{percent}": round(float(np.percentile(lengths, percent))) for percent in (50, 90, 99)}
    shape = {"longest": longest, "longest_by_mean": round(longest / mean, 2), "cut": int((lengths >= max_tokens).sum())}
    return {"accuracy": round(float(right.mean()), 4), "mean": round(mean, 2), **percentiles, **shape}


def plot(lengths: dict[str, NDArray[np.int64]], rows: list[dict[str, Any]], path: Path) -> None:
    """One histogram for each policy, in the order of `rows`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(rows), figsize=(10, 3.2), sharex=True, sharey=True, layout="constrained")
    edges = range(0, max(int(of_policy.max()) for of_policy in lengths.values()) + _BIN_TOKENS, _BIN_TOKENS)
    for axis, row in zip(axes, rows, strict=True):
        axis.hist(lengths[row["policy"]], bins=edges, color="#3182bd", log=True)
        axis.axvline(row["mean"], color="#d1495b", label=f"mean {row['mean']:.0f}, longest {row['longest']}")
        axis.set_title(f"{row['policy']}: {row['accuracy']:.0%} right")
        axis.set_xlabel("tokens of a completion")
        axis.legend(frameon=False)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel(f"completions per {_BIN_TOKENS} tokens")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a run that has ended")
    parser.add_argument("--problems", type=int, default=1024, help="held-out problems, one completion of each")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.run / "recipe.yaml")
    as_sampled = recipe.evaluation.model_copy(update={"temperature": recipe.sampling.temperature})
    initial = initial_policy(recipe)
    tokenizer = load_tokenizer(initial)
    problems = heldout_problems(recipe, arguments.problems, [recipe.seed], tokenizer)
    judge = PolicyJudge(recipe.model_copy(update={"evaluation": as_sampled}), problems, tokenizer)
    lengths, rows = {}, []
    for policy, folder in (("before training", initial), ("after training", RunDir(arguments.run, "").checkpoint)):
        completions = judge.completions(folder)
        lengths[policy] = np.array([len(completion) for completion in completions])
        row = figures(lengths[policy], judge.are_right(completions), recipe.sampling.max_tokens)
        rows.append({"recipe": recipe.name, "policy": policy, **row, "problems": arguments.problems})
        print(policy, file=sys.stderr, flush=True)
    print(table(rows, list(rows[0])))
    path = arguments.output / f"{NAME}.json"
    write_result(path, {"benchmark": NAME, "rows": [*kept_rows(path, "recipe", [recipe.name]), *rows]})
    plot(lengths, rows, arguments.output / f"{NAME}_{recipe.name}.svg")


if __name__ == "__main__":
    main()
