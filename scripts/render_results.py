"""Rewrite README.md and models/*/README.md between their result markers: `python -m scripts.render_results`.

The numbers are those of models/*/results.json, written by `scripts.measure` and `scripts.search_settings`, and of
data/movielens-100k/published.json.
"""

import json
import pathlib
import textwrap
from collections.abc import Iterator
from typing import Any

_ROOT = pathlib.Path(__file__).parent.parent
_BEGIN, _END = "<!-- results:begin -->\n", "<!-- results:end -->"
_DATASET = "movielens-100k"
_TITLES = {
    "auc": "AUC",
    "gauc": "GAUC",
    "logloss": "log loss",
    "normalized_entropy": "normalized entropy",
    "calibration": "calibration",
}
_COLUMNS = ("auc", "gauc", "logloss")
_NOT_MEASURED = "not measured yet"


def main() -> None:
    """Rewrite the files that are out of date and name them."""
    texts = render_all()
    for name in drift():
        (_ROOT / name).write_text(texts[_ROOT / name], encoding="utf-8")
        print(name)


def drift(root: pathlib.Path = _ROOT) -> list[str]:
    """Files, relative to the root, that are not what rendering makes of the results."""
    return [
        str(path.relative_to(root))
        for path, text in render_all(root).items()
        if path.read_text(encoding="utf-8") != text
    ]


def render_all(root: pathlib.Path = _ROOT) -> dict[pathlib.Path, str]:
    """Each file with results and the text that it should have."""
    texts = {root / "README.md": table(root)}
    for path in sorted(root.glob("models/*/README.md")):
        texts[path] = card(_results(path.parent))
    return {path: _between_markers(path, text) for path, text in texts.items()}


def table(root: pathlib.Path = _ROOT) -> str:
    """The README's table: models of this library, then others, with the source of those."""
    lines = [_row("model", *(_TITLES[name] for name in _COLUMNS)), "|---" * (1 + len(_COLUMNS)) + "|"]
    for recipe in sorted(root.glob(f"models/*/{_DATASET}.yaml")):
        found = _results(recipe.parent).get(_DATASET, {}).get("test")
        title = (recipe.parent / "README.md").read_text(encoding="utf-8").split("\n")[0].removeprefix("# ")
        cells = [_with_spread(found[name]) for name in _COLUMNS] if found else [_NOT_MEASURED, "", ""]
        lines.append(_row(f"**{title}** (this library)", *cells))
    others = json.loads((root / "data" / _DATASET / "published.json").read_text(encoding="utf-8"))
    for other in others["models"]:
        lines.append(_row(other["name"], *(f"{other[name]:.4f}" for name in _COLUMNS)))
    caption = textwrap.fill(f"Other libraries: {others['source']}.", 120)
    return "\n".join(lines) + f"\n\n{caption}\n"


def card(results: dict[str, Any]) -> str:
    """The results of one model: a section per recipe."""
    sections = [f"### {name}\n\n" + "\n".join(_section(found)) + "\n" for name, found in results.items()]
    return "\n".join(sections) or _NOT_MEASURED + "\n"


def _section(found: dict[str, Any]) -> Iterator[str]:
    """Lines about one recipe: metrics on the test set, then how they came about."""
    if "test" in found:
        yield _row("test set", "mean", "sd", "tolerance", "runs")
        yield "|---" * 5 + "|"
        for name, spread in found["test"].items():
            runs = ", ".join(_number(value) for value in spread["runs"])
            sd, tolerance = ("" if spread[key] is None else _number(spread[key]) for key in ("sd", "tolerance"))
            yield _row(_TITLES[name], _number(spread["mean"]), sd, tolerance, runs)
        made_with = dict(found["environment"])
        hardware = f"{made_with.pop('processor')}, {made_with.pop('cores')} cores"
        ranks = f"{made_with.pop('world_size')} rank(s) on {made_with.pop('device')}"
        threads = f"{made_with.pop('threads_per_rank')} thread(s) each"
        commit = made_with.pop("git_commit")
        yield ""
        yield "A mean of other seeds that differs by more than the tolerance is a regression."
        yield ""
        yield f"- Command: `{found['command']}`, {found['date']}, commit {commit or 'unknown'}"
        yield f"- Selection: {found['selection']}"
        yield f"- Best epochs: {', '.join(map(str, found['best_epochs']))}"
        yield f"- Speed: {found['rows_per_s']:,} rows/s in training"
        yield f"- Hardware: {hardware}; {ranks}, {threads}"
        yield f"- Versions: {', '.join(f'{name} {version}' for name, version in made_with.items())}"
    else:
        yield _NOT_MEASURED
        yield ""
    for search in found.get("search", ()):
        best = search["best"]
        settings = ", ".join(f"{key}={json.dumps(value)}" for key, value in best["settings"].items())
        failed = f" ({search['failed']} failed)" if search["failed"] else ""
        score = f"best validation {_TITLES[search['monitor']]} {_number(best[search['monitor']])}"
        yield f"- Search: `{search['command']}`, {search['date']}: {search['trials']} trials{failed}, {score} with"
        yield f"  `{settings}`"


def _results(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / "results.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _between_markers(path: pathlib.Path, text: str) -> str:
    """A file's text with what stands between its markers made anew."""
    whole = path.read_text(encoding="utf-8")
    if whole.count(_BEGIN) != 1 or whole.count(_END) != 1:
        raise ValueError(f"{path} has not exactly one {_BEGIN.strip()} and one {_END}. Do: write both into it")
    head, rest = whole.split(_BEGIN)
    return head + _BEGIN + text + _END + rest.split(_END)[1]


def _with_spread(spread: dict[str, Any]) -> str:
    return _number(spread["mean"]) + ("" if spread["sd"] is None else f" +- {spread['sd']:.4f}")


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
