"""What a run tells while it runs: bar or log lines, loss curve, evaluations, TensorBoard; from rank 0 only."""

import logging
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from recsys.run_folder import RunFolder

log = logging.getLogger("recsys")

_LINE_EVERY_S = 30.0  # pace of progress lines where there is no terminal to draw a bar in
SHOWN_METRICS = ("auc", "gauc", "logloss")


class Reporter:
    """Writes the files that `recsys.report` reads, and shows the same to a person; silent on other ranks.

    Args:
        folder: The run folder.
        total_steps: Steps of the whole run, for the time that is left.
    """

    def __init__(self, folder: RunFolder, total_steps: int) -> None:
        self.folder, self.total_steps = folder, total_steps
        self._loss: float | None = None
        self._rate, self._line_s = 0.0, time.perf_counter()
        self._board = self._bar = None
        if folder.writes:
            from torch.utils.tensorboard import SummaryWriter  # 0.4 s that only rank 0 pays

            self._board = SummaryWriter(folder.path / "tensorboard")
            if sys.stderr.isatty():
                columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}")]
                self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
                self._task = self._bar.add_task("epoch 1", total=total_steps, shown="")
                self._bar.start()

    def stepped(self, epoch: int, step: int, rows_per_s: float) -> None:
        """One more step is done, at this pace of all ranks together."""
        self._rate = rows_per_s
        now_s = time.perf_counter()
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=f"epoch {epoch}", shown=self._shown())
        elif self.folder.writes and now_s - self._line_s > _LINE_EVERY_S:
            self._line_s = now_s
            log.info("epoch %d, step %d of %d: %s", epoch, step, self.total_steps, self._shown())

    def lost(self, step: int, loss: float, learning_rates: dict[str, float]) -> None:
        """The mean training loss since the last call, and the learning rates of the last step by name."""
        self._loss = loss
        self.folder.append_json("train_loss.jsonl", {"step": step, "loss": loss, "learning_rates": learning_rates})
        if self._board is not None:
            self._board.add_scalar("loss/train", loss, step)
            for name, rate in learning_rates.items():
                self._board.add_scalar(f"learning_rate/{name}", rate, step)

    def evaluated(self, split: str, metrics: dict[str, Any]) -> None:
        """The metrics of an evaluation."""
        self.folder.append_json("metrics.jsonl", {"split": split, **metrics})
        if self._board is not None:
            for key, value in metrics.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{split}/{key}", value, metrics["step"])
        if self.folder.writes:
            shown = [f"{k} {_rounded(metrics[k])}" for k in ("train_loss", *SHOWN_METRICS) if k in metrics]
            log.info(
                "epoch %d, %s: %s, %s rows/s",
                metrics["epoch"],
                split,
                ", ".join(shown),
                f"{metrics['rows_per_s']:,.0f}",
            )

    def close(self) -> None:
        """Take the bar away and flush the files."""
        if self._bar is not None:
            self._bar.stop()
        if self._board is not None:
            self._board.close()

    def _shown(self) -> str:
        return f"loss {'-' if self._loss is None else f'{self._loss:.4f}'}, {self._rate:,.0f} rows/s"


def _rounded(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
