"""Training: set-up in order, then one loop."""

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import pathlib
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipeline, TrainPipelineBase, TrainPipelineSparseDist

from recsys import checkpoint, communication, metrics, optim, report, resumption, scoring, strategy, vectors
from recsys.data.batch import Batch
from recsys.data.epoch import Epoch
from recsys.data.reader import Prefetcher, Reader
from recsys.deltas import TouchedRows
from recsys.distributed import agreed, broadcast, gather, process_group
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.interruption import InterruptedRunError, Interruption
from recsys.job import Data, Job, assemble
from recsys.layers.norm import average_statistics
from recsys.optim import ModelOptimizer
from recsys.progress import Reporter
from recsys.recipe import Recipe, Split
from recsys.resumption import Progress
from recsys.run_folder import RunFolder, environment
from recsys.saving import Saver
from recsys.storage import Place
from recsys.survey import Survey, describe, survey

log = logging.getLogger("recsys")
_DIVERGED_LOSS = 1e4
"""Mean cross entropy, in nats, of a model that is wrong with a logit of 10,000."""


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


def train(recipe: Recipe, *, run: str | None = None, name: str = "run", resume: str = "never") -> Result:
    """Train a recipe from data to report, on this rank and all others.

    Args:
        recipe: What to do.
        run: The run folder, which must not hold a run yet unless that is to go on; None chooses one under `runs/`.
        name: Name of the recipe, for the default folder.
        resume: `auto` goes on from the newest whole checkpoint of the run, if there is one, and `never` from none; a
            launcher's restart is `auto` in any case. Else a checkpoint, or a folder with some, to go on from.

    Raises:
        UserError: Recipe, data or machine do not fit; raised before the first step on all ranks.
        InterruptedRunError: SIGTERM came; the run is saved.
    """
    settings = recipe.train
    with process_group(settings.device, threads=settings.threads_per_rank, timeout_s=settings.timeout_s) as ranks:
        encoder = Encoder(recipe)
        data = Data.open(recipe, encoder, ranks)
        learnt = survey(data)
        if resume == "never" and any(gather(resumption.restarted())):
            resume = "auto"
        folder = RunFolder.create(run, recipe, name, ranks, goes_on=resume != "never")
        if ranks.presence is not None:
            ranks.presence.log = folder.log
        with contextlib.closing(folder), folder.logging():
            if folder.has_ended:
                log.warning("The run in %s has ended; raise train.epochs to go on, or name another folder", folder.path)
                return _result(folder, json.loads((folder.path / "metrics.json").read_text(encoding="utf-8")))
            start = resumption.choose(resume, folder.checkpoints(recipe), ranks)
            for sentence in start.reports:
                log.info("%s", sentence)
            job = assemble(recipe, ranks, encoder)
            if start.place is None:
                _prepare(job)
            return _train(job, data, folder, learnt, start.place)


def _prepare(job: Job) -> None:
    """What a new run starts with besides its initial values."""
    if (source := job.recipe.train.warm_start) is not None:
        with agreed("train.warm_start"):
            place = resumption.named(source)
        about = checkpoint.load(place, job.task, job.encoder, partly=True)
        log.info("Warm start from %s: %d entries, %d left out", place, len(about["entries"]), len(about["skipped"]))
        for entry, why in about["skipped"].items():
            log.info("Left out: %s: %s", entry, why)
    with agreed("vectors"):
        vectors.load_named(job)


def _train(job: Job, data: Data, folder: RunFolder, learnt: Survey, place: Place | None) -> Result:
    reader = data.reader("train", shuffle_rows=job.recipe.data.shuffle_rows)
    optimizer = job.optimizer(reader.num_steps * job.recipe.train.epochs)
    progress = Progress() if place is None else resumption.restore(place, job, optimizer, reader)
    if place is not None and progress.best and place.url != (folder.checkpoints(job.recipe) / place.name).url:
        progress.best, progress.best_valid = {}, None  # its checkpoint belongs to another run
    folder.forget_after(progress.step)
    epochs = range(progress.epoch, 0 if progress.ended else job.recipe.train.epochs + 1)
    if not epochs and not progress.best:
        raise UserError(
            "Nothing is left to train",
            received=f"a checkpoint after {progress.epoch - 1} epochs; train.epochs={job.recipe.train.epochs}",
            fix="raise train.epochs, or begin a new run from it with train.warm_start",
        )
    plans = [resumption.epoch_of(reader, progress, number) for number in epochs]
    with contextlib.closing(data.batches(reader, plans)) as batches, Interruption(job.ranks) as interruption:
        run = _Training(job, data, folder, learnt, reader, optimizer, progress, batches, interruption)
        chosen = strategy.choose(strategy.detect(job.ranks), job.recipe)
        facts = environment(job.ranks, torch.get_num_threads())
        facts["strategy"] = chosen.to_json()
        facts["data_fingerprints"] = {split: found.fingerprint() for split, found in data.sets.items()}
        facts["optimizers"] = job.describe_optimizers()
        facts["communication"] = job.describe_communication()
        folder.write_json("environment.json", facts)
        folder.write_json("plan.json", job.describe_plan())
        _describe_start(job, data, folder, learnt, chosen)
        _store(learnt, folder)
        return _result(folder, run.run(plans))


def _result(folder: RunFolder, final: dict[str, Any]) -> Result:
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


def _describe_start(job: Job, data: Data, folder: RunFolder, learnt: Survey, chosen: strategy.Strategy) -> None:
    rows = ", ".join(f"{split} {found.num_rows:,}" for split, found in data.sets.items())
    log.info("Run folder %s", folder.path)
    for line in chosen.lines:
        log.info("%s", line)
    log.info("Rows: %s", rows)
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
    """One training run from where it stands to the metrics of the best epoch."""

    def __init__(
        self,
        job: Job,
        data: Data,
        folder: RunFolder,
        learnt: Survey,
        reader: Reader,
        optimizer: ModelOptimizer,
        progress: Progress,
        batches: Prefetcher[Batch],
        interruption: Interruption,
    ) -> None:
        self.job, self.data, self.folder, self.learnt = job, data, folder, learnt
        self.reader = reader
        self.optimizer, self.progress, self.interruption = optimizer, progress, interruption
        self.batches = batches  # the batches of all epochs, one epoch after another
        self.settings, self.device = job.recipe.train, job.ranks.device
        self.saving = saving = job.recipe.checkpoint
        touched = None
        if saving.delta_steps:
            touched = TouchedRows(job.embeddings, job.recipe, self.device)
            touched.watch(job.task)
        self.saver = Saver(
            folder.checkpoints(job.recipe),
            job.encoder,
            keep=saving.keep,
            asynchronous=saving.asynchronous,
            touched=touched,
        )
        self.start_s = time.perf_counter() - progress.elapsed_s

    def run(self, epochs: Sequence[Epoch]) -> dict[str, Any]:
        """Train, saving every epoch; then evaluate the best one on the test set."""
        total_steps = self.progress.step + sum(epoch.num_steps - epoch.start_step for epoch in epochs)
        self.optimizer.run_lasts(total_steps)
        warmup_steps = self.job.recipe.optimizer.schedule.warmup_steps
        if self.folder.writes and warmup_steps >= total_steps:
            log.warning("optimizer.schedule: %d warm-up steps, but the run has %d", warmup_steps, total_steps)
        self.saver.prepare(self._state())
        self.reporter = Reporter(self.folder, total_steps)
        with contextlib.closing(self.reporter):
            for epoch in epochs:
                self._end_epoch({"epoch": epoch.number, **self._train_epoch(epoch)})
                if self.progress.ended:
                    break
            self.batches.close()
            self.saver.wait()
            return self._finish()

    def _train_epoch(self, epoch: Epoch) -> dict[str, Any]:
        """One pass over the training data: step reached, mean loss, rows per second of all ranks."""
        self.job.task.train()
        start_s, rows, losses, progress = time.perf_counter(), 0, [], self.progress
        waited_s = self.batches.waited_s
        batches = itertools.islice(self.batches, epoch.num_steps - epoch.start_step)
        with self._pipeline() as pipeline:
            for index in range(epoch.start_step, epoch.num_steps):
                self.job.ranks.at(f"step {progress.step + 1}")
                loss, _ = pipeline.progress(batches)
                losses.append(loss)
                progress.step += 1
                rows += sum(epoch.rows_by_rank(index))
                self.reporter.stepped(epoch.number, progress.step, rows / (time.perf_counter() - start_s))
                is_last = index == epoch.num_steps - 1
                full = self._is_due(self.saving.every_steps)
                saves = (full or self._is_due(self.saving.delta_steps)) and not is_last
                ends = self.interruption.ends(progress.step) and not is_last
                if progress.step % self.settings.log_every_steps == 0 or is_last or saves or ends:
                    mean = self._mean(losses)
                    progress.loss += mean * len(losses)
                    losses = []
                    self.reporter.lost(progress.step, mean, self.optimizer.learning_rates())
                if saves or ends:
                    progress.position = epoch.position(index + 1)
                    self._save(full=full)
                if ends:
                    self._interrupt()
        elapsed_s = time.perf_counter() - start_s
        if not self.settings.shared_batch_statistics:
            average_statistics(self.job.task, self.job.ranks.group)
        mean_loss = progress.loss / max(1, sum(part.steps_done for part in epoch.parts) + epoch.num_steps)
        return {
            "step": progress.step,
            "train_loss": mean_loss,
            "rows_per_s": rows / elapsed_s,
            "reader_wait_share": (self.batches.waited_s - waited_s) / elapsed_s,
        }

    def _end_epoch(self, evaluation: dict[str, Any]) -> None:
        """Evaluate, decide whether this epoch is the best one, and save."""
        progress = self.progress
        valid = self._evaluate("valid") if "valid" in self.data.sets else None
        evaluation |= valid.metrics if valid else {}
        evaluation["elapsed_s"] = time.perf_counter() - self.start_s
        self.reporter.evaluated("valid" if valid else "train", evaluation)
        progress.last, progress.epoch = evaluation, evaluation["epoch"] + 1
        progress.position, progress.loss = None, 0.0
        if self._is_better(evaluation):
            progress.best, progress.best_valid = evaluation, valid
        elif self.settings.patience and evaluation["epoch"] - progress.best["epoch"] >= self.settings.patience:
            log.info("No better %s for %d epochs: stopped", self.settings.monitor, self.settings.patience)
            progress.ended = True
        self._save()
        if not progress.ended and progress.epoch <= self.settings.epochs and self.interruption.ends(progress.step):
            self._interrupt()

    def _is_due(self, every_steps: int | None) -> bool:
        return every_steps is not None and self.progress.step % every_steps == 0

    def _save(self, *, full: bool = True) -> None:
        """Checkpoint the run as it stands; by changes since the last one, where it need not be full."""
        with agreed("run folder"):
            self.folder.require_owned()
        progress, job = self.progress, self.job
        progress.elapsed_s = time.perf_counter() - self.start_s
        needed = {progress.best["step"]} if progress.best else set()
        self.saver.save(progress.step, self._state(), resumption.about(job, self.reader, progress), needed, full=full)

    def _state(self) -> checkpoint.State:
        return checkpoint.state_of(self.job.task, self.job.encoder, resumption.slots(self.job, self.optimizer))

    def _interrupt(self) -> None:
        self.saver.wait()
        place = self.saver.place(self.progress.step)
        log.info("Told to stop: saved after step %d in %s; --resume auto goes on there", self.progress.step, place)
        raise InterruptedRunError(str(place))

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
            UserError: It is not a number, or one that only a diverged model has; on all ranks.
        """
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
        mean = total.item() / len(losses) / self.job.ranks.world_size
        if not math.isfinite(mean):
            raise self._unhealthy("The training loss is not finite", mean)
        if mean > _DIVERGED_LOSS:
            raise self._unhealthy("The training has diverged: its loss is far above that of any guess", mean)
        return mean

    def _evaluate(self, split: Split) -> scoring.Evaluation:
        """Metrics of a split, on all ranks; rank 0 computes them.

        Raises:
            UserError: The model gives the same score to all rows; on all ranks.
        """
        self.job.ranks.at(f"the evaluation on {split} after step {self.progress.step}")
        found = broadcast(scoring.evaluate(self.job.task, self.data, split, self.learnt.items))
        if found.is_constant:
            raise self._unhealthy(f"The model gives the same score to all rows of data.{split}", None)
        return found

    def _unhealthy(self, what: str, received: float | None) -> UserError:
        kept = ([*map(str, checkpoint.complete(self.saver.folder))] or ["none yet"])[-1]
        error = UserError(
            f"{what} at step {self.progress.step}; last good checkpoint: {kept}",
            received=received,
            fix="lower optimizer.sparse.learning_rate or optimizer.dense.learning_rate",
        )
        error.is_printed_here = self.job.ranks.rank == 0
        return error

    def _is_better(self, evaluation: dict[str, Any]) -> bool:
        """Whether this epoch replaces the kept one; where the metric is undefined, the newest epoch counts."""
        if not self.progress.best or "valid" not in self.data.sets:
            return True
        new, old = evaluation[self.settings.monitor], self.progress.best[self.settings.monitor]
        if new is None or old is None:
            return old is None
        return new > old if metrics.METRICS[self.settings.monitor].higher_is_better else new < old

    def _finish(self) -> dict[str, Any]:
        """Evaluate the best epoch on the test set and write metrics.json."""
        best, last = self.progress.best, self.progress.last
        final: dict[str, Any] = {"best_epoch": best["epoch"], "step": best["step"], "epochs": last["epoch"]}
        final["rows_per_s"], final["reader_wait_share"] = last["rows_per_s"], last["reader_wait_share"]
        final["changed"] = {split: dict(sorted(found.items())) for split, found in self.learnt.counters.items()}
        final["tables"] = self.learnt.tables
        evaluations = {"valid": self.progress.best_valid} if self.progress.best_valid else {}
        if "valid" in self.data.sets:
            final["valid"] = {k: v for k, v in best.items() if k in metrics.METRICS}
        if "test" in self.data.sets:
            if last["epoch"] != best["epoch"]:
                checkpoint.load(self.saver.place(best["step"]), self.job.task, self.job.encoder)
            evaluations["test"] = tested = self._evaluate("test")
            final["test"] = tested.metrics
            final["calibration_curve"] = {"test": tested.calibration_curve}
            elapsed_s = time.perf_counter() - self.start_s
            self.reporter.evaluated("test", {**best, **tested.metrics, "elapsed_s": elapsed_s})
        final["traffic"] = {split: found.traffic for split, found in evaluations.items()}
        final["slices"] = {split: found.slices for split, found in evaluations.items() if found.slices}
        final["shared_out"] = shared = self.reader.epoch(0).shared_out()
        self.folder.write_json("metrics.json", final)
        log.info(
            "An epoch: %s rows in %d steps, %s to %s for each rank; left out: %d; empty bags that fill up batches: %s",
            *(f"{shared['rows']:,}", shared["steps"], *(f"{rows:,}" for rows in shared["rows_by_rank"])),
            *(shared["left_out"], f"{shared['empty_bags']:,}"),
        )
        log.info("Training waited for data during %.1f %% of its time", 100 * final["reader_wait_share"])
        return final


def pipelined(job: Job) -> bool:
    """Whether the exchange of ids overlaps with the step before."""
    return strategy.batches_of(job.recipe.train, job.ranks.device.type).overlaps
