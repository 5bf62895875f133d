"""The five dashboards, in the order in which one looks at them, and the list of all their panels in docs/dashboards.md."""

from __future__ import annotations

from deploy.dashboards.board import Board
from deploy.dashboards.freshness import FRESHNESS
from deploy.dashboards.pipeline import PIPELINE
from deploy.dashboards.run import RUN
from deploy.dashboards.verifier import VERIFIER
from deploy.dashboards.weight_updates import WEIGHT_UPDATES
from deploy.tools.generated import GeneratedPart, row

BOARDS = (RUN, FRESHNESS, PIPELINE, WEIGHT_UPDATES, VERIFIER)
_HEAD = (row(("panel", "shows", "good", "bad")), "|---|---|---|---|")


def _list(board: Board) -> str:
    rows = (row((panel.title, panel.shows, panel.good, panel.bad)) for panel in board.panels)
    return "\n\n".join((f"### {board.title}", board.about, "\n".join((*_HEAD, *rows))))


PANELS = GeneratedPart("panels", "python -m deploy.dashboards", lambda: "\n\n".join(map(_list, BOARDS)))
