"""From a run folder back to a model: metrics of a data set, and one probability per row."""

import json
import pathlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recsys import checkpoint, scoring
from recsys.data.parquet import ParquetData
from recsys.distributed import broadcast, process_group
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.job import Data, assemble
from recsys.run_folder import RunFolder

_WRITE_BATCH_ROWS = 65_536


def evaluate(run: str, *, data_path: str | None = None, json_path: str | None = None) -> dict[str, Any]:
    """Metrics of a trained model.

    Args:
        run: A run folder or a checkpoint inside one.
        data_path: Parquet file or folder; None takes the recipe's test set, else its validation set.
        json_path: Where the metrics are also written.
    """
    folder, path = RunFolder.open(run)
    recipe = folder.recipe()
    data_path = data_path or recipe.paths.get("test") or recipe.paths.get("valid")
    if data_path is None:
        raise UserError("The recipe names no test or validation set", fix="give one with --data")
    with process_group(recipe.train.device) as ranks:
        encoder = Encoder(recipe)
        data = Data(recipe, encoder, ranks, {"test": data_path})
        job = assemble(recipe, ranks, encoder)
        checkpoint.load(path, job.task, encoder)
        found = broadcast(scoring.evaluate(job.task, data, data.reader("test")))
        if json_path and ranks.rank == 0:
            pathlib.Path(json_path).write_text(json.dumps(found.metrics, indent=1) + "\n", encoding="utf-8")
        return found.metrics


def predict(run: str, *, data_path: str, output: str) -> int:
    """Write one row per input row, in input order: the recipe's id columns of the row and its `probability`.

    Args:
        run: A run folder or a checkpoint inside one.
        data_path: Parquet file or folder; it needs no label.
        output: Parquet file to write; it is there only when complete.

    Returns:
        Number of rows written.
    """
    folder, path = RunFolder.open(run)
    recipe = folder.recipe()
    with process_group(recipe.train.device) as ranks:
        encoder = Encoder(recipe)
        data = Data(recipe, encoder, ranks, {"test": data_path}, labelled=False)
        job = assemble(recipe, ranks, encoder)
        checkpoint.load(path, job.task, encoder)
        scores = scoring.score(job.task, data, data.reader("test"))
        if scores is not None:
            _write(data.sets["test"], recipe.key_columns, scoring.probabilities(scores[0]), pathlib.Path(output))
        return broadcast(data.sets["test"].num_rows)


def _write(data: ParquetData, keys: tuple[str, ...], probs: Any, output: pathlib.Path) -> None:
    """Copy the key columns file by file beside the probabilities, then move the whole file into place."""
    aside = output.with_name(output.name + ".partial")
    schema = pa.schema([*(data.schema.field(key) for key in keys), pa.field("probability", pa.float64())])
    start = 0
    with pq.ParquetWriter(aside, schema) as writer:
        for file in data.files:
            for rows in pq.ParquetFile(file).iter_batches(_WRITE_BATCH_ROWS, columns=list(keys)):
                part = pa.array(probs[start : start + rows.num_rows])
                writer.write_batch(pa.record_batch([*(rows.column(key) for key in keys), part], schema=schema))
                start += rows.num_rows
    assert start == len(probs), "one probability per input row"
    aside.replace(output)
