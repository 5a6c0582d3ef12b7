"""Rewrite the README's results table from models/*/results.json: `python -m scripts.render_results`."""

import json
import pathlib

_ROOT = pathlib.Path(__file__).parent.parent
_BEGIN, _END = "<!-- results:begin -->\n", "<!-- results:end -->"
_TITLES = {"din": "DIN", "deepfm": "DeepFM"}

# Measured by this project on the same prepared files, hyper-parameters chosen on validation, means of 3 seeds.
_OTHERS = (
    ("logistic regression (scikit-learn)", 0.7782, 0.7050, 0.5671),
    ("LightGBM", 0.7766, 0.7107, 0.5672),
    ("torch-rechub DeepFM", 0.7943, 0.7230, 0.5612),
    ("FuxiCTR DeepFM", 0.7948, 0.7220, 0.5555),
    ("FuxiCTR DIN", 0.7957, 0.7266, 0.5558),
)


def table(dataset: str = "movielens-100k") -> str:
    """The results table in Markdown."""
    lines = ["| model | AUC | GAUC | log loss |", "|---|---|---|---|"]
    for path in sorted(_ROOT.glob("models/*/results.json")):
        found = json.loads(path.read_text(encoding="utf-8")).get(dataset)
        if found is None:
            continue
        cells = (f"{v['mean']:.4f} +- {v['sd']:.4f}" for v in (found["test"][k] for k in ("auc", "gauc", "logloss")))
        lines.append(f"| **{_TITLES.get(path.parent.name, path.parent.name)}** (this library) | {' | '.join(cells)} |")
    for name, auc, gauc, logloss in _OTHERS:
        lines.append(f"| {name} | {auc:.4f} | {gauc:.4f} | {logloss:.4f} |")
    return "\n".join(lines) + "\n"


def render(readme: str) -> str:
    """The README's text with its results table made anew."""
    head, rest = readme.split(_BEGIN)
    return head + _BEGIN + table() + _END + rest.split(_END)[1]


def main() -> None:
    """Rewrite README.md in place."""
    path = _ROOT / "README.md"
    path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
