"""What rare and new ids cost a run, shown: use of the tables, traffic, metrics by frequency of the target id.

Reads the keys `tables`, `traffic` and `slices` of metrics.json; what is not there is left out.
"""

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from recsys import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

MOST_BARS = 20
"""Tables in the picture; more lines than these cannot be read."""

# From left to right: ids that are known well, ids that share, ids that are not known, no id.
_RANGE_COLORS = {
    "hot": report._COLORS[0],
    "cold": report._COLORS[1],
    "unknown": report._COLORS[5],
    "missing": report._COLORS[7],
}
_SPLIT_COLORS = (report._COLORS[0], report._COLORS[5], report._COLORS[2], report._COLORS[3])
_SLICE_METRICS = ("auc", "logloss", "calibration")
_X_LABEL = "how often the target id occurred in training"


class TextTable(NamedTuple):
    """A table as text, before it is drawn.

    Attributes:
        title: What it shows, with the meaning of its columns.
        head: Titles of the columns.
        rows: One text per column.
        texts: Titles of the columns that hold text; the others hold numbers.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[str]


def text_tables(final: Mapping[str, Any]) -> list[TextTable]:
    """The tables that can be filled, none of them empty.

    Args:
        final: Content of metrics.json.
    """
    found = [_usage_table(final.get("tables", {})), _traffic_table(final), _slice_table(final.get("slices", {}))]
    return [table for table in found if table.rows]


def print_tables(final: Mapping[str, Any], console: "Console | None" = None) -> None:
    """Print the tables to a terminal.

    Args:
        final: Content of metrics.json.
        console: Where to; None means standard output.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    for table in text_tables(final):
        drawn = Table(title=table.title, title_justify="left")
        for title in table.head:
            drawn.add_column(title, justify="left" if title in table.texts else "right")
        for row in table.rows:
            drawn.add_row(*map(Text, row))  # brackets in a name are not markup
        console.print(drawn)


def html_fragment(final: Mapping[str, Any], run_dir: Path) -> str:
    """Picture and tables for the page of a run, styled by the page; empty where there is nothing to show.

    Args:
        final: Content of metrics.json.
        run_dir: Where cold.png is written; one that was left there by another report is removed.
    """
    figure = draw(final)
    picture = report._picture(run_dir, "cold", figure, "metrics.json")
    parts = [picture] if figure is not None else []
    for table in text_tables(final):
        rows = [[html.escape(cell) for cell in row] for row in table.rows]
        parts.append(f'<p class="dim">{html.escape(table.title)}</p>\n')
        parts.append(report._table(table.head, rows, texts=table.texts))
    return "".join(parts)


def draw(final: Mapping[str, Any]) -> "Figure | None":
    """AUC by frequency of the target id on the left, traffic of each table on the right.

    Args:
        final: Content of metrics.json.

    Returns:
        One panel where the other has nothing to show; None where neither has.
    """
    from matplotlib.figure import Figure  # not pyplot, which would change the backend of a notebook

    slices = {split: rows for split, rows in final.get("slices", {}).items() if any(row["rows"] for row in rows)}
    tables = {name: table for name, table in final.get("tables", {}).items() if table["lookups"]}
    if not slices and not tables:
        return None
    num_panels, num_bars = bool(slices) + bool(tables), min(len(tables), MOST_BARS)
    size = (9.5 if num_panels == 2 else 6, max(4, 1.6 + 0.25 * num_bars))  # a table's name takes a quarter of an inch
    figure = Figure(figsize=size, dpi=report._DPI, layout="constrained", facecolor="white")
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    if slices:
        _draw_slices(panels[0], slices)
        _legend(figure, panels[0], "outside lower left")
    if tables:
        _draw_traffic(panels[-1], tables)
        _legend(figure, panels[-1], "outside lower right")
    for axes in figure.axes:
        axes.spines[["top"]].set_visible(False)
        axes.set_axisbelow(True)
    return figure


def _draw_slices(axes: "Axes", slices: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    names = list(dict.fromkeys(row["slice"] for rows in slices.values() for row in rows))
    counts = axes.twinx()
    # Twins are drawn in the order of their creation; the bars belong behind the lines.
    axes.set_zorder(counts.get_zorder() + 1)
    axes.patch.set_visible(False)
    width = 0.8 / len(slices)
    for number, (split, rows) in enumerate(slices.items()):
        color = _SPLIT_COLORS[number % len(_SPLIT_COLORS)]
        positions = np.array([names.index(row["slice"]) for row in rows])
        shift = width * (number - (len(slices) - 1) / 2)
        counts.bar(positions + shift, [row["rows"] for row in rows], width, color=color, alpha=0.2)
        aucs = np.array([row["auc"] for row in rows], dtype=np.float64)  # None becomes NaN, a gap in the line
        axes.plot(positions, aucs, color=color, marker="os^D"[number % 4], label=f"AUC, {split}")
    axes.set_title("AUC by frequency of the target id", fontsize=12, fontweight="bold", loc="left")
    axes.set(xlabel=_X_LABEL, ylabel="area under the ROC curve (1 is perfect)")
    axes.set_xticks(range(len(names)), names)
    axes.grid(color="#e3e6ea", linewidth=0.8, axis="y")
    counts.set_ylabel("rows evaluated (bars)", color="#777777")
    counts.tick_params(axis="y", colors="#777777")
    counts.yaxis.set_major_formatter("{x:,.0f}")
    counts.locator_params(axis="y", integer=True)


def _draw_traffic(axes: "Axes", tables: Mapping[str, Mapping[str, Any]]) -> None:
    largest = sorted(tables, key=lambda name: -tables[name]["lookups"])[:MOST_BARS]
    positions = np.arange(len(largest))
    left = np.zeros(len(largest))
    for name, color in _RANGE_COLORS.items():
        shares = np.array([tables[table]["traffic"][name] for table in largest])
        axes.barh(positions, shares, 0.7, left, color=color, edgecolor="white", linewidth=0.5, label=name)
        left += shares
    rest = "" if len(largest) == len(tables) else f"\n{MOST_BARS} most used of {len(tables)} tables"
    axes.set_title("Training lookups", fontsize=12, fontweight="bold", loc="left")
    axes.set(xlabel=f"share of the table's lookups{rest}", xlim=(0, 1), ylim=(max(len(largest), 6) - 0.4, -0.6))
    axes.set_yticks(positions, [_cut(name) for name in largest])
    for text in axes.get_yticklabels():
        text.set_parse_math(False)  # a dollar in a table's name starts no formula
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.spines[["right"]].set_visible(False)


def _legend(figure: "Figure", axes: "Axes", place: Literal["outside lower left", "outside lower right"]) -> None:
    """Below the panels, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc=place, ncols=len(_RANGE_COLORS), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _cut(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:21]}..."


def _usage_table(tables: Mapping[str, Mapping[str, Any]]) -> TextTable:
    title = (
        "Tables after one pass over the training data. Occupied: rows for ids that were looked up; "
        "collisions: of these, rows with two ids or more; shared traffic: lookups of ids that met such a row."
    )
    if any(table["estimated_from_one_row_in"] > 1 for table in tables.values()):
        title += " Estimated where not all rows are tracked; shared traffic then is rough."
    rows = [
        [
            name,
            table["policy"],
            f"{table['rows']:,}",
            *(_percent(table[key]) for key in ("occupancy", "collision_rate", "shared_traffic")),
            "all rows" if table["estimated_from_one_row_in"] == 1 else f"1 in {table['estimated_from_one_row_in']}",
        ]
        for name, table in tables.items()
    ]
    head = ["table", "ids", "rows", "occupied", "collisions", "shared traffic", "tracked"]
    return TextTable(title, head, rows, ["table", "ids", "tracked"])


def _traffic_table(final: Mapping[str, Any]) -> TextTable:
    title = "Lookups by kind of row. Hot: a row of the id's own; cold: a row that ids share."
    training = {name: table["traffic"] for name, table in final.get("tables", {}).items()}
    by_split = {"train": training, **final.get("traffic", {})}
    names = dict.fromkeys(name for shares in by_split.values() for name in shares)
    rows = [
        [name, split, *(_percent(by_split[split][name][key]) for key in _RANGE_COLORS)]
        for name in names
        for split in by_split
        if name in by_split[split]
    ]
    return TextTable(title, ["table", "split", *_RANGE_COLORS], rows, ["table", "split"])


def _slice_table(slices: Mapping[str, Sequence[Mapping[str, Any]]]) -> TextTable:
    rows = [
        [split, row["slice"], f"{row['rows']:,}", f"{row['positives']:,}", *_metrics(row)]
        for split, found in slices.items()
        for row in found
    ]
    head = ["split", "occurrences", "rows", "positives", *_SLICE_METRICS]
    return TextTable(f"Metrics by {_X_LABEL}.", head, rows, ["split", "occurrences"])


def _metrics(row: Mapping[str, Any]) -> Iterator[str]:
    for name in _SLICE_METRICS:
        yield "undefined" if row[name] is None else f"{row[name]:.4f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
