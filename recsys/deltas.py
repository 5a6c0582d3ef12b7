"""Incremental checkpoints: the rows of tables that steps have touched, written and read under any plan.

Entries of a delta beside those that every checkpoint holds (`checkpoint.py`), which are small and written whole:

    rows/<table>                     (n,) int64 touched rows, ascending
    touched/<start>.<column>/<name>  weights, or a slot of the optimizer, of a stretch of these rows: `name` is that of
                                     the entry in a full checkpoint, `start` the place of its first row in rows/<table>

A shard writes one stretch of every entry of its table: touched rows are numbered alike on all ranks.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.data.batch import Batch
from recsys.distributed import gather
from recsys.embedding import Embeddings, table_of_parameter
from recsys.recipe import Recipe

State = dict[str, Any]


class TouchedRows:
    """Notes the rows that training looks up; only they, and all state that belongs to them, change in a step.

    One byte per row of the tables on each rank: what costs least in a step, whatever the plan.

    Attributes:
        tables: Tables that change by rows. Those trained `dense` change as a whole in every step and are left out.
    """

    def __init__(self, embeddings: Embeddings, recipe: Recipe, device: torch.device) -> None:
        """Args: the tables, who updates them, and where the ids of a batch are."""
        inputs = embeddings.inputs
        updates = {table.name: recipe.table_update(table.name).name for table in inputs.tables}
        self.tables = tuple(name for name, update in updates.items() if update != "dense")
        self._starts, num_rows = {}, 0
        for table in inputs.tables:
            if updates[table.name] not in ("dense", "frozen"):
                self._starts[table.name] = num_rows
                num_rows += table.rows
        self._num_rows = {table.name: table.rows for table in inputs.tables}
        layout = embeddings.layout
        self._tables_of = {name: inputs.table_of(name).name for name in (*layout.pooled, *layout.sequence)}
        self._touched = torch.zeros(num_rows, dtype=torch.bool, device=device)

    def watch(self, task: nn.Module) -> None:
        """Note the batches of a model's training steps from now on.

        At the model itself, since pipelines fetch batches long before they train on them.
        """

        def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if module.training:
                self.note(arguments[0])

        task.register_forward_pre_hook(note)

    def note(self, batch: Batch) -> None:
        """Note the rows of a batch of this rank."""
        for features in (batch.pooled, batch.sequence):
            names = features.keys()
            values, ends = features.values(), features.offset_per_key()
            for place, name in enumerate(names):
                start = self._starts.get(self._tables_of[name])
                if start is not None:
                    self._touched[values[ends[place] : ends[place + 1]].long() + start] = True

    def clear(self) -> None:
        """Begin anew: a full checkpoint has been taken."""
        self._touched.zero_()

    def take(self) -> dict[str, Tensor]:
        """Table -> (n,) ascending int64 rows that any rank has noted, on the CPU; begin anew. From all ranks."""
        rows = self._of_all_ranks(self._touched.nonzero().squeeze(1)).cpu()
        self.clear()
        found = {name: rows.new_empty(0) for name in self.tables}
        for name, start in self._starts.items():
            low, high = torch.searchsorted(rows, torch.tensor([start, start + self._num_rows[name]])).tolist()
            found[name] = rows[low:high] - start
        return found

    def _of_all_ranks(self, mine: Tensor) -> Tensor:
        if dist.get_world_size() == 1:
            return mine
        sizes = gather(len(mine))
        padded = mine.new_zeros(max(sizes))
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).unique()


@dataclasses.dataclass
class Stretch:
    """Where an entry `touched/...` of a delta belongs.

    Attributes:
        entry: The entry of a full checkpoint.
        start: Place of its first row in `rows/<table>`.
        column: First column; 0 for slots with one number per row.
        shape: Its shape.
        first: First row.
        last: Last row.
    """

    entry: str
    start: int
    column: int
    shape: list[int]
    first: int
    last: int

    @property
    def name(self) -> str:
        """Its name in the delta."""
        return f"touched/{self.start}.{self.column}/{self.entry}"


class _Shard(NamedTuple):
    tensor: Tensor
    row: int
    column: int


def table_of_entry(name: str) -> str | None:
    """The table that an entry of a checkpoint holds weights of, or a slot with a number or more for each row."""
    kind, _, rest = name.partition("/")
    parameter = rest.rpartition("/")[0] if kind == "optimizer" else rest
    return table_of_parameter(parameter) if kind in ("model", "optimizer") else None


def of_state(state: State, touched: Mapping[str, Tensor]) -> tuple[State, dict[str, Any]]:
    """What a delta holds, copied, so that it stays what it is; and what its marker says of it. From all ranks.

    Args:
        state: All of a checkpoint, from `checkpoint.state_of`.
        touched: From `TouchedRows.take`, of all tables that change by rows.
    """
    delta: State = {f"rows/{table}": rows for table, rows in touched.items() if len(rows)}
    stretches, by_row = [], []
    for name, value in state.items():
        table = table_of_entry(name)
        if table is None or table not in touched:
            assert not hasattr(value, "local_shards"), f"{name} is sharded, but its rows are not known"
            delta[name] = value.detach().clone()
            continue
        by_row.append(name)
        for shard in _written_shards(value):
            assert len(shard.tensor) == 0 or shard.tensor.dim() > 0, f"{name} has no rows"
            low, high = _inside(touched[table], shard)
            if low == high:
                continue
            picked = shard.tensor.detach().index_select(
                0, (touched[table][low:high] - shard.row).to(shard.tensor.device)
            )
            ends = touched[table][low].item(), touched[table][high - 1].item()
            stretches.append(Stretch(name, low, shard.column, list(picked.shape), *map(int, ends)))
            delta[stretches[-1].name] = picked
    everywhere = [stretch for found in gather([dataclasses.asdict(s) for s in stretches]) for stretch in found]
    about = {
        "by_row": sorted(by_row),
        "rows": {table: len(rows) for table, rows in touched.items() if len(rows)},
        "stretches": everywhere,
    }
    return delta, about


def stretches_of(about: Mapping[str, Any], names: Iterable[str]) -> list[Stretch]:
    """The stretches of some entries, from what the marker says of a delta."""
    wanted = set(names)
    return [Stretch(**stored) for stored in about["stretches"] if stored["entry"] in wanted]


class Changes:
    """A delta on its way into live tensors: load `buffers`, then call `apply`.

    Attributes:
        buffers: Memory for the entries of the delta that rows of this rank are in, by name.
    """

    def __init__(self, state: State, about: Mapping[str, Any]) -> None:
        """Args: the entries that change by rows, live; what the marker says of the delta."""
        self._state = state
        self._stretches = [
            stretch
            for stretch in stretches_of(about, state)
            if any(_meets(stretch, shard) for shard in _shards(state[stretch.entry]))
        ]
        tables = {table_of_entry(stretch.entry) for stretch in self._stretches}
        self.buffers: State = {
            f"rows/{table}": torch.empty(n, dtype=torch.int64) for table, n in about["rows"].items() if table in tables
        }
        for stretch in self._stretches:
            dtype = next(_shards(state[stretch.entry])).tensor.dtype
            self.buffers[stretch.name] = torch.empty(stretch.shape, dtype=dtype)

    @torch.no_grad()
    def apply(self) -> None:
        """Put what was loaded into its rows."""
        for stretch in self._stretches:
            values = self.buffers[stretch.name]
            rows = self.buffers[f"rows/{table_of_entry(stretch.entry)}"][stretch.start :][: len(values)]
            for shard in _shards(self._state[stretch.entry]):
                if not _meets(stretch, shard):
                    continue
                low, high = _inside(rows, shard)
                target, part = shard.tensor, values[low:high]
                if values.dim() > 1:
                    first = max(stretch.column, shard.column)
                    last = min(stretch.column + values.shape[1], shard.column + target.shape[1])
                    target = target[:, first - shard.column : last - shard.column]
                    part = part[:, first - stretch.column : last - stretch.column]
                target[(rows[low:high] - shard.row).to(target.device)] = part.to(target.device)


def _shards(value: Any) -> Iterator[_Shard]:
    if not hasattr(value, "local_shards"):
        yield _Shard(value, 0, 0)
        return
    for shard in value.local_shards():
        row, column = [*shard.metadata.shard_offsets, 0][:2]
        yield _Shard(shard.tensor, row, column)


def _written_shards(value: Any) -> Iterator[_Shard]:
    """Those that this rank writes: of replicas, the first rank alone."""
    if hasattr(value, "local_shards") or dist.get_rank() == 0:
        yield from _shards(value)


def _inside(rows: Tensor, shard: _Shard) -> tuple[int, int]:
    """Which stretch of ascending rows lies in a shard."""
    low, high = torch.searchsorted(rows, torch.tensor([shard.row, shard.row + shard.tensor.shape[0]])).tolist()
    return low, high


def _meets(stretch: Stretch, shard: _Shard) -> bool:
    if stretch.last < shard.row or stretch.first >= shard.row + shard.tensor.shape[0]:
        return False
    if shard.tensor.dim() == 1:
        return True
    return stretch.column < shard.column + shard.tensor.shape[1] and shard.column < stretch.column + stretch.shape[1]
