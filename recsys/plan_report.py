"""`recsys plan`: a recipe planned for a cluster that need not be here, as text and as a picture."""

import itertools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from recsys import models
from recsys.cluster import Cluster, format_bytes
from recsys.errors import UserError
from recsys.plan import HOST_CACHED, Plan, RankLoad, TablePlan
from recsys.planner import Planner
from recsys.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_TABLES_DRAWN = 40
_ASSUMPTIONS = (
    "Times are TorchRec's estimates from bandwidths, for one step in which nothing overlaps; dense layers are taken to "
    "run at half of the device's fp32 rate. Lists count as full (max_length). They rank plans; they are no measurement."
)
_BOTTLENECKS = {
    "lookup": "reading, summing and updating rows, which is bound by memory bandwidth",
    "exchange": "ids, vectors and gradients of the tables between ranks, which is bound by {}",
    "dense layers": "their matrix products",
    "gradients": "the all-reduce of the dense layers' gradients, which is bound by {}",
}


def plan_recipe(recipe: Recipe, cluster: Cluster) -> Plan:
    """Plan a recipe's tables; nothing is allocated, read or started. A plan that the recipe pins is checked instead.

    Raises:
        UserError: The pinned plan does not fit the recipe or the cluster.
        DoesNotFitError: The tables need more memory than there is.
    """
    model = models.build(recipe.inputs, recipe.model, table_device="meta")
    planner = Planner(model, recipe, cluster)
    return planner.adopt(Plan.read(recipe.train.plan)) if recipe.train.plan else planner.plan()


def print_plan(plan: Plan, cluster: Cluster, console: Console) -> None:
    """Cluster, tables, ranks, estimated step and what it waits for."""
    for line in (cluster.describe(), *plan.notes, _ASSUMPTIONS):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(_tables(plan), _memory(plan), _times(plan))
    for line in (*plan.summary()[len(plan.notes) :], *_step(plan, cluster)):
        console.print(line, soft_wrap=True, highlight=False)


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in texts:
        table.add_column(name, overflow="fold", no_wrap=name in ("node", "ranks"))
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _tables(plan: Plan) -> Table:
    table = _table("Tables, over all ranks", ["table", "sharding", "ranks"], ["rows x width", "weights", "optimizer"])
    for t in sorted(plan.tables, key=lambda t: -t.rows * t.width):
        cached = f", host, {t.cached_share:.0%} cached" if t.kernel == HOST_CACHED else ""
        ranks = _ranges(s.rank for s in t.shards if s.rows)
        sizes = (format_bytes(size) for size in _sizes(t))
        table.add_row(t.name, t.kind + cached, ranks, f"{t.rows:,} x {t.width}", *sizes)
    return table


def _sizes(table: TablePlan) -> tuple[int, int]:
    """Weights and optimizer state on all ranks together; copies count."""
    return sum(s.bytes for s in table.shards), sum(s.state_bytes for s in table.shards)


def _ranges(ranks: Iterable[int]) -> str:
    """`0-7, 12` for 0, 1, ... 7 and 12."""
    parts = []
    for _, group in itertools.groupby(enumerate(sorted(set(ranks))), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)


def _by_rank(plan: Plan, title: str, columns: dict[str, Callable[[RankLoad], str]]) -> Table:
    """A line for each rank; neighbours on one node with equal figures share it."""
    table = _table(title, ["node", "ranks"], list(columns))

    def cells(load: RankLoad) -> tuple[str, ...]:
        return (str(load.rank // plan.devices_per_node), *(show(load) for show in columns.values()))

    for (node, *rest), group in itertools.groupby(plan.loads(), key=cells):
        table.add_row(node, _ranges(load.rank for load in group), *rest)
    return table


def _memory(plan: Plan) -> Table:
    columns: dict[str, Callable[[RankLoad], str]] = {
        "weights": lambda load: format_bytes(load.weight_bytes),
        "optimizer": lambda load: format_bytes(load.state_bytes),
        "buffers": lambda load: format_bytes(load.buffer_bytes),
        "dense": lambda load: format_bytes(load.dense_bytes),
        "in all": lambda load: format_bytes(load.device_bytes),
    }
    if any(load.host_bytes for load in plan.loads()):
        columns["host"] = lambda load: format_bytes(load.host_bytes)
    return _by_rank(plan, f"Memory of each rank, of {format_bytes(plan.memory_bytes)}", columns)


def _times(plan: Plan) -> Table:
    columns: dict[str, Callable[[RankLoad], str]] = {
        "lookup": lambda load: f"{load.lookup_ms:.3f}",
        "exchange": lambda load: f"{load.exchange_ms:.3f}",
        "dense layers": lambda load: f"{load.dense_ms:.3f}",
        "step": lambda load: f"{load.step_ms:.3f}",
    }
    return _by_rank(plan, "Estimated step of each rank, ms", columns)


def bottleneck(plan: Plan) -> tuple[str, float]:
    """What takes longest in the step of the slowest rank, and its share of that step."""
    slowest = max(plan.loads(), key=lambda load: load.step_ms)
    parts = {
        "lookup": slowest.lookup_ms,
        "exchange": slowest.exchange_ms,
        "dense layers": plan.dense.compute_ms,
        "gradients": plan.dense.exchange_ms,
    }
    name = max(parts, key=lambda part: parts[part])
    return name, parts[name] / slowest.step_ms


def imbalance(plan: Plan) -> float:
    """Time of the rank with most work on tables over the mean of all; 1 is even, and a single rank always is."""
    times = [load.lookup_ms + load.exchange_ms for load in plan.loads()]
    mean = sum(times) / len(times)
    return max(times) / mean if mean else 1.0


def _step(plan: Plan, cluster: Cluster) -> list[str]:
    slowest = max(plan.loads(), key=lambda load: load.step_ms)
    name, share = bottleneck(plan)
    network = "bandwidth between nodes" if cluster.nodes > 1 else "bandwidth inside the node"
    rows_per_s = plan.batch_size_per_rank * plan.world_size / slowest.step_ms * 1e3
    return [
        f"Estimated step: {slowest.step_ms:.3f} ms on rank {slowest.rank}, the slowest; {rows_per_s:,.0f} rows/s with "
        f"{plan.batch_size_per_rank:,} rows on each rank",
        f"Imbalance: the rank with most work on tables has {imbalance(plan):.2f} times the mean of all",
        f"Bottleneck: {name}, {share:.0%} of that step: {_BOTTLENECKS[name].format(network)}",
    ]


def heat(plan: Plan) -> tuple[list[str], np.ndarray]:
    """(tables, largest first and small ones together; their bytes in each rank's device, (tables, ranks))."""
    rows = []
    for table in plan.tables:
        by_rank = np.zeros(plan.world_size)
        np.add.at(by_rank, [s.rank for s in table.shards], [float(s.device_bytes) for s in table.shards])
        rows.append((table.name, by_rank))
    rows.sort(key=lambda row: -row[1].sum())
    if len(rows) > _MAX_TABLES_DRAWN:
        rest = rows[_MAX_TABLES_DRAWN - 1 :]
        rows[_MAX_TABLES_DRAWN - 1 :] = [(f"{len(rest)} smaller tables", np.sum([r for _, r in rest], axis=0))]
    return [name for name, _ in rows], np.stack([by_rank for _, by_rank in rows])


def draw(plan: Plan) -> "Figure":
    """Tables x ranks as a heat map of bytes; below it each rank's memory and step."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    names, matrix = heat(plan)
    height = 1.5 + 0.22 * len(names)
    figure = Figure(figsize=(9, height + 5), dpi=150, layout="constrained", facecolor="white")
    grid = figure.add_gridspec(3, 1, height_ratios=[height, 2.2, 2.2])
    axes = figure.add_subplot(grid[0])
    shown = np.ma.masked_equal(matrix, 0)
    image = axes.imshow(shown, aspect="auto", cmap="viridis", norm=LogNorm(max(shown.min(), 1), max(shown.max(), 2)))
    axes.set_yticks(range(len(names)), names, fontsize=7, parse_math=False)
    axes.set_title(f"Plan {plan.fingerprint}: memory of each table on each rank", fontsize=11, loc="left")
    figure.colorbar(image, ax=axes, label="bytes")
    for node in range(1, plan.world_size // plan.devices_per_node):
        axes.axvline(node * plan.devices_per_node - 0.5, color="#444444", linewidth=0.8)
    loads, ranks = plan.loads(), np.arange(plan.world_size)
    memory = {
        "weights": [x.weight_bytes for x in loads],
        "optimizer": [x.state_bytes for x in loads],
        "buffers": [x.buffer_bytes for x in loads],
        "dense layers, activations": [x.dense_bytes for x in loads],
    }
    if any(x.host_bytes for x in loads):
        memory["weights"] = [x.device_bytes - x.state_bytes - x.buffer_bytes - x.dense_bytes for x in loads]
    times = {
        "lookup": [x.lookup_ms for x in loads],
        "exchange": [x.exchange_ms for x in loads],
        "dense layers": [x.dense_ms for x in loads],
    }
    below = figure.add_subplot(grid[1], sharex=axes)
    _stack(below, ranks, {k: np.array(v) / 1e9 for k, v in memory.items()}, "memory (GB)")
    below.axhline(plan.memory_bytes / 1e9, color="#D55E00", linewidth=1, label="there is")
    below.legend(fontsize=7, frameon=False, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    last = figure.add_subplot(grid[2], sharex=axes)
    _stack(last, ranks, {k: np.array(v) for k, v in times.items()}, "step (ms)")
    last.legend(fontsize=7, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    last.set_xlabel("rank; lines between nodes")
    last.locator_params(axis="x", integer=True)
    return figure


def _stack(axes: "Axes", ranks: np.ndarray, parts: dict[str, np.ndarray], label: str) -> None:
    bottom = np.zeros(len(ranks))
    for (name, sizes), color in zip(parts.items(), ("#0072B2", "#E69F00", "#009E73", "#999999"), strict=False):
        axes.bar(ranks, sizes, 0.8, bottom, color=color, label=name)
        bottom += sizes
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)


def write_picture(plan: Plan, path: str) -> None:
    """Write the picture as PNG.

    Raises:
        UserError: The file cannot be written.
    """
    try:
        draw(plan).savefig(pathlib.Path(path), format="png")
    except OSError as error:
        raise UserError(f"The picture cannot be written to {path!r}", received=str(error)) from error


def require_writable(paths: Sequence[str | None]) -> None:
    """Find out before the work whether its results can be stored.

    Raises:
        UserError: A path has no folder, or is one.
    """
    for path in filter(None, paths):
        if pathlib.Path(path).is_dir() or not pathlib.Path(path).absolute().parent.is_dir():
            raise UserError(f"{path!r} cannot be written", allowed="a file in a folder that exists", fix="name another")
