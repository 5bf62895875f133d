"""`python -m deploy.dashboards`: write the dashboards into the chart."""

from __future__ import annotations

from pathlib import Path

from deploy.dashboards.all import BOARDS
from deploy.dashboards.board import json_text

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "helm" / "dashboards"


def main() -> None:
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(json_text(board, BOARDS), encoding="utf-8")


if __name__ == "__main__":
    main()
