"""A dashboard: sections of panels, the variables that choose data source, namespace, run and window, and links to the others.

Everything that Grafana would number or date by itself is fixed, so that the same code gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as choices

from deploy.dashboards.panels import DATASOURCE, Panel, built

TAG = "pipelinerl"
WINDOW_VARIABLE, WINDOWS = "window", ("1m", "5m", "15m", "1h")
"""Of rates and means (`queries.WINDOW`), the second one unless chosen."""
KNOWN_BY = "pipelinerl_trainer_phase"
"""Metric that is there from the trainer's start, whose labels are the namespaces and runs to choose from."""


@dataclass(frozen=True)
class Section:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """`name`: of its file. `several_runs`: its panels tell runs apart, so that more than one may be chosen."""

    name: str
    title: str
    about: str
    sections: tuple[Section, ...]
    several_runs: bool = False

    @property
    def uid(self) -> str:
        return f"pipelinerl-{self.name.replace('_', '-')}"

    @property
    def panels(self) -> Iterator[Panel]:
        for section in self.sections:
            yield from section.panels


def json_text(board: Board, boards: Iterable[Board]) -> str:
    """The dashboard as Grafana takes it, with links to the others of `boards`."""
    builder = dashboard.Dashboard(f"PipelineRL / {board.title}").uid(board.uid).description(board.about).tags([TAG])
    builder.editable().refresh("30s").time("now-3h", "now").timezone("browser").version(1)
    builder.tooltip(choices.DashboardCursorSync.CROSSHAIR)
    for other in boards:
        if other.name != board.name:
            builder.link(_link(board, other))
    for variable in _variables(board):
        builder.with_variable(variable)
    number = 0
    for section in board.sections:
        number += 1
        builder.with_row(dashboard.Row(section.title).id(number))
        for panel in section.panels:
            number += 1
            builder.with_panel(built(panel, number))
    return json.dumps(builder.build(), cls=JSONEncoder, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def _link(board: Board, other: Board) -> dashboard.DashboardLink:
    """Takes along what is chosen; not several runs, or all of them, to a dashboard that shows one."""
    names = ["datasource", "namespace", WINDOW_VARIABLE]
    if other.several_runs or not board.several_runs:
        names.append("run")
    chosen = "&".join(f"${{{name}:queryparam}}" for name in names)
    link = dashboard.DashboardLink(other.title).type(choices.DashboardLinkType.LINK).tooltip(other.about)
    return link.url(f"/d/{other.uid}?{chosen}").icon("dashboard").keep_time(True)


def _variables(board: Board) -> Iterator[dashboard.DatasourceVariable | dashboard.QueryVariable | dashboard.IntervalVariable]:
    yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    namespace = _query_variable("namespace", f"label_values({KNOWN_BY}, namespace)")
    everything = choices.VariableOption(selected=True, text="All", value="$__all")
    yield namespace.label("Namespace").multi(True).include_all(True).all_value(".*").current(everything)
    run = _query_variable("run", f'label_values({KNOWN_BY}{{namespace=~"$namespace"}}, run)').label("Run")
    if board.several_runs:
        run.multi(True).include_all(True).all_value(".*").current(everything)
    else:
        run.sort(choices.VariableSort.ALPHABETICAL_DESC)  # names that end with a date or number: the newest is chosen first
    yield run
    window = dashboard.IntervalVariable(WINDOW_VARIABLE).label("Window of rates").values(",".join(WINDOWS))
    options = [choices.VariableOption(selected=value == WINDOWS[1], text=value, value=value) for value in WINDOWS]
    yield window.options(options).current(options[1])


def _query_variable(name: str, query: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).datasource(DATASOURCE).query({"query": query, "refId": name})
    return variable.refresh(choices.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(choices.VariableSort.ALPHABETICAL_ASC)
