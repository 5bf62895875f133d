"""Static parts of the pages people read: charts, views and styles, without any dependency and without the network.

`report.html` of a finished run has them inlined; the trainer serves `live.html`, which links the same files. Nothing here
knows how a run's data is read: `data.py` says what of it the pages show.
"""

from __future__ import annotations

from importlib.resources import files

LIVE_ASSETS = ("page.css", "charts.js", "flow.js", "samples.js", "views.js", "live.js")
"""What live.html loads, in this order."""
REPORT_SCRIPTS = ("charts.js", "flow.js", "samples.js", "views.js", "report.js")
"""What report.html has in it."""


def asset(name: str) -> str:
    """Text of a file of this package: `charts.js`, `page.css`, `live.html`."""
    return (files(__name__) / name).read_text(encoding="utf-8")
