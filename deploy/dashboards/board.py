"""A dashboard: sections of panels, the variables that choose data source, namespace and run, and links to the others.

Everything that Grafana would number or date by itself is fixed, so that the same code gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as choices

from deploy.dashboards.panels import DATASOURCE, Panel, built

TAG = "pipelinerl"
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


def json_text(board: Board) -> str:
    """The dashboard as Grafana takes it."""
    builder = dashboard.Dashboard(f"PipelineRL / {board.title}").uid(board.uid).description(board.about).tags([TAG])
    builder.editable().refresh("30s").time("now-3h", "now").timezone("browser").version(1)
    builder.tooltip(choices.DashboardCursorSync.CROSSHAIR).link(_link_to_others())
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


def _link_to_others() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("PipelineRL").type(choices.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(False).include_vars(True).keep_time(True)


def _variables(board: Board) -> Iterator[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    namespace = _query_variable("namespace", f"label_values({KNOWN_BY}, namespace)")
    everything = choices.VariableOption(selected=True, text="All", value="$__all")
    yield namespace.label("Namespace").multi(True).include_all(True).all_value(".*").current(everything)
    run = _query_variable("run", f'label_values({KNOWN_BY}{{namespace=~"$namespace"}}, run)').label("Run")
    if board.several_runs:
        run.multi(True).include_all(True).all_value(".*").current(everything)
    yield run


def _query_variable(name: str, query: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).datasource(DATASOURCE).query({"query": query, "refId": name})
    return variable.refresh(choices.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(choices.VariableSort.ALPHABETICAL_ASC)
