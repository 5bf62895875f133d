"""Static files of the run's pages, which load nothing from the network. `report.html` of a run inlines them. The trainer serves
`live.html`, which links them. `data` selects the data that the pages show.
"""

from __future__ import annotations

from importlib.resources import files

LIVE_ASSETS = ("page.css", "charts.js", "flow.js", "samples.js", "views.js", "live.js")
"""Files that live.html loads, in this order."""
REPORT_SCRIPTS = ("charts.js", "flow.js", "samples.js", "views.js", "report.js")
"""Scripts inlined in report.html of a run."""
COMPARISON_SCRIPTS = ("charts.js", "samples.js", "views.js", "comparison.js")


def asset(name: str) -> str:
    """Return the text of a file of this package, such as `charts.js`, `page.css` or `live.html`."""
    return (files(__name__) / name).read_text(encoding="utf-8")
