"""Training: set-up in order, then one loop."""

import contextlib
import dataclasses
import itertools
import logging
import math
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipeline, TrainPipelineBase, TrainPipelineSparseDist

from recsys import checkpoint, communication, metrics, optim, report, scoring, vectors
from recsys.data.batch import Batch
from recsys.data.reader import Prefetcher, Reader
from recsys.distributed import agreed, broadcast, process_group
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.job import Data, Job, assemble
from recsys.layers.norm import average_statistics
from recsys.progress import Reporter
from recsys.recipe import Recipe, Split
from recsys.run_folder import RunFolder, environment
from recsys.survey import Survey, describe, survey

log = logging.getLogger("recsys")


@dataclasses.dataclass
class Result:
    """What training came to.

    Attributes:
        run: The run folder.
        metrics: Content of its metrics.json: best epoch, and the metrics of the best epoch on each split.
        report: The HTML report.
    """

    run: pathlib.Path
    metrics: dict[str, Any]
    report: pathlib.Path


def train(recipe: Recipe, *, run: str | None = None, name: str = "run") -> Result:
    """Train a recipe from data to report, on this rank and all others.

    Args:
        recipe: What to do.
        run: The run folder, which must not hold a run yet; None chooses one under `runs/`.
        name: Name of the recipe, for the default folder.

    Raises:
        UserError: Recipe, data or machine do not fit; raised before the first step on all ranks.
    """
    with process_group(recipe.train.device, threads=recipe.train.threads_per_rank) as ranks:
        encoder = Encoder(recipe)
        data = Data.open(recipe, encoder, ranks)
        learnt = survey(data)
        reader = data.reader("train", shuffle_rows=recipe.data.shuffle_rows)
        with contextlib.closing(data.batches(reader, range(1, recipe.train.epochs + 1))) as batches:
            job = assemble(recipe, ranks, encoder)  # while the first batches are made
            with agreed("vectors"):
                vectors.load_named(job)
            folder = RunFolder.create(run, recipe, name, ranks)
            return _train(job, data, folder, learnt, reader, batches)


def _train(
    job: Job, data: Data, folder: RunFolder, learnt: Survey, reader: Reader, batches: Prefetcher[Batch]
) -> Result:
    with folder.logging():
        facts = environment(job.ranks, torch.get_num_threads())
        facts["data_fingerprints"] = {split: found.fingerprint() for split, found in data.sets.items()}
        facts["optimizers"] = job.describe_optimizers()
        facts["communication"] = job.describe_communication()
        folder.write_json("environment.json", facts)
        folder.write_json("plan.json", job.describe_plan())
        _describe_start(job, data, folder, learnt)
        _store(learnt, folder)
        final = _Training(job, data, folder, learnt, reader, batches).run()
        with agreed("report"):
            if folder.writes:
                report.write_report(folder.path)
        return Result(folder.path, final, folder.path / "report.html")


def _store(learnt: Survey, folder: RunFolder) -> None:
    """Keep what evaluations of the trained model need, and the vocabularies it was trained with."""
    with agreed("run folder"):
        if not folder.writes:
            return
        if learnt.items is not None:
            learnt.items.write(folder.item_counts)
        for vocabulary in learnt.vocabularies.values():
            folder.vocabularies.mkdir(exist_ok=True)
            shutil.copyfile(vocabulary.path, folder.vocabularies / vocabulary.path.name)


def _describe_start(job: Job, data: Data, folder: RunFolder, learnt: Survey) -> None:
    rows = ", ".join(f"{split} {found.num_rows:,}" for split, found in data.sets.items())
    log.info("Run folder %s", folder.path)
    log.info(
        "%d rank(s) on %s, %d thread(s) each; rows: %s",
        job.ranks.world_size,
        job.ranks.device.type,
        torch.get_num_threads(),
        rows,
    )
    for line in job.plan.summary():
        log.info("%s", line)
    for sentence in optim.sentences(job.describe_optimizers()):
        log.info("%s", sentence)
    if sent := communication.sentence(job.recipe, job.ranks.world_size):
        log.info("%s", sent)
    for note in learnt.notes:
        log.info("%s", note)
    for split, found in data.sets.items():
        if found.skipped:
            log.info("data.%s: not read, since they are no parquet files: %s", split, ", ".join(found.skipped))
    for sentence in describe(learnt.counters):
        log.info("%s", sentence)


class _Training:
    """One training run from the first epoch to the metrics of the best one."""

    def __init__(
        self, job: Job, data: Data, folder: RunFolder, learnt: Survey, reader: Reader, batches: Prefetcher[Batch]
    ) -> None:
        self.job, self.data, self.folder, self.learnt = job, data, folder, learnt
        self.reader, self.batches = reader, batches  # the batches of all epochs, one epoch after another
        self.settings, self.device = job.recipe.train, job.ranks.device
        total_steps = self.reader.num_steps * self.settings.epochs
        self.optimizer = job.optimizer(total_steps)
        warmup_steps = job.recipe.optimizer.schedule.warmup_steps
        if folder.writes and warmup_steps >= total_steps:
            log.warning("optimizer.schedule: %d warm-up steps, but the run has %d", warmup_steps, total_steps)
        self.reporter = Reporter(folder, total_steps)
        self.step = 0
        self.best: dict[str, Any] = {}  # the evaluation of the kept epoch; empty before the first
        self.best_valid: scoring.Evaluation | None = None
        self.start_s = time.perf_counter()

    def run(self) -> dict[str, Any]:
        """Train, keeping the best epoch; then evaluate that epoch on the test set."""
        with contextlib.closing(self.reporter):
            for epoch in range(1, self.settings.epochs + 1):
                evaluation = {"epoch": epoch, **self._train_epoch(epoch)}
                valid = self._evaluate("valid") if "valid" in self.data.sets else None
                evaluation |= valid.metrics if valid else {}
                evaluation["elapsed_s"] = time.perf_counter() - self.start_s
                self.reporter.evaluated("valid" if "valid" in self.data.sets else "train", evaluation)
                if self._is_better(evaluation):
                    self._keep(evaluation)
                    self.best_valid = valid
                elif self.settings.patience and epoch - self.best["epoch"] >= self.settings.patience:
                    log.info("No better %s for %d epochs: stopped", self.settings.monitor, self.settings.patience)
                    break
            self.batches.close()
            return self._finish(evaluation)

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        """One pass over the training data: step reached, mean loss, rows per second of all ranks."""
        self.job.task.train()
        start_s, rows, losses, total = time.perf_counter(), 0, [], 0.0
        waited_s = self.batches.waited_s
        batches = itertools.islice(self.batches, self.reader.num_steps)
        with self._pipeline() as pipeline:
            for index in range(self.reader.num_steps):
                loss, _ = pipeline.progress(batches)
                losses.append(loss)
                self.step += 1
                rows += sum(self.reader.rows_by_rank(index))
                self.reporter.stepped(epoch, self.step, rows / (time.perf_counter() - start_s))
                if self.step % self.settings.log_every_steps == 0 or index == self.reader.num_steps - 1:
                    mean = self._mean(losses)
                    total += mean * len(losses)
                    losses = []
                    self.reporter.lost(self.step, mean, self.optimizer.learning_rates())
        elapsed_s = time.perf_counter() - start_s
        if not self.settings.shared_batch_statistics:
            average_statistics(self.job.task, self.job.ranks.group)
        return {
            "step": self.step,
            "train_loss": total / self.reader.num_steps,
            "rows_per_s": rows / elapsed_s,
            "reader_wait_share": (self.batches.waited_s - waited_s) / elapsed_s,
        }

    @contextlib.contextmanager
    def _pipeline(self) -> Iterator[TrainPipeline]:
        """A pipeline for one epoch: evaluation must find the model as it is, with nothing in flight."""
        if not pipelined(self.job):
            yield TrainPipelineBase(self.job.task, self.optimizer, self.device)
            return
        pipeline = TrainPipelineSparseDist(self.job.task, self.optimizer, self.device)
        yield pipeline
        pipeline.detach()

    def _mean(self, losses: list[torch.Tensor]) -> float:
        """Mean over steps and ranks.

        Raises:
            UserError: It is not a number; on all ranks.
        """
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
        mean = total.item() / len(losses) / self.job.ranks.world_size
        if not math.isfinite(mean):
            kept = self.folder.checkpoint_path(self.best["step"]) if self.best else "none yet"
            error = UserError(
                f"The training loss is not finite at step {self.step}; last good checkpoint: {kept}",
                received=mean,
                fix="lower optimizer.sparse.learning_rate or optimizer.dense.learning_rate",
            )
            error.is_printed_here = self.job.ranks.rank == 0
            raise error
        return mean

    def _evaluate(self, split: Split) -> scoring.Evaluation:
        """Metrics of a split, on all ranks; rank 0 computes them."""
        return broadcast(scoring.evaluate(self.job.task, self.data, split, self.learnt.items))

    def _is_better(self, evaluation: dict[str, Any]) -> bool:
        """Whether this epoch replaces the kept one; where the metric is undefined, the newest epoch counts."""
        if not self.best or "valid" not in self.data.sets:
            return True
        new, old = evaluation[self.settings.monitor], self.best[self.settings.monitor]
        if new is None or old is None:
            return old is None
        return new > old if metrics.METRICS[self.settings.monitor].higher_is_better else new < old

    def _keep(self, evaluation: dict[str, Any]) -> None:
        """Checkpoint this epoch as the best one and drop the former one."""
        former, self.best = self.best, evaluation
        about = {"step": self.step, "epoch": evaluation["epoch"], "metrics": evaluation}
        checkpoint.save(self.folder.checkpoint_path(self.step), self.job.task, self.job.encoder, about)
        if former and self.folder.writes:
            shutil.rmtree(self.folder.checkpoint_path(former["step"]))

    def _finish(self, last: dict[str, Any]) -> dict[str, Any]:
        """Evaluate the best epoch on the test set and write metrics.json."""
        final: dict[str, Any] = {"best_epoch": self.best["epoch"], "step": self.best["step"], "epochs": last["epoch"]}
        final["rows_per_s"], final["reader_wait_share"] = last["rows_per_s"], last["reader_wait_share"]
        final["changed"] = {split: dict(sorted(found.items())) for split, found in self.learnt.counters.items()}
        final["tables"] = self.learnt.tables
        evaluations = {"valid": self.best_valid} if self.best_valid else {}
        if "valid" in self.data.sets:
            final["valid"] = {k: v for k, v in self.best.items() if k in metrics.METRICS}
        if "test" in self.data.sets:
            if last["epoch"] != self.best["epoch"]:
                checkpoint.load(self.folder.checkpoint_path(self.best["step"]), self.job.task, self.job.encoder)
            evaluations["test"] = tested = self._evaluate("test")
            final["test"] = tested.metrics
            final["calibration_curve"] = {"test": tested.calibration_curve}
            elapsed_s = time.perf_counter() - self.start_s
            self.reporter.evaluated("test", {**self.best, **tested.metrics, "elapsed_s": elapsed_s})
        final["traffic"] = {split: found.traffic for split, found in evaluations.items()}
        final["slices"] = {split: found.slices for split, found in evaluations.items() if found.slices}
        self.folder.write_json("metrics.json", final)
        log.info("Training waited for data during %.1f %% of its time", 100 * final["reader_wait_share"])
        return final


def pipelined(job: Job) -> bool:
    """Whether the exchange of ids overlaps with the step before."""
    return job.recipe.train.pipeline == "sparse_dist" or (
        job.recipe.train.pipeline == "auto" and job.ranks.device.type == "cuda"
    )
