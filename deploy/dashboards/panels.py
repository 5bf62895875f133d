"""What a panel is, and how it becomes Grafana's. A panel cannot be made without saying what good and what bad look like.

It knows nothing of where on the dashboard it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as choices
from grafana_foundation_sdk.models import heatmap as heatmap_choices
from grafana_foundation_sdk.models.dashboard import DataSourceRef
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
SHORTEST_INTERVAL = "15s"
"""Of two points. Prometheus' scrape interval where the data source has none set."""

Builder = timeseries.Panel | stat.Panel | heatmap.Panel
Kind = Literal["lines", "stacked", "number", "name", "heatmap"]


@dataclass(frozen=True)
class Query:
    """`legend`: a template of labels, as `{{run}}`."""

    expr: str
    legend: str = "{{run}}"


@dataclass(frozen=True)
class Panel:
    """`shows`, `good` and `bad` are its description. `unit`: one of Grafana's ids; `none` for versions and steps, whose
    last digit counts, `locale` for counts of sequences. `low`, `high`: ends of the value axis.

    `width` and `height` are in cells of Grafana's grid, which is 24 wide.
    """

    title: str
    shows: str
    good: str
    bad: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "lines"
    width: int = 8
    height: int = 8
    low: float | None = None
    high: float | None = None
    log_scale: bool = field(default=False, kw_only=True)

    @property
    def description(self) -> str:
        """Markdown."""
        return f"{self.shows}\n\n**Good:** {self.good}\n\n**Bad:** {self.bad}"


def built(panel: Panel, number: int) -> Builder:
    """Grafana's panel; `number`: its id, unique on its dashboard."""
    kinds: dict[Kind, Callable[[Panel], Builder]] = {
        "lines": _lines,
        "stacked": _stacked,
        "number": _number,
        "name": _name,
        "heatmap": _heatmap,
    }
    builder = kinds[panel.kind](panel)
    builder.id(number).title(panel.title).description(panel.description).datasource(DATASOURCE)
    builder.unit(panel.unit).interval(SHORTEST_INTERVAL).span(panel.width).height(panel.height)
    if panel.low is not None:
        builder.min(panel.low)
    if panel.high is not None:
        builder.max(panel.high)
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        builder.with_target(_target(panel, query, letter))
    return builder


def _target(panel: Panel, query: Query, letter: str) -> prometheus.Dataquery:
    of_heatmap = panel.kind == "heatmap"
    legend = query.legend.replace("{{run}}", "{{namespace}} {{run}}")  # without a namespace the blank is not shown
    target = prometheus.Dataquery().ref_id(letter).datasource(DATASOURCE).expr(query.expr).legend_format(legend)
    target.format(PromQueryFormat.HEATMAP if of_heatmap else PromQueryFormat.TIME_SERIES)
    return target.instant() if panel.kind in ("number", "name") else target.range()


def _lines(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).display_mode(choices.LegendDisplayMode.LIST)
    legend.placement(choices.LegendPlacement.BOTTOM).calcs([])
    builder = timeseries.Panel().line_width(1.5).fill_opacity(0).show_points(choices.VisibilityMode.AUTO)
    builder.span_nulls(True).legend(legend)
    if panel.log_scale:
        builder.scale_distribution(common.ScaleDistributionConfig().type(choices.ScaleDistribution.LOG).log(10))
    tooltip = common.VizTooltipOptions().mode(choices.TooltipDisplayMode.MULTI).sort(choices.SortOrder.DESCENDING)
    return builder.tooltip(tooltip)


def _stacked(panel: Panel) -> timeseries.Panel:
    return _lines(panel).fill_opacity(40).stacking(common.StackingConfig().mode(choices.StackingMode.NORMAL))


def _number(_panel: Panel) -> stat.Panel:
    builder = stat.Panel().graph_mode(choices.BigValueGraphMode.NONE).color_mode(choices.BigValueColorMode.VALUE)
    return builder.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _name(panel: Panel) -> stat.Panel:
    """Of the series whose value is 1: its legend."""
    return _number(panel).text_mode(choices.BigValueTextMode.NAME)


def _heatmap(_panel: Panel) -> heatmap.Panel:
    color = heatmap.HeatmapColorOptions().mode(heatmap_choices.HeatmapColorMode.SCHEME).scheme("Viridis").steps(64)
    axis = heatmap.YAxisConfig().axis_placement(choices.AxisPlacement.LEFT).unit("short")
    builder = heatmap.Panel().calculate(False).color(color).y_axis(axis).cell_gap(1).show_legend()
    rows = heatmap.RowsHeatmapOptions().layout(choices.HeatmapCellLayout.LE)
    builder.show_tooltip().show_y_histogram().show_value(choices.VisibilityMode.NEVER)
    return builder.rows_frame(rows).filter_values(heatmap.FilterValueRange().le(1e-9))
