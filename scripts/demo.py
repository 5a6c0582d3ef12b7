"""MovieLens-100K from download to results: DIN and DeepFM on two ranks with row-wise tables, in one table.

Run as `python -m scripts.demo` (or `make demo`, which also does the set-up).
"""

import datetime
import json
import pathlib
import subprocess
import sys

from rich.console import Console
from rich.table import Table

_RANKS = 2
_MODELS = ("din", "deepfm")


def main() -> None:
    """Prepare, train each model with the real launcher, print the results."""
    _run("-m", "recsys", "prepare", "movielens-100k")
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    table = Table("model", "AUC", "GAUC", "log loss", "rows/s", "report")
    for model in _MODELS:
        run = pathlib.Path("runs") / f"demo-{model}-{stamp}"
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS))
        _run(*launcher, "-m", "recsys", "train", f"models/{model}/movielens-100k.yaml", "--run-dir", str(run))
        metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
        test = metrics["test"]
        scores = (f"{test[key]:.4f}" for key in ("auc", "gauc", "logloss"))
        table.add_row(model, *scores, f"{metrics['rows_per_s']:,.0f}", str(run / "report.html"))
    Console().print(table)


def _run(*arguments: str) -> None:
    """Run one step with this interpreter; its own output says what went wrong."""
    code = subprocess.run([sys.executable, *arguments]).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
