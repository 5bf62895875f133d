"""Static parts of the pages people read: charts, views and styles, without any dependency and without the network.

`report.html` of a finished run has them inlined; a served page can link the same files. Nothing here knows how a run's
data is read: that is `pipelinerl.local.report_data`.
"""

from __future__ import annotations

from importlib.resources import files


def asset(name: str) -> str:
    """Text of `charts.js`, `views.js`, `page.css` or `report.html`."""
    return (files(__name__) / name).read_text(encoding="utf-8")
