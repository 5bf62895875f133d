"""The tables of figures in docs/run-directory.md, generated from `pipelinerl.figures`.

python -m deploy.tools.figures_reference                          # print them
python -m deploy.tools.figures_reference docs/run-directory.md    # replace the text between each table's two marks
"""

from __future__ import annotations

from collections import defaultdict

from deploy.tools.generated import GeneratedPart, row
from pipelinerl.figures import FIGURES, RUN_FIGURES, Figure, Reduction

_HEAD = "| key | meaning |\n|---|---|"
_WORDS: dict[Reduction, str] = {
    "sum": "sum of `{key}` over the steps",
    "ones": "number of steps whose `{key}` is 1 (true counts as 1)",
    "last": "`{key}` of the last step",
    "smallest": "smallest `{key}` of a step",
    "largest": "largest `{key}` of a step",
    "mean": "mean of `{key}` over the steps",
    "rate": "sum of `{key}` divided by the sum of `{weight}`",
}


def of_steps() -> str:
    """Return the table of metrics.jsonl."""
    return "\n".join([_HEAD, *(row((f"`{figure.key}`", figure.text)) for figure in FIGURES)])


def of_the_run() -> str:
    """Return the table of the keys of summary.json that follow from figures; the parts of an object share a row."""
    rows: dict[str, list[str]] = defaultdict(list)
    for key, (reduction, figure) in RUN_FIGURES.items():
        outer, _, inner = key.partition(".")
        rows[outer].append((f"`{inner}`: " if inner else "") + _meaning(reduction, figure))
    return "\n".join([_HEAD, *(row((f"`{key}`", "; ".join(meanings))) for key, meanings in rows.items())])


def _meaning(reduction: Reduction, figure: Figure) -> str:
    weighted = f", weighted by `{figure.weight}`" if figure.weight and reduction == "mean" else ""
    applied = ", without skipped steps" if figure.trained else ""
    return _WORDS[reduction].format(key=figure.key, weight=figure.weight) + weighted + applied


_COMMAND = "python -m deploy.tools.figures_reference docs/run-directory.md"
PARTS = (GeneratedPart("figures of a step", _COMMAND, of_steps), GeneratedPart("figures of the run", _COMMAND, of_the_run))

if __name__ == "__main__":
    for part in PARTS:
        part.main()
