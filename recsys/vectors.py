"""Pretrained vectors: written by raw id into the rows that a rank owns, before training starts."""

import dataclasses
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys import ids as policies
from recsys.data import columns
from recsys.errors import UserError
from recsys.features import CrossFeature
from recsys.paths import expand_path
from recsys.recipe import Recipe

if TYPE_CHECKING:  # `recsys check` reads files where torchrec is not installed.
    from recsys.encoder import Encoder
    from recsys.job import Job

log = logging.getLogger("recsys")

_COLUMNS = ("id", "vector")
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What became of pretrained vectors.

    Attributes:
        num_written: Ids whose row holds their vector now.
        num_shared: Ids that fall on the row of an id given before them, whose vector it keeps.
        unknown: Ids that have no row: outside an `exact` table, or not among the hot ids of a `hot_cold` one.
    """

    num_written: int
    num_shared: int
    unknown: list[Any]


def load_vectors(job: "Job", table: str, ids: Sequence[int] | Sequence[str] | pa.Array, vectors: np.ndarray) -> Loaded:
    """Write vectors into a table, on all ranks; each writes the rows that it owns.

    Extra columns (first-order weights) and the rows of other ids stay as they are.

    Args:
        job: The assembled model; its encoder knows the vocabularies.
        table: Name of the table.
        ids: n raw ids, integers or text as in the training data; the same on every rank.
        vectors: (n, dim) finite numbers.

    Raises:
        UserError: They do not fit the table.
    """
    array = ids if isinstance(ids, pa.Array) else pa.array(ids)
    encoder, settings = job.encoder, job.recipe.table_settings(table)
    _require_fit(encoder, job.recipe, table, array, vectors)
    rows = encoder.policy(table)(torch.tensor(columns.id_keys(array)[0]))[0].numpy()
    first_shared = policies.FIRST_ROW + settings.own_rows
    is_known = rows != policies.UNKNOWN
    if settings.ids == "hot_cold":
        is_known &= rows < first_shared
    kept = np.flatnonzero(is_known)
    unique, places = np.unique(rows[kept], return_index=True)  # the first of equal rows
    _write(job, table, unique, torch.from_numpy(np.ascontiguousarray(vectors[kept[places]], dtype=np.float32)))
    unknown = array.filter(pa.array(~is_known)).to_pylist()
    return Loaded(len(unique), len(kept) - len(unique), unknown)


def load_named(job: "Job") -> None:
    """Load the files that the recipe names, and log what was found in them."""
    for table in job.recipe.inputs.tables:
        path = job.recipe.table_settings(table.name).vectors
        if path is None:
            continue
        try:
            ids, values = _read(expand_path(path), table.dim)
            loaded = load_vectors(job, table.name, ids, values)
        except UserError as error:
            raise UserError(f"tables.{table.name}.vectors {path}: {error}") from error
        if job.ranks.rank == 0:
            log.info("Vectors of table %s: %s", table.name, f"{loaded.num_written:,} of {len(ids):,} ids written")
            if loaded.num_shared:
                log.info("Vectors of table %s: %d ids share a row with one before them", table.name, loaded.num_shared)
            if loaded.unknown:
                shown = f"{loaded.unknown[:_SHOWN]}{' ...' if len(loaded.unknown) > _SHOWN else ''}"
                log.warning("Vectors of table %s: %d unknown ids: %s", table.name, len(loaded.unknown), shown)


def file_problems(recipe: Recipe) -> Iterator[str]:
    """What is wrong with the files of vectors that a recipe names, as far as their metadata tells."""
    for table in recipe.inputs.tables:
        path = recipe.table_settings(table.name).vectors
        try:
            if path is not None:
                _require_columns(expand_path(path), table.dim)
        except UserError as error:
            yield f"tables.{table.name}.vectors {path}: {error}"


def _require_columns(path: str, dim: int) -> None:
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowInvalid) as error:
        received = "no such file" if not pathlib.Path(path).is_file() else " ".join(str(error).split())
        raise UserError("It cannot be read", received=received, fix="name a parquet file") from error
    if missing := [name for name in _COLUMNS if name not in schema.names]:
        raise UserError(f"It lacks columns: {missing}", received=schema.names, allowed=f"{list(_COLUMNS)} and others")
    identifier, vector = (schema.field(name).type for name in _COLUMNS)
    if not columns.is_id(identifier):
        raise UserError("Its column `id` holds no ids", received=str(identifier), allowed="integers or text")
    if not columns.is_list(vector) or not columns.is_number(vector.value_type):
        raise UserError("Its column `vector` holds no vectors", received=str(vector), allowed="lists of numbers")
    if isinstance(vector, pa.FixedSizeListType) and vector.list_size != dim:
        raise UserError("Its vectors have another width", received=vector.list_size, allowed=f"the table's dim, {dim}")


def _read(path: str, dim: int) -> tuple[pa.Array, np.ndarray]:
    _require_columns(path, dim)
    table = pq.read_table(path, columns=list(_COLUMNS))
    lengths, values = columns.list_parts(columns.single_array(table, "vector"))
    if (lengths != dim).any():
        received = sorted(set(lengths.tolist()))
        raise UserError("Its vectors have another width", received=received[:_SHOWN], allowed=f"the table's dim, {dim}")
    return columns.single_array(table, "id"), values.cast(pa.float32()).to_numpy(zero_copy_only=False).reshape(-1, dim)


def _require_fit(encoder: "Encoder", recipe: Recipe, table: str, ids: pa.Array, vectors: np.ndarray) -> None:
    settings, inputs = recipe.table_settings(table), [i for i in recipe.id_inputs if i.table == table]
    if vectors.shape != (len(ids), settings.dim):
        raise UserError(
            f"The vectors do not fit the table {table!r}",
            received=f"shape {tuple(vectors.shape)} for {len(ids)} ids",
            allowed=f"({len(ids)}, {settings.dim}): one row per id, as wide as the table's `dim`",
        )
    if not np.isfinite(vectors).all():
        bad = int(np.argmin(np.isfinite(vectors).all(axis=1)))
        raise UserError("A vector is not finite", received=f"id {ids[bad].as_py()!r}", fix="leave that id out")
    if ids.null_count:
        raise UserError("An id is null", received=f"{ids.null_count} nulls", fix="leave them out")
    if any(isinstance(i.feature, CrossFeature) for i in inputs):
        raise UserError(f"The ids of {table!r} are crosses, which have no raw id", fix="choose another table")
    if settings.ids == "exact" and columns.is_text(ids.type):
        raise UserError(f"The ids of {table!r} are integers", received="text", fix=f"give 0..{settings.rows - 1}")
    for i in inputs:
        if i.raw and (problems := encoder.kind_problems({"the vectors": pa.schema([(i.name, ids.type)])})):
            raise UserError.collect("The ids of the vectors do not fit", problems)


@torch.no_grad()
def _write(job: "Job", table: str, rows: np.ndarray, vectors: torch.Tensor) -> None:
    """Copy vectors into those of the sorted rows that this rank holds, all columns that it holds of them."""
    from recsys.embedding import table_of_parameter

    for key, value in job.task.state_dict().items():
        if table_of_parameter(key) != table:
            continue
        sharded = hasattr(value, "local_shards")
        for shard in value.local_shards() if sharded else [value]:
            row, column = shard.metadata.shard_offsets if sharded else (0, 0)
            target = shard.tensor if sharded else shard
            first, last = np.searchsorted(rows, [row, row + target.shape[0]])
            part = vectors[first:last, column : column + target.shape[1]]  # padding and extra columns lie behind it
            target[torch.from_numpy(rows[first:last] - row), : part.shape[1]] = part.to(target.device, target.dtype)
