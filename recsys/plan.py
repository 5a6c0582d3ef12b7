"""A plan as plain data: which rows and columns of each table live on which rank, in JSON, and whether it is whole.

What a plan costs stands beside it; the fingerprint is over what it decides alone. No torch.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recsys.cluster import RESERVED_SHARE, Cluster, format_bytes
from recsys.errors import UserError, nearest
from recsys.paths import expand_path
from recsys.schema import Table

HOST_CACHED = "fused_uvm_caching"
"""TorchRec's name of the kernel that keeps a table on the host and its hot rows in a cache on the GPU."""

MAX_SHARD_ELEMENTS = 2**31
"""Above it, kernels that count a shard's numbers in 32 bits would fail."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A rectangle of a table on one rank, with what it is expected to cost there.

    Attributes:
        rank: Where it lives.
        row_offset: Its first row.
        rows: Number of rows; 0 on ranks that a small table does not reach.
        col_offset: Its first column.
        cols: Number of columns, padding included.
        bytes: Weights.
        state_bytes: What the optimizer keeps.
        gradient_bytes: Gradient of a replicated table; fused kernels keep none.
        cache_bytes: Hot rows on the GPU, and what their cache needs, where the table lives on the host.
        buffer_bytes: Ids received and vectors made in one step.
        host_bytes: What of all this lies in the host's memory instead of the GPU's.
        lookup_ms: Reading, summing and updating rows, in one step.
        exchange_ms: Ids, vectors and gradients between ranks, in one step.
    """

    rank: int
    row_offset: int
    rows: int
    col_offset: int
    cols: int
    bytes: int
    state_bytes: int = 0
    gradient_bytes: int = 0
    cache_bytes: int = 0
    buffer_bytes: int = 0
    host_bytes: int = 0
    lookup_ms: float = 0.0
    exchange_ms: float = 0.0

    @property
    def device_bytes(self) -> int:
        """Memory of the rank's device; on CPU the rank's own."""
        whole = self.bytes + self.state_bytes + self.gradient_bytes + self.cache_bytes + self.buffer_bytes
        return whole - self.host_bytes

    @property
    def area(self) -> tuple[int, int, int, int]:
        """What part of the table it is."""
        return (self.row_offset, self.rows, self.col_offset, self.cols)


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """One table.

    Attributes:
        name: Its name in the recipe.
        rows: All rows, the reserved ones included.
        dim: Width of a vector as declared.
        width: Width of a stored row, with what rides along and padding.
        kind: How it is split, by the recipe's names.
        kernel: TorchRec's name of what looks it up.
        optimizer: Class of its optimizer.
        shards: Its parts, in TorchRec's order; a replicated table has one per rank.
        cached_share: Share of the rows that the GPU's cache holds; None for tables that live in the rank's own memory.
    """

    name: str
    rows: int
    dim: int
    width: int
    kind: str
    kernel: str
    optimizer: str
    shards: tuple[Shard, ...]
    cached_share: float | None = None

    def gap(self) -> str | None:
        """What is wrong with how the shards cover the table; None when each number is held exactly once."""
        if self.kind == "data_parallel":
            whole = {(0, self.rows, 0, self.width)}
            return None if {s.area for s in self.shards} == whole else "a replicated table is whole on every rank"
        columns: dict[tuple[int, int], list[Shard]] = {}
        for shard in self.shards:
            columns.setdefault((shard.col_offset, shard.cols), []).append(shard)
        if problem := _holes("columns", columns, self.width):
            return problem
        for part in columns.values():
            # An empty shard covers nothing, wherever TorchRec says that it begins.
            if problem := _holes("rows", [(s.row_offset, s.rows) for s in part if s.rows], self.rows):
                return problem
        return None


def _holes(what: str, parts: Iterable[tuple[int, int]], size: int) -> str | None:
    end = 0
    for offset, length in sorted(parts):
        if offset != end:
            return f"{what} {min(offset, end)} to {max(offset, end) - 1} are {'held twice' if offset < end else 'lost'}"
        end += length
    return None if end == size else f"its {what} end at {end} of {size}"


@dataclasses.dataclass(frozen=True)
class Dense:
    """What every rank has beside its tables.

    Attributes:
        bytes: Weights of the dense layers.
        gradient_bytes: Their gradients.
        state_bytes: What their optimizer keeps.
        activation_bytes: What one batch leaves behind for the backward pass.
        compute_ms: Matrix products of one step.
        exchange_ms: The all-reduce of the gradients.
    """

    bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    compute_ms: float = 0.0
    exchange_ms: float = 0.0

    @property
    def device_bytes(self) -> int:
        """Memory of one rank's device."""
        return self.bytes + self.gradient_bytes + self.state_bytes + self.activation_bytes


@dataclasses.dataclass(frozen=True)
class RankLoad:
    """What one rank holds and does: sums over its shards, and the dense part."""

    rank: int
    weight_bytes: int
    state_bytes: int
    buffer_bytes: int
    dense_bytes: int
    device_bytes: int
    host_bytes: int
    lookup_ms: float
    exchange_ms: float
    dense_ms: float

    @property
    def step_ms(self) -> float:
        """One step when nothing overlaps."""
        return self.lookup_ms + self.exchange_ms + self.dense_ms


@dataclasses.dataclass(frozen=True)
class Plan:
    """All tables on all ranks.

    Attributes:
        world_size: Number of ranks.
        devices_per_node: Ranks on one node.
        device: cpu or cuda.
        memory_bytes: Memory of one rank's device, of which `RESERVED_SHARE` stays free.
        batch_size_per_rank: What buffers, activations and times are for.
        tables: In no order that means anything.
        dense: The same on every rank.
        notes: Where the machine's figures come from.
    """

    world_size: int
    devices_per_node: int
    device: str
    memory_bytes: int
    batch_size_per_rank: int
    tables: tuple[TablePlan, ...]
    dense: Dense = Dense()
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of what the plan decides: the same plan has the same on every rank and machine."""
        decided = [
            [t.name, t.rows, t.width, t.kind, t.kernel, t.cached_share, sorted((s.rank, *s.area) for s in t.shards)]
            for t in sorted(self.tables, key=lambda t: t.name)
        ]
        return hashlib.sha256(json.dumps([self.world_size, decided]).encode()).hexdigest()[:16]

    def loads(self) -> list[RankLoad]:
        """What each rank holds and does, in rank order."""
        held: list[list[Shard]] = [[] for _ in range(self.world_size)]
        for shard in (shard for table in self.tables for shard in table.shards):
            held[shard.rank].append(shard)
        return [self._load(rank, shards) for rank, shards in enumerate(held)]

    def _load(self, rank: int, shards: Sequence[Shard]) -> RankLoad:
        return RankLoad(
            rank=rank,
            weight_bytes=sum(s.bytes for s in shards),
            state_bytes=sum(s.state_bytes for s in shards),
            buffer_bytes=sum(s.buffer_bytes + s.gradient_bytes + s.cache_bytes for s in shards),
            dense_bytes=self.dense.device_bytes,
            device_bytes=sum(s.device_bytes for s in shards) + self.dense.device_bytes,
            host_bytes=sum(s.host_bytes for s in shards),
            lookup_ms=sum(s.lookup_ms for s in shards),
            exchange_ms=sum(s.exchange_ms for s in shards),
            dense_ms=self.dense.compute_ms + self.dense.exchange_ms,
        )

    def warnings(self) -> list[str]:
        """What a user should know of a plan that is right as it is."""
        largest = {t.name: max(t.shards, key=lambda s: s.rows * s.cols) for t in self.tables}
        return [
            f"Table {name!r} holds {s.rows * s.cols:,} numbers on rank {s.rank}: above 2^31, where kernels have had "
            "faults; spread it over more ranks, or try it first"
            for name, s in largest.items()
            if s.rows * s.cols > MAX_SHARD_ELEMENTS
        ]

    def summary(self) -> list[str]:
        """Lines for a log: fingerprint, memory, where the tables are."""
        fullest = max(self.loads(), key=lambda load: load.device_bytes)
        names: dict[str, list[str]] = {}
        for table in self.tables:
            where = " on the host, cached" if table.kernel == HOST_CACHED else ""
            names.setdefault(table.kind + where, []).append(table.name)
        kinds = "; ".join(f"{kind}: {', '.join(some)}" for kind, some in names.items())
        return [
            *self.notes,
            f"Plan {self.fingerprint}; {kinds}",
            f"Planned memory: at most {format_bytes(fullest.device_bytes)} of {format_bytes(self.memory_bytes)}"
            + (f", and {format_bytes(fullest.host_bytes)} on the host" if fullest.host_bytes else "")
            + f" (rank {fullest.rank}): tables {format_bytes(fullest.weight_bytes)}, their optimizers "
            f"{format_bytes(fullest.state_bytes)}, buffers {format_bytes(fullest.buffer_bytes)}, dense layers and "
            f"activations {format_bytes(fullest.dense_bytes)}; {RESERVED_SHARE:.0%} is kept free",
            *self.warnings(),
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data; `read` takes it back."""
        ranks = []
        for load in self.loads():
            node = load.rank // self.devices_per_node
            ranks.append({"rank": load.rank, "node": node, **dataclasses.asdict(load), "step_ms": load.step_ms})
        return {
            "fingerprint": self.fingerprint,
            "dense_bytes": self.dense.bytes,
            **dataclasses.asdict(self),
            "ranks": ranks,
        }

    def write(self, path: str | pathlib.Path) -> None:
        """Write the plan as JSON.

        Raises:
            UserError: The file cannot be written.
        """
        try:
            pathlib.Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"The plan cannot be written to {str(path)!r}", received=str(error)) from error

    @classmethod
    def read(cls, path: str | pathlib.Path) -> "Plan":
        """Read a plan; figures that it may lack are zero.

        Raises:
            UserError: The file cannot be read or is no plan.
        """
        try:
            return cls._from_json(json.loads(pathlib.Path(expand_path(str(path))).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{str(path)!r} is no plan",
                received=f"{type(error).__name__}: {error}",
                allowed="plan.json of a run, or a file from `recsys plan --json`",
                fix="name such a file in train.plan, or remove the key to plan anew",
            ) from error

    @classmethod
    def _from_json(cls, content: Mapping[str, Any]) -> "Plan":
        tables = []
        for table in content["tables"]:
            shards = tuple(_typed(Shard, shard) for shard in table["shards"])
            tables.append(_typed(TablePlan, {**table, "shards": shards}))
        given = {**content, "tables": tuple(tables), "dense": _typed(Dense, content.get("dense", {}))}
        return _typed(cls, given | {"notes": ()})

    def check(self, tables: Sequence[Table], widths: Mapping[str, int], cluster: Cluster) -> None:
        """Find everything in which the plan does not fit a recipe and the ranks at hand.

        Args:
            tables: The recipe's tables.
            widths: Their stored widths.
            cluster: The ranks.

        Raises:
            UserError: It lists all of it.
        """
        problems = []
        if self.world_size != cluster.world_size:
            problems.append(f"it is for {self.world_size} ranks. Received: {cluster.world_size} ranks")
        if self.device != cluster.machine.device:
            problems.append(f"it is for {self.device}. Received: {cluster.machine.device}")
        planned, wanted = {t.name: t for t in self.tables}, {t.name: t for t in tables}
        for name in sorted(wanted.keys() - planned.keys()):
            problems.append(f"it lacks the table {name!r}")
        for name in sorted(planned.keys() - wanted.keys()):
            problems.append(f"the recipe has no table {name!r}.{nearest(name, wanted)}")
        for name in sorted(planned.keys() & wanted.keys()):
            have, want = (planned[name].rows, planned[name].width), (wanted[name].rows, widths[name])
            if have != want:
                problems.append(
                    f"table {name!r} is {have[0]} x {have[1]} there, and {want[0]} x {want[1]} in the recipe"
                )
            elif problem := planned[name].gap():
                problems.append(f"table {name!r}: {problem}")
            ranks = sorted({s.rank for s in planned[name].shards} - set(range(self.world_size)))
            if ranks:
                problems.append(f"table {name!r} has shards on ranks that do not exist: {ranks}")
        if problems:
            raise UserError.collect("The plan does not fit", problems, fix="plan anew, or change train.plan")


def _typed(cls: Any, given: Mapping[str, Any]) -> Any:
    """An instance from the keys that its class knows; numbers must be numbers."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name, value in given.items():
        if name in fields and fields[name].type in (int, float) and not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, not {value!r}")
    return cls(**{name: value for name, value in given.items() if name in fields})
