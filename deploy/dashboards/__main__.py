"""`python -m deploy.dashboards`: writes the dashboards into the chart and the list of their panels into docs/dashboards.md."""

from __future__ import annotations

from pathlib import Path

from deploy.dashboards.all import BOARDS, PANELS
from deploy.dashboards.board import json_text

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "helm" / "dashboards"
PAGE = ROOT / "docs" / "dashboards.md"


def main() -> None:
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(json_text(board, BOARDS), encoding="utf-8")
    PAGE.write_text(PANELS.replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
