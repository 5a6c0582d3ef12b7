"""The page that explains a run: curves, calibration, plan, environment and recipe, from the files of its folder.

It reads files only, so it may be written again at any time, for a run that was killed too. What a file would have
shown is named as absent where the file is.
"""

import base64
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.errors import UserError
from recsys.metrics import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Row = dict[str, Any]

# Okabe and Ito's palette (jfly.uni-koeln.de/color), told apart by colour-blind readers; the last one is for the rest.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_MARKERS = {"valid": "o", "test": "s"}
_DPI = 150

_DECIMALS = {"epoch": 0, "step": 0, "rows": 0, "groups": 0, "rows_per_s": 0, "elapsed_s": 1}
_TITLES = {
    "auc": "AUC",
    "gauc": "GAUC",
    "logloss": "log loss",
    "normalized_entropy": "normalized entropy",
    "train_loss": "train loss",
    "rows_per_s": "rows/s",
    "elapsed_s": "elapsed, s",
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --dim: #5b6570; --page: #ffffff; --line: #d8dde3; --block: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --dim: #9aa5b1; --page: #15191e; --line: #363e47; --block: #1f252c; }
}
body { margin: 0 auto; max-width: 60rem; padding: 1rem; color: var(--ink); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin-bottom: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
.dim { color: var(--dim); }
.absent { color: var(--dim); font-style: italic; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { vertical-align: bottom; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
td.text:last-child { overflow-wrap: anywhere; min-width: 8rem; }
tr.best td { font-weight: 600; }
img { display: block; width: 100%; height: auto; background: #fff; border-radius: 6px; }
pre { background: var(--block); padding: .8rem; border-radius: 6px; overflow-x: auto; font-size: .8125rem; }
"""


def write_report(run_dir: Path) -> Path:
    """Draw loss.png, auc.png, calibration.png and plan.png into a run folder, and report.html around them.

    Args:
        run_dir: Folder of a run; any of metrics.jsonl, train_loss.jsonl, metrics.json, plan.json,
            environment.json and recipe.yaml may be missing.

    Returns:
        The page: one file that needs no other and no network.

    Raises:
        UserError: there is no such folder, or one of the files cannot be read as what it should be.
    """
    from recsys import cold_report  # it draws with this module's tables and colours

    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError("There is no such run folder", received=str(run_dir), fix="give the folder of a training run")
    evaluations = _read_lines(run_dir / "metrics.jsonl")
    losses = _read_lines(run_dir / "train_loss.jsonl")
    final = _read_json(run_dir / "metrics.json")
    plan = _read_json(run_dir / "plan.json")
    environment = _read_json(run_dir / "environment.json")
    recipe_path = run_dir / "recipe.yaml"
    recipe = recipe_path.read_text(encoding="utf-8") if recipe_path.is_file() else ""
    best_epoch = final.get("best_epoch")

    sections = [
        ("Result", _result(final)),
        ("Loss", _picture(run_dir, "loss", _draw_loss(losses, evaluations), "train_loss.jsonl and metrics.jsonl")),
        ("AUC", _picture(run_dir, "auc", _draw_auc(evaluations, best_epoch), "metrics.jsonl")),
        ("Calibration", _picture(run_dir, "calibration", _draw_calibration(final), "metrics.json")),
        ("Rare and new ids", cold_report.html_fragment(final, run_dir)),
        ("Evaluations", _evaluations(evaluations, best_epoch)),
        ("Plan", _picture(run_dir, "plan", _draw_plan(plan), "plan.json") + _plan_table(plan)),
        ("Environment", _environment(environment)),
        ("Recipe", f"<pre>{html.escape(recipe)}</pre>" if recipe else _absent("recipe.yaml")),
    ]
    body = "\n".join(f"<section><h2>{title}</h2>\n{content}</section>" for title, content in sections if content)
    name = html.escape(run_dir.resolve().name)
    page = run_dir / "report.html"
    page.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{name} - run report</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{name}</h1>\n{body}\n</body></html>\n",
        encoding="utf-8",
    )
    return page


def _read_json(path: Path) -> _Row:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not a JSON object", received=str(error), fix="delete or mend the file") from error


def _read_lines(path: Path) -> list[_Row]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break  # the run was killed while it wrote this line; the lines before it still tell the story
            raise UserError(
                f"Line {number} of {path} is not a JSON object", received=line[:80], fix="delete or mend the line"
            ) from error
    return rows


def _latest(rows: Iterable[_Row], *keys: str) -> list[_Row]:
    """The last row of each key, in step order: a resumed run writes the steps after its checkpoint again."""
    return sorted({tuple(row[key] for key in keys): row for row in rows}.values(), key=lambda row: row["step"])


def _figure(title: str, x_label: str, y_label: str, *, width: float = 7, height: float = 4) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure  # not pyplot, which would change the backend of a notebook

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=12, fontweight="bold", loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _draw_loss(losses: Sequence[_Row], evaluations: Sequence[_Row]) -> "Figure | None":
    losses = [row for row in _latest(losses, "step") if row["loss"] is not None]
    evaluations = [row for row in _latest(evaluations, "step", "split") if row.get("logloss") is not None]
    if not losses and not evaluations:
        return None
    figure, axes = _figure("Log loss", "training step (batches)", "log loss (nats per row)")
    if losses:
        steps, values = (np.array([row[key] for row in losses], dtype=np.float64) for key in ("step", "loss"))
        window = max(1, len(values) // 40)
        axes.plot(
            steps, values, color=_COLORS[0], alpha=0.3 if window > 1 else 1, linewidth=1, label="train, one batch"
        )
        if window > 1:
            smooth = np.convolve(values, np.full(window, 1 / window), mode="valid")
            label = f"train, mean of {window} points"
            axes.plot(steps[window - 1 :], smooth, color=_COLORS[0], linewidth=2, label=label)
    _plot_splits(axes, evaluations, "step", "logloss", color=_COLORS[5], label="log loss")
    axes.legend(frameon=False)
    return figure


def _draw_auc(evaluations: Sequence[_Row], best_epoch: int | None) -> "Figure | None":
    evaluations = _latest(evaluations, "epoch", "split")
    if not any(row.get(key) is not None for row in evaluations for key in ("auc", "gauc")):
        return None
    figure, axes = _figure("AUC and GAUC", "epoch", "area under the ROC curve (1 is perfect)")
    for metric, color in (("auc", _COLORS[0]), ("gauc", _COLORS[5])):
        defined = [row for row in evaluations if row.get(metric) is not None]
        _plot_splits(axes, defined, "epoch", metric, color=color, label=_TITLES[metric])
    if best_epoch is not None:
        axes.axvline(best_epoch, color="#777777", linestyle=":", label="best epoch")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False)
    return figure


def _plot_splits(axes: "Axes", rows: Sequence[_Row], x: str, y: str, *, color: str, label: str) -> None:
    for split, marker in _MARKERS.items():
        chosen = [row for row in rows if row["split"] == split]
        if chosen:
            line = "-" if split == "valid" else "--"
            points = [[row[key] for row in chosen] for key in (x, y)]
            axes.plot(*points, color=color, marker=marker, linestyle=line, label=f"{label}, {split}")


def _draw_calibration(final: Mapping[str, Any]) -> "Figure | None":
    curves = {split: points for split, points in final.get("calibration_curve", {}).items() if points}
    if not curves:
        return None
    figure, axes = _figure(
        "Calibration, one point per quantile",
        "mean predicted probability",
        "share of positive rows",
        width=5,
        height=5,
    )
    values = [point[key] for points in curves.values() for point in points for key in ("mean_prob", "mean_label")]
    top = min(1.0, max(values) * 1.05) or 1.0
    axes.plot([0, top], [0, top], color="#777777", linestyle="--", linewidth=1, label="perfect")
    for (split, points), color in zip(sorted(curves.items()), (_COLORS[0], _COLORS[5]), strict=False):
        xy = [[point[key] for point in points] for key in ("mean_prob", "mean_label")]
        label = f"{split}, {sum(point['count'] for point in points):,} rows"
        axes.plot(*xy, color=color, marker=_MARKERS.get(split, "^"), markersize=5, linewidth=1, label=label)
    axes.set(xlim=(0, top), ylim=(0, top), aspect="equal")
    axes.legend(frameon=False, loc="upper left")
    return figure


def _draw_plan(plan: Mapping[str, Any]) -> "Figure | None":
    if not plan:
        return None
    ranks = np.arange(plan["world_size"])
    per_table = {table["name"]: _bytes_per_rank(table, len(ranks)) for table in plan["tables"]}
    largest = sorted(per_table, key=lambda name: -per_table[name].sum())
    shown, rest = largest[: len(_COLORS) - 1], largest[len(_COLORS) - 1 :]
    parts = [(name, per_table[name], color) for name, color in zip(shown, _COLORS, strict=False)]
    if rest:
        parts.append((f"{len(rest)} smaller tables", np.sum([per_table[name] for name in rest], axis=0), _COLORS[-1]))
    if plan.get("dense_bytes"):
        dense = np.full(len(ranks), float(plan["dense_bytes"]))
        parts.append(("dense layers, a copy on each rank", dense, "#444444"))
    if not parts:
        return None
    scale, unit = _byte_unit(np.sum([sizes for _, sizes, _ in parts], axis=0).max())
    height = 3.4 + 0.22 * len(parts)  # a legend line takes 0.22 inch
    figure, axes = _figure("Weights planned on each rank", "rank", f"weights ({unit})", height=height)
    bottom = np.zeros(len(ranks))
    for name, sizes, color in parts:
        bars = axes.bar(ranks, sizes / scale, 0.6, bottom / scale, color=color, edgecolor="white", linewidth=0.5)
        bars.set_label(f"{_size(sizes.sum())}  {name}")
        bottom += sizes
    axes.set_xlim(-0.8, len(ranks) - 0.2)
    axes.locator_params(axis="x", integer=True)
    axes.grid(visible=False, axis="x")
    legend = figure.legend(
        loc="outside lower left", frameon=False, fontsize=9, title="sum over all ranks", alignment="left"
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar in a table's name starts no formula
    return figure


def _bytes_per_rank(table: Mapping[str, Any], world_size: int) -> np.ndarray:
    shards = table["shards"]
    ranks = np.array([shard["rank"] for shard in shards], dtype=np.int64)
    return np.bincount(ranks, weights=[float(shard["bytes"]) for shard in shards], minlength=world_size)


def _byte_unit(num_bytes: float) -> tuple[float, str]:
    power = min(4, int(math.log(num_bytes, 1024))) if num_bytes >= 1 else 0
    return 1024.0**power, ("bytes", "KiB", "MiB", "GiB", "TiB")[power]


def _size(num_bytes: float) -> str:
    scale, unit = _byte_unit(num_bytes)
    return f"{num_bytes / scale:.{0 if scale == 1 else 1}f} {unit}"


def _picture(run_dir: Path, name: str, figure: "Figure | None", sources: str) -> str:
    path = run_dir / f"{name}.png"
    if figure is None:
        path.unlink(missing_ok=True)  # a picture from before would contradict the page
        return _absent(sources)
    figure.savefig(path)
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    title = html.escape(figure.axes[0].get_title(loc="left"))
    width_rem = 6.3 * figure.get_figwidth()  # one scale, so that text has one size in all pictures
    return f'<img alt="{title}" style="max-width: {width_rem:.0f}rem" src="data:image/png;base64,{data}">\n'


def _absent(sources: str) -> str:
    return f'<p class="absent">Nothing to show: {sources} absent or without values.</p>\n'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Sequence[str], bold: int | None = None) -> str:
    """An HTML table of ready cells.

    Args:
        head: Titles of the columns, escaped here.
        rows: Cells that are HTML already.
        texts: Titles of the columns that hold text; the others hold numbers.
        bold: Position of the row to stress.
    """
    kinds = ["text" if title in texts else "number" for title in head]
    heads = "".join(f'<th class="{kind}">{html.escape(title)}</th>' for kind, title in zip(kinds, head, strict=True))
    lines = [f"<tr>{heads}</tr>"]
    for position, row in enumerate(rows):
        cells = "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True))
        lines.append(f'<tr class="best">{cells}</tr>' if position == bold else f"<tr>{cells}</tr>")
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>\n"


def _value(key: str, value: object) -> str:
    """A cell: a number with the decimals of its column, text escaped, a missing value as such."""
    if value is None:
        return f'<span class="absent">{"undefined" if key in METRICS else "-"}</span>'
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:,.{_DECIMALS.get(key, 4)}f}"
    return html.escape(value if isinstance(value, str) else json.dumps(value))


def _result(final: Mapping[str, Any]) -> str:
    splits = [split for split in ("valid", "test") if final.get(split)]
    if not splits:
        return _absent("metrics.json")
    names = [name for name in METRICS if any(name in final[split] for split in splits)]
    rows = [
        [_TITLES.get(name, name), *(_value(name, final[split].get(name)) for split in splits), METRICS[name].meaning]
        for name in names
    ]
    best = final.get("best_epoch")
    note = "" if best is None else f'<p class="dim">Weights of epoch {_value("epoch", best)}, the best one.</p>\n'
    return note + _table(["metric", *splits, "meaning"], rows, texts=["metric", "meaning"])


def _evaluations(evaluations: Sequence[_Row], best_epoch: int | None) -> str:
    if not evaluations:
        return _absent("metrics.jsonl")
    order = ["epoch", "step", "split", *METRICS, "train_loss", "rows_per_s", "elapsed_s"]
    keys = [key for key in order if any(key in row for row in evaluations)]
    rows = [[_value(key, row.get(key)) for key in keys] for row in evaluations]
    matches = [i for i, row in enumerate(evaluations) if (row["epoch"], row["split"]) == (best_epoch, "valid")]
    head = [_TITLES.get(key, key) for key in keys]
    return _table(head, rows, texts=["split"], bold=matches[-1] if matches else None)


def _plan_table(plan: Mapping[str, Any]) -> str:
    rows = []
    for table in plan.get("tables", ()):
        shards = "<br>".join(
            f"rank {shard['rank']}: rows {shard['row_offset']:,} to {shard['row_offset'] + shard['rows'] - 1:,}, "
            f"columns {shard['col_offset']} to {shard['col_offset'] + shard['cols'] - 1}, {_size(shard['bytes'])}"
            for shard in table["shards"]
        )
        num_shards = f"{len(table['shards'])} shard{'s' * (len(table['shards']) != 1)}"
        place = f"<details><summary>{num_shards}</summary>{shards}</details>"
        cells = [html.escape(str(table[key])) for key in ("name", "kind", "kernel")]
        size = _size(sum(shard["bytes"] for shard in table["shards"]))
        rows.append([*cells, place, f"{table['rows']:,}", str(table["dim"]), size])
    texts = ["table", "sharding", "kernel", "where"]
    return _table([*texts, "rows", "width", "weights"], rows, texts=texts) if rows else ""


def _environment(environment: Mapping[str, Any]) -> str:
    if not environment:
        return _absent("environment.json")
    shown = {**environment, "strategy": "\n".join(environment.get("strategy", {}).get("lines", []))}
    rows = [
        [html.escape(key), html.escape(value if isinstance(value, str) else json.dumps(value)).replace("\n", "<br>")]
        for key, value in shown.items()
        if value != ""
    ]
    return _table(["what", "value"], rows, texts=["what", "value"])
