"""Which optimizer trains what: the settings, what each optimizer of a table can do, and what is refused and why.

No torch here, like in `recsys.recipe`. docs/optimizers.md shows `SUPPORT` as a table.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import pydantic

from recsys.features import Settings
from recsys.schedule import Schedule

MAX_DENSE_WEIGHTS = 10_000_000
"""Largest table with `optimizer: dense`, in weights: with gradients and Adam's state, 160 MB on every rank, of which
40 MB are exchanged in every step."""

FusedName = Literal["rowwise_adagrad", "adagrad", "sgd", "adam"]
Device = Literal["cpu", "cuda"]
Dtype = Literal["fp32", "fp16"]


@dataclasses.dataclass(frozen=True)
class Support:
    """What one optimizer of a table is and can do.

    Attributes:
        devices: Where it exists; "cuda" alone has never been run.
        dtypes: Of the tables that it trains.
        state: What it keeps beside the weights.
        has_eps: Whether it reads `eps`.
        excluded: Sharding kind -> why a table that it trains cannot be split so.
    """

    devices: tuple[Device, ...]
    dtypes: tuple[Dtype, ...]
    state: str
    has_eps: bool
    excluded: Mapping[str, str] = dataclasses.field(default_factory=dict)


_WHOLE_ROWS = "It cuts rows, of which rowwise_adagrad keeps one number each"
_REPLICATED = "A table with the optimizer `dense` is whole on every rank"
_NO_LAZY_REPLICA = "Replicas would be trained by torch's Adam, which also moves rows that a batch does not read"

SUPPORT: dict[str, Support] = {
    "rowwise_adagrad": Support(
        ("cpu", "cuda"),
        ("fp32", "fp16"),
        "one fp32 number per row",
        True,
        {"column_wise": _WHOLE_ROWS, "grid": _WHOLE_ROWS},
    ),
    "adagrad": Support(("cpu", "cuda"), ("fp32", "fp16"), "one fp32 number per weight", True),
    "sgd": Support(("cpu", "cuda"), ("fp32", "fp16"), "none", False),
    "adam": Support(
        ("cuda",), ("fp32", "fp16"), "two fp32 numbers per weight", True, {"data_parallel": _NO_LAZY_REPLICA}
    ),
    "dense": Support(
        ("cpu", "cuda"),
        ("fp32",),
        "that of optimizer.dense, on every rank",
        True,
        dict.fromkeys(("row_wise", "table_wise", "column_wise", "table_row_wise", "grid"), _REPLICATED),
    ),
    "frozen": Support(("cpu", "cuda"), ("fp32", "fp16"), "none", False),
}
"""Everything that can train a table; `frozen` is what `freeze: true` becomes."""


def choices(device: str) -> list[str]:
    """Names that `tables.<name>.optimizer` may have on a device; `auto` promises no more than the CPU has."""
    return [n for n, s in SUPPORT.items() if n != "frozen" and ("cuda" if device == "cuda" else "cpu") in s.devices]


_Named = TypeVar("_Named", "SparseOptimizer", "DenseOptimizer")


def _without_eps(settings: _Named, name: str) -> _Named:
    if name == "sgd" and settings.eps != type(settings).model_fields["eps"].default:
        raise ValueError("`eps` has no effect with `name: sgd`. Do: remove it, or choose another optimizer")
    return settings


class SparseOptimizer(Settings):
    """The fused optimizer of the tables: only rows of the batch are read and written."""

    name: FusedName = "rowwise_adagrad"
    """`rowwise_adagrad` keeps one number per row, `adagrad` one per weight, `sgd` none; `adam` two per weight, on CUDA
    devices only."""
    learning_rate: float = pydantic.Field(default=0.05, gt=0)
    """Step size of the tables, independent of the dense layers' one."""
    eps: float = pydantic.Field(default=1e-8, gt=0)
    """Added to the root of the squared gradients (not used by sgd)."""

    @pydantic.model_validator(mode="after")
    def _sgd_reads_no_eps(self) -> "SparseOptimizer":
        return _without_eps(self, self.name)


class DenseOptimizer(Settings):
    """The optimizer of everything that is not a table."""

    name: Literal["adam", "adagrad", "sgd"] = "adam"
    """Optimizer of torch.optim."""
    learning_rate: float = pydantic.Field(default=1e-3, gt=0)
    """Step size."""
    eps: float = pydantic.Field(default=1e-8, gt=0)
    """Added to the denominator (not used by sgd)."""
    weight_decay: float = pydantic.Field(default=0.0, ge=0)
    """Pulls the dense weights to zero, in every step; `l2` of a table is its like for tables."""
    weight_decay_mode: Literal["l2", "decoupled"] = "l2"
    """`l2` adds weight_decay * weight to the gradient; `decoupled` (adam only) takes learning_rate * weight_decay *
    weight off the weight beside the optimizer's step, as AdamW does."""
    clip_norm: float | None = pydantic.Field(default=None, gt=0)
    """Largest norm of all gradients of this optimizer together, over the global batch; longer ones are scaled down.
    Tables are not part of it, but for those with `optimizer: dense`. None: no limit."""

    @pydantic.model_validator(mode="after")
    def _sgd_reads_no_eps(self) -> "DenseOptimizer":
        return _without_eps(self, self.name)

    @pydantic.model_validator(mode="after")
    def _only_adam_decouples(self) -> "DenseOptimizer":
        if self.weight_decay_mode == "decoupled" and self.name != "adam":
            raise ValueError(
                f"`weight_decay_mode: decoupled` needs `name: adam`. Received: {self.name}. Do: choose l2, or adam"
            )
        return self


def _named(value: object) -> object:
    """`optimizer: dense` for `optimizer: {name: dense}`."""
    return {"name": value} if isinstance(value, str) else value


class TableOptimizer(Settings):
    """What one table does otherwise than `optimizer.sparse` says."""

    name: Literal["rowwise_adagrad", "adagrad", "sgd", "adam", "dense"] | None = None
    """None: that of `optimizer.sparse`. `dense`: the table is replicated and trained like a dense layer, as
    `optimizer.dense` says, but without its weight decay; for small tables."""
    learning_rate: float | None = pydantic.Field(default=None, gt=0)
    """Step size of this table. None: `learning_rate_factor` decides."""
    learning_rate_factor: float | None = pydantic.Field(default=None, gt=0)
    """Multiplies the learning rate of `optimizer.sparse` (for `dense`, of `optimizer.dense`). None: 1."""
    eps: float | None = pydantic.Field(default=None, gt=0)
    """None: that of `optimizer.sparse` (for `dense`, of `optimizer.dense`)."""

    @pydantic.model_validator(mode="after")
    def _one_learning_rate(self) -> "TableOptimizer":
        if self.learning_rate is not None and self.learning_rate_factor is not None:
            raise ValueError("`learning_rate` and `learning_rate_factor` exclude each other. Do: remove one of them")
        return self


OwnOptimizer = Annotated[TableOptimizer | None, pydantic.BeforeValidator(_named)]


@dataclasses.dataclass(frozen=True)
class TableUpdate:
    """How a table is trained, with every setting resolved.

    Attributes:
        name: A key of `SUPPORT`.
        learning_rate: Full rate, before the schedule.
        eps: None where there is none.
    """

    name: str
    learning_rate: float
    eps: float | None

    @property
    def support(self) -> Support:
        """What this optimizer can do."""
        return SUPPORT[self.name]


class OptimizerSettings(Settings):
    """One optimizer for the tables, one for the dense layers, one schedule for both."""

    sparse: SparseOptimizer = SparseOptimizer()
    """Optimizer of the embedding tables; `tables.<name>.optimizer` overrides it for one."""
    dense: DenseOptimizer = DenseOptimizer()
    """Optimizer of the dense layers."""
    schedule: Schedule = Schedule()
    """How all learning rates change over the run."""

    def of_table(self, own: TableOptimizer | None, *, freeze: bool) -> TableUpdate:
        """How a table is trained that has these settings of its own."""
        if freeze:
            return TableUpdate("frozen", 0.0, None)
        own = own or TableOptimizer()
        base = self.dense if own.name == "dense" else self.sparse
        name = own.name or self.sparse.name
        rate = own.learning_rate or base.learning_rate * (own.learning_rate_factor or 1.0)
        has_eps = SUPPORT[name].has_eps and base.name != "sgd" if name == "dense" else SUPPORT[name].has_eps
        return TableUpdate(name, rate, (own.eps or base.eps) if has_eps else None)


_ACCUMULATION = (
    "gradients cannot be added up over several batches: tables are updated inside every backward pass, so that each "
    "part would be a step of its own. Do: raise data.batch_size_per_rank, or use more ranks"
)
_NO_CLIPPING = (
    "the gradients of tables are not clipped: they are applied inside the backward pass and never exist as a whole; "
    "the kernels' own limit holds for each lookup, so that a row which a batch reads often still moves by any amount. "
    "Allowed: optimizer.dense.clip_norm, for the dense layers"
)
_NO_DECAY = "tables have no weight decay of their optimizer: only rows of the batch are read. Do: set `l2` of the table"
_NO_BETAS = "momentum and betas are torch's own and cannot be set. Do: remove the key"
_REFUSED_KEYS = {
    "clip_norm": _NO_CLIPPING,
    "max_gradient": _NO_CLIPPING,
    "max_norm": _NO_CLIPPING,
    "gradient_clipping": _NO_CLIPPING,
    "clip": _NO_CLIPPING,
    "weight_decay": _NO_DECAY,
    "betas": _NO_BETAS,
    "momentum": _NO_BETAS,
}
_REFUSED_VALUES = {
    ("precision", "fp16"): "fp16 needs its loss scaled, which tables that are updated inside the backward pass cannot "
    "follow. Allowed: fp32, bf16",
    ("precision", "float16"): "Allowed: fp32, bf16",
    ("dtype", "bf16"): "the tables' CPU kernels have no bf16. Allowed: fp32, fp16",
}


def refused_key(path: Sequence[object]) -> str | None:
    """Why a key is not there that people look for; None where there is nothing to say."""
    last = str(path[-1])
    if "accum" in last:
        return _ACCUMULATION
    of_tables = path[0] == "tables" or list(path[:2]) == ["optimizer", "sparse"]
    return _REFUSED_KEYS.get(last) if of_tables else None


def refused_value(path: Sequence[object], value: object) -> str | None:
    """Why a value of a choice is not there that people look for; None where there is nothing to say."""
    return _REFUSED_VALUES.get((str(path[-1]), str(value)))
