"""What a recipe says of one table: which row an id reads, where the rows live, who trains them."""

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import pydantic

from recsys.features import Count, Settings, Text
from recsys.optimizer_settings import MAX_DENSE_WEIGHTS, Dtype, OwnOptimizer, TableUpdate, choices

RESERVED_ROWS = 3
"""Rows in front of every table: 0 padding (never looked up), 1 missing, 2 unknown. `recsys.ids` documents them."""

MAX_WIDTH = 2**16
_MAX_ROWS = 2**40  # beyond any use, within what int64 can count

ShardingKind = Literal["auto", "row_wise", "table_wise", "column_wise", "table_row_wise", "grid", "data_parallel"]


class TableSettings(Settings):
    """How raw ids become rows of a table, and where the rows live."""

    ids: Literal["exact", "hashed", "hot_cold"] = "hashed"
    """`exact`: an id 0..rows-1 is its own row. `hashed`: any integer or string, into `rows` rows. `hot_cold`: ids that
    training saw often own rows, all others share hashed ones."""
    rows: int = pydantic.Field(default=100_000, ge=1, le=_MAX_ROWS)
    """Rows for ids (`exact` and `hashed`). Three rows for padding, missing and unknown come on top in any table."""
    hot: int = pydantic.Field(default=100_000, ge=0, le=2**27)
    """Most ids that own a row (`hot_cold`): the most frequent ones. Every rank holds their keys, 16 bytes each."""
    min_count: Count = 2
    """Ids that training saw less often stay cold (`hot_cold`)."""
    cold: int = pydantic.Field(default=10_000, ge=0, le=_MAX_ROWS)
    """Rows that all other ids share (`hot_cold`); 0 gives them the one row for unknown ids."""
    cold_hashes: Literal[1, 2] = 1
    """Shared rows that a cold id reads; with 2, the sum of two rows, one from each half of them."""
    bad_ids: Literal["error", "unknown", "clamp"] = "error"
    """What an id outside 0..rows-1 does (`exact`): end the run, read the row for unknown ids, or the nearest id's row;
    the latter two are counted."""
    dim: int = pydantic.Field(default=16, ge=1, le=MAX_WIDTH)
    """Width of a vector; any width up to 65536."""
    init_std: float = pydantic.Field(default=0.01, ge=0)
    """Standard deviation of the normal distribution that the vectors start from."""
    l2: float = pydantic.Field(default=0.0, ge=0)
    """Adds l2 / 2 * |vector|^2 to a row's loss for every vector that it looks up; other rows are not pulled."""
    optimizer: OwnOptimizer = None
    """What trains this table: a name, or settings that replace those of `optimizer.sparse`; None: those."""
    freeze: bool = False
    """The table keeps its values: those of `vectors`, or the initial ones. `optimizer` and `l2` then do nothing."""
    dtype: Dtype = "fp32"
    """Of the stored weights; vectors are looked up as fp32 in any case."""
    vectors: Text | None = None
    """Parquet file with the columns `id` and `vector` (lists of `dim` numbers), which replace initial values when
    training starts."""
    sharding: ShardingKind = "auto"
    """How the table is split over ranks; `auto` leaves it to the planner."""
    placement: Literal["auto", "device", "host_cached"] = "auto"
    """`host_cached` keeps the table in the host's memory and its hot rows in a cache on the GPU; `auto` does so where
    the GPUs' memory does not suffice."""

    @property
    def id_rows(self) -> int:
        """Rows for ids, reserved ones left out."""
        return self.hot + self.cold if self.ids == "hot_cold" else self.rows

    @property
    def own_rows(self) -> int:
        """Rows that belong to one id each; they come first."""
        return {"exact": self.rows, "hashed": 0, "hot_cold": self.hot}[self.ids]

    @property
    def num_hashes(self) -> int:
        """Rows that an id without a row of its own reads."""
        return self.cold_hashes if self.ids == "hot_cold" else 1

    @property
    def second_row(self) -> int | None:
        """First of the rows that second hashes fall on, in the stored table; None where there is one hash."""
        return (
            RESERVED_ROWS + self.hot + (self.cold + 1) // 2
            if self.ids == "hot_cold" and self.cold_hashes == 2
            else None
        )


KINDS: tuple[str, ...] = get_args(ShardingKind)[1:]
"""The ways to split a table, without `auto`."""

_OF_A_HISTORY = "TorchRec cannot do this with the table of a history that the model attends to"
_FP16_REPLICA = "Replicas of a table are trained by torch, whose gradients would be fp16 too"


def excluded_kinds(table: TableSettings, update: TableUpdate, *, attended: bool) -> dict[str, str]:
    """Sharding kind -> why this table cannot be split so.

    Args:
        table: The table.
        update: How it is trained.
        attended: Whether the model reads it event by event.
    """
    excluded = dict(update.support.excluded)
    if attended:
        excluded |= dict.fromkeys(("data_parallel", "table_row_wise", "grid"), _OF_A_HISTORY)
    if table.dtype == "fp16":
        excluded["data_parallel"] = _FP16_REPLICA
    return excluded


def table_problems(
    name: str, table: TableSettings, update: TableUpdate, device: str, excluded: Mapping[str, str]
) -> Iterator[str]:
    """What is impossible about the training of one table.

    Args:
        name: Of the table.
        table: Its settings.
        update: How it is trained.
        device: `train.device`.
        excluded: Sharding kind -> why it cannot be split so.
    """
    key = f"tables.{name}"
    if update.name not in (*choices(device), "frozen"):
        yield (
            f"{key}.optimizer: {update.name} trains tables on CUDA devices only. Received: train.device={device}. "
            f"Allowed: {', '.join(choices(device))}; or train.device=cuda"
        )
    if table.optimizer is not None and table.optimizer.eps is not None and update.eps is None and not table.freeze:
        yield f"{key}.optimizer.eps: {update.name} reads none. Do: remove it"
    weights = table.id_rows * table.dim
    if update.name == "dense" and weights > MAX_DENSE_WEIGHTS:
        yield (
            f"{key}.optimizer: dense keeps the table, its gradients and the optimizer's state whole on every rank, for "
            f"small tables. Received: {weights:,} weights. Allowed: up to {MAX_DENSE_WEIGHTS:,}, or "
            f"{', '.join(n for n in choices(device) if n != 'dense')}"
        )
    allowed = [kind for kind in KINDS if kind not in excluded]
    if not allowed:  # `dense` alone leaves one kind, so that one more reason leaves none
        yield (
            f"{key}.optimizer: dense needs replicas of the table. {excluded['data_parallel']}. Received: dense. "
            f"Allowed: {', '.join(n for n in choices(device) if n != 'dense')}"
        )
    elif table.sharding in excluded:
        yield (
            f"{key}.sharding: {excluded[table.sharding]}. Received: {table.sharding}. "
            f"Allowed: {', '.join(['auto', *allowed])}"
        )
