"""`python -m tests.chart.renew_snapshots`: takes what the chart renders now as what it should render. Read the difference."""

from __future__ import annotations

from tests.chart.cases import CASES
from tests.chart.rendering import rendered_text
from tests.chart.test_render import SNAPSHOTS, without_passwords


def main() -> None:
    SNAPSHOTS.mkdir(exist_ok=True)
    for name in ("default", "cpu"):
        text = without_passwords(rendered_text(CASES[name].values, CASES[name].files))
        (SNAPSHOTS / f"{name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
