"""The panels that the dashboards are made of, on the typed builders of the Grafana Foundation SDK.

Every panel has a title, a unit and a description; colours mean the same on every dashboard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

Panel = timeseries.Panel | stat.Panel | heatmap.Panel
# The datasource that provisioning/datasources makes.
DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="millrace-prometheus")
# Grafana since 10.3 reads it and later ones bring it up to date; the builder's 42 is newer than some Grafanas in use.
SCHEMA = 39
# Grafana's grid is 24 columns wide.
GRAPH_COLUMNS, GRAPH_ROWS = 12, 8
NUMBER_COLUMNS, NUMBER_ROWS = 4, 4
GOOD, WARN, BAD, PLAIN = "green", "orange", "red", "text"

STAGE_COLOURS = {
    "read": "blue", "upload": "purple", "decode": "yellow", "compute": "green", "encode": "dark-yellow",
    "download": "orange", "write": "red",
}  # fmt: skip
STATE_COLOURS = {
    "queued": "yellow", "planning": "light-blue", "running": "blue", "publishing": "purple",
    "succeeded": "green", "failed": "red", "cancelled": "#808080",
}  # fmt: skip


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and the name of each of its series (Grafana puts labels between double braces)."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Steps:
    """Where a value changes colour: the colour below all steps, then (value, colour) in rising order."""

    base: str
    steps: tuple[tuple[float, str], ...] = ()

    def build(self) -> dashboard.ThresholdsConfig:
        listed = [models.Threshold(color=self.base, value=None)]
        listed += [models.Threshold(color=colour, value=value) for value, colour in self.steps]
        return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(listed)


def _target(number: int, query: Query) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .datasource(DATASOURCE)
        .editor_mode(prometheus_models.QueryEditorMode.CODE)
        .expr(query.expr)
        .legend_format(query.legend)
        .ref_id(chr(ord("A") + number))
    )


def _coloured(colour: str) -> list[models.DynamicConfigValue]:
    return [models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})]


def graph(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    thresholds: Steps | None = None,
    colours: Mapping[str, str] | None = None,
    stacked: bool = False,
    logarithmic: bool = False,
    listed: bool = False,
    highest: float | None = None,
    columns: int = GRAPH_COLUMNS,
) -> timeseries.Panel:
    """Lines over time from zero up; `thresholds` are drawn as dashed lines, `stacked` series as areas on each other.

    `logarithmic`, for series that are orders of magnitude apart, has no zero: the queries leave zeros out.
    `listed`, for a line for each worker: the legend is a table beside the lines, the largest first; the queries choose
    the top ten.
    """
    legend = common.VizLegendOptions().show_legend(True)
    if listed:
        legend.display_mode(common_models.LegendDisplayMode.TABLE).placement(common_models.LegendPlacement.RIGHT)
        legend.calcs(["lastNotNull"]).sort_by("Last *").sort_desc(True)
    else:
        legend.display_mode(common_models.LegendDisplayMode.LIST).placement(common_models.LegendPlacement.BOTTOM)
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(columns)
        .height(GRAPH_ROWS)
        .line_width(1)
        .fill_opacity(40 if stacked else 8)
        .show_points(common_models.VisibilityMode.AUTO)
        .legend(legend)
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    if logarithmic:
        panel.scale_distribution(common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10))
    else:
        panel.min(0)
    if highest is not None:
        panel.max(highest)
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if thresholds is not None:
        panel.thresholds(thresholds.build())
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED))
    for series, colour in (colours or {}).items():
        panel.override_by_name(series, _coloured(colour))
    for number, query in enumerate(queries):
        panel.with_target(_target(number, query))
    return panel


def number(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    thresholds: Steps | None = None,
    by_name: bool = False,
    columns: int = NUMBER_COLUMNS,
) -> stat.Panel:
    """The newest value, large, in its threshold's colour. `by_name`: the legend instead, for what is all in a label."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(columns)
        .height(NUMBER_ROWS)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.NONE if by_name else common_models.BigValueGraphMode.AREA)
        .text_mode(common_models.BigValueTextMode.NAME if by_name else common_models.BigValueTextMode.AUTO)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds((thresholds or Steps(PLAIN)).build())
        .with_target(_target(0, query))
    )


def spread(title: str, description: str, unit: str, query: Query, *, columns: int = GRAPH_COLUMNS) -> heatmap.Panel:
    """How a histogram's observations are spread over its buckets; the query yields rates of buckets, by le."""
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(columns)
        .height(GRAPH_ROWS)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .with_target(_target(0, query).format(prometheus_models.PromQueryFormat.HEATMAP))
    )


def choice(name: str, label: str, description: str, metric: str, of: str) -> dashboard.QueryVariable:
    """A list at the top of a dashboard: the values of a metric's label; all of them unless some are chosen."""
    values = f"label_values({metric}, {of})"
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .definition(values)
        .query({"query": values, "refId": f"choice-{name}"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def dashboard_of(uid: str, title: str, description: str, *, refresh: str = "15s") -> dashboard.Dashboard:
    """An empty dashboard, linked to the others by their common tag."""
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["millrace"])
        .readonly()
        .refresh(refresh)
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Millrace")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["millrace"])
            .keep_time(True)
        )
    )


def assembled(board: dashboard.Dashboard, rows: Mapping[str, Sequence[Panel]]) -> models.Dashboard:
    """The dashboard with these panels under the titles of their rows. Links to a panel hold while its place holds."""
    identity = 0
    for title, panels in rows.items():
        identity += 100
        board.with_row(dashboard.Row(title).id(identity))
        for place, panel in enumerate(panels, 1):
            board.with_panel(panel.id(identity + place))
    made = board.build()
    made.schema_version = SCHEMA
    for link in made.links or []:
        link.placement = None  # in sight; the builder's only other choice is a menu
    return made
