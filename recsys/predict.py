"""From a run folder back to a model: metrics of a data set, and one probability per row."""

import contextlib
import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys import checkpoint, scoring, strategy
from recsys.data import columns
from recsys.data.parquet import ParquetData
from recsys.distributed import agreed, alike_on_host, broadcast, process_group
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.frequencies import Frequencies, written_aside
from recsys.job import Data, Job, assemble
from recsys.paths import require_writable
from recsys.recipe import PREDICTION
from recsys.run_folder import RunFolder
from recsys.survey import check, describe

log = logging.getLogger("recsys")

_WRITE_BATCH_ROWS = 65_536


def evaluate(run: str, *, data_path: str | None = None, json_path: str | None = None) -> dict[str, Any]:
    """Metrics of a trained model, with the keys `slices` (or None) and `traffic` of `scoring.Evaluation`.

    Args:
        run: A run folder or a checkpoint inside one.
        data_path: Parquet file or folder; None takes the recipe's test set.
        json_path: Where the metrics are also written.
    """
    with _loaded(run, data_path, json_path, labelled=True) as (job, data):
        folder, _ = RunFolder.open(run)
        with agreed("item counts"):
            items = Frequencies.read(folder.item_counts) if folder.item_counts.exists() else None
        found = broadcast(scoring.evaluate(job.task, data, "test", items))
        result = {**found.metrics, "slices": found.slices, "traffic": found.traffic}
        with agreed("--json"):
            if json_path is not None and job.ranks.rank == 0:
                with written_aside(pathlib.Path(json_path)) as aside:
                    aside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return result


def predict(run: str, *, data_path: str, output: str) -> int:
    """Write one row per input row, in input order: the row's id and group columns and its `probability`.

    Args:
        run: A run folder or a checkpoint inside one.
        data_path: Parquet file or folder; it needs neither label nor group.
        output: Parquet file to write; it is there only when complete.

    Returns:
        Number of rows written.
    """
    with _loaded(run, data_path, output, labelled=False) as (job, data):
        scores = scoring.score(job.task, data, data.reader("test"))
        with agreed("--output"):
            if scores is not None:
                if not np.isfinite(scores.logits).all():
                    raise UserError(
                        "The model's scores are not finite",
                        received=f"row {int(np.argmin(np.isfinite(scores.logits)))}",
                        fix="look for numbers far outside those of the training data",
                    )
                schema = data.sets["test"].schema
                keys = [key for key in job.recipe.key_columns if len(schema.get_all_field_indices(key)) == 1]
                keys = [key for key in keys if columns.is_id(schema.field(key).type)]
                _write(data.sets["test"], keys, scoring.probabilities(scores.logits), pathlib.Path(output))
        return data.sets["test"].num_rows


@contextlib.contextmanager
def _loaded(run: str, data_path: str | None, target: str | None, *, labelled: bool) -> Iterator[tuple[Job, Data]]:
    """The model of a run and a data set that was checked row by row, for the length of the context."""
    with alike_on_host():
        folder, path = RunFolder.open(run)
        recipe = folder.recipe()
        data_path = recipe.paths.get("test") if data_path is None else data_path
        if not data_path:
            raise UserError("The recipe of this run names no test set", received="data.test: null", fix="use --data")
    device = strategy.device_to_read_with(recipe.train.device, len(strategy.gpus()))
    with process_group(device, threads=recipe.train.threads_per_rank, timeout_s=recipe.train.timeout_s) as ranks:
        with agreed("output"):
            if target is not None and ranks.rank == 0:
                require_writable(pathlib.Path(target), pathlib.Path(data_path))
        encoder = Encoder(recipe)
        data = Data.open(recipe, encoder, ranks, {"test": data_path}, labelled=labelled)
        for sentence in describe(check(data)):
            log.info("%s", sentence)
        job = assemble(recipe, ranks, encoder, trains=False)
        checkpoint.load(path, job.task, encoder)
        with agreed("data"):
            if problems := encoder.kind_problems({str(data_path): data.sets["test"].schema}):
                raise UserError.collect("The data does not fit the model", problems)
        yield job, data


def _write(data: ParquetData, keys: list[str], probs: np.ndarray, output: pathlib.Path) -> None:
    """Copy the key columns file by file beside the probabilities, then move the whole file into place."""
    schema = pa.schema([*(data.schema.field(key) for key in keys), pa.field(PREDICTION, pa.float64())])
    start = 0
    with written_aside(output) as aside, pq.ParquetWriter(aside, schema) as writer:
        for file in data.files:
            for rows in pq.ParquetFile(file).iter_batches(_WRITE_BATCH_ROWS, columns=keys):
                part = pa.array(probs[start : start + rows.num_rows])
                copied = [rows.column(key).cast(data.schema.field(key).type) for key in keys]
                writer.write_batch(pa.record_batch([*copied, part], schema=schema))
                start += rows.num_rows
        assert start == len(probs), "one probability per input row"
