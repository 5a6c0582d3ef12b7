"""The rows that an incremental checkpoint has changed, as one parquet file: what refreshes a serving store."""

import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from recsys import checkpoint, deltas, ids, models
from recsys.embedding import Embeddings
from recsys.errors import UserError
from recsys.features import CrossFeature
from recsys.frequencies import written_aside
from recsys.recipe import Recipe
from recsys.run_folder import RunFolder
from recsys.storage import Place

SCHEMA = pa.schema(
    [("table", pa.string()), ("row", pa.int64()), ("id", pa.int64()), ("vector", pa.large_list(pa.float32()))]
)


def write(run: str, output: str, *, step: int | None = None) -> int:
    """Write the changed rows of one delta of a run: `table, row, id, vector`; returns how many.

    `id` is the id that owns the row: of `exact` tables, and the hot ones of `hot_cold` tables. Of text it is the key,
    the hash that `docs/ids.md` describes. It is null for rows that are shared or reserved, and in tables of crosses.
    `vector` has the table's `dim` numbers and behind them the extra ones of the model, such as first-order weights.

    Args:
        run: A run folder.
        output: Parquet file to write; it is there only when complete.
        step: Step of the delta; None: the newest checkpoint.

    Raises:
        UserError: There is no such checkpoint, it is a full one, or it cannot be read.
    """
    folder, _ = RunFolder.open(run)
    recipe = folder.recipe()
    place, _ = checkpoint.newest(folder.checkpoints(recipe))
    if step is not None or place is None:
        place = folder.checkpoints(recipe) / checkpoint.step_name(step or 0)
    num_rows = 0
    with written_aside(pathlib.Path(output)) as aside, pq.ParquetWriter(aside, SCHEMA) as writer:
        for part in tables(place, recipe):
            writer.write_table(part)
            num_rows += part.num_rows
    return num_rows


def tables(place: Place, recipe: Recipe) -> list[pa.Table]:
    """Of each table with changed rows in a delta, these rows, in the columns of `SCHEMA`.

    Args:
        place: The delta.
        recipe: That of its run.

    Raises:
        UserError: It is no delta, or cannot be read.
    """
    about = checkpoint.chain(place)[-1].about
    if "delta" not in about:
        raise UserError(
            "It is a full checkpoint, which does not say what has changed",
            received=str(place),
            allowed="an incremental one, as checkpoint.delta_steps makes them",
            fix="name one with --step, or train with checkpoint.delta_steps",
        )
    delta, entries = about["delta"], about["entries"]
    weights = {table: name for name in delta["by_row"] if (table := _weights_of(name)) in delta["rows"]}
    stretches = deltas.stretches_of(delta, weights.values())
    embeddings = models.build(recipe.inputs, recipe.model, table_device="meta").embeddings
    assert isinstance(embeddings, Embeddings), "every model keeps its tables in `embeddings`"
    dtypes = {t.name: torch.float16 if t.dtype == "fp16" else torch.float32 for t in recipe.inputs.tables}
    state: dict[str, Any] = {f"rows/{table}": torch.empty(delta["rows"][table], dtype=torch.int64) for table in weights}
    for stretch in stretches:
        state[stretch.name] = torch.empty(stretch.shape, dtype=dtypes[_weights_of(stretch.entry)])
    for table in weights:
        for name in _index_entries(table):
            if name in entries:
                state[name] = torch.empty(entries[name], dtype=torch.int64)
    try:
        with checkpoint.quiet():
            dcp.load(state, storage_reader=place.reader(), no_dist=True)
    except CheckpointException as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{place} is damaged", received=reason, fix="choose another step with --step") from error
    found = []
    for table, entry in sorted(weights.items()):
        rows = state[f"rows/{table}"]
        whole = torch.zeros(len(rows), entries[entry][1])
        for s in stretches:
            if s.entry == entry:
                whole[s.start : s.start + s.shape[0], s.column : s.column + s.shape[1]] = state[s.name].float()
        width = recipe.inputs.table(table).dim + embeddings.extra_columns
        found.append(_table(table, rows.numpy(), _ids(recipe, table, rows, state), whole[:, :width].numpy()))
    return found


def _weights_of(name: str) -> str:
    return (deltas.table_of_entry(name) or "") if name.startswith("model/") else ""


def _index_entries(table: str) -> tuple[str, str]:
    return f"encoder/policies.table_{table}.keys", f"encoder/policies.table_{table}.rows"


def _ids(recipe: Recipe, table: str, rows: torch.Tensor, state: dict[str, Any]) -> pa.Array:
    """(n,) ids that own the rows, null where none does."""
    settings, places = recipe.table_settings(table), rows.numpy() - ids.FIRST_ROW
    if any(isinstance(i.feature, CrossFeature) for i in recipe.id_inputs if i.table == table):
        return pa.nulls(len(rows), pa.int64())
    is_owned = (places >= 0) & (places < settings.own_rows)
    owners = places
    if settings.ids == "hot_cold":
        keys, hot_rows = (state[name].numpy() for name in _index_entries(table))
        is_hot = hot_rows >= 0
        owner = np.zeros(settings.own_rows, dtype=np.int64)
        is_known = np.zeros(settings.own_rows, dtype=bool)
        owner[hot_rows[is_hot] - ids.FIRST_ROW] = keys[is_hot]
        is_known[hot_rows[is_hot] - ids.FIRST_ROW] = True
        is_owned[is_owned] = is_known[places[is_owned]]
        owners = np.zeros(len(rows), dtype=np.int64)
        owners[is_owned] = owner[places[is_owned]]
    return pa.array(owners, mask=~is_owned)


def _table(name: str, rows: np.ndarray, owners: pa.Array, vectors: np.ndarray) -> pa.Table:
    offsets = np.arange(len(rows) + 1) * vectors.shape[1]
    lists = pa.LargeListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(vectors).reshape(-1)))
    names = pa.array([name]).take(pa.array(np.zeros(len(rows), dtype=np.int64)))
    return pa.Table.from_arrays([names, pa.array(rows), owners, lists], schema=SCHEMA)
