"""What a run is: one YAML file plus `key.path=value`, read into frozen, strict, typed models.

Nothing here imports torch: `recsys check` and `--help` stay quick and work without the compiled stack. Every
problem of a recipe is reported at once, an unknown key with the nearest right one.
"""

import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import pydantic
import yaml

from recsys.errors import UserError, nearest
from recsys.models.config import DINConfig, ModelConfig
from recsys.schema import Field, History, Inputs, Layout, Pooling, Table

RESERVED_ROWS = 3
"""Rows in front of every table: 0 padding (never looked up), 1 missing, 2 unknown. `recsys.ids` documents them."""

PREDICTION = "probability"
"""The column that `recsys predict` writes beside the key columns."""

_MAX_ROWS, _MAX_WIDTH, _MAX_COUNT = 2**40, 2**16, 2**31 - 1  # beyond any use, within what int64 and int32 can count
_RANGE = re.compile(r"(.*?)(\d+)\.\.(.*?)(\d+)")
_MAX_RANGE = 10_000

FLOAT = re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$")
"""Numbers that YAML 1.1 takes for text: `1e-3`."""


class _Settings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def _expand_columns(value: object) -> object:
    """Write out ranges: `C1..C3` means C1, C2, C3; `C08..C10` keeps its zeros."""
    if not isinstance(value, list | tuple):
        return value
    columns: list[object] = []
    for item in value:
        if not isinstance(item, str) or ".." not in item:
            columns.append(item)
            continue
        match = _RANGE.fullmatch(item)
        if not match or match[1] != match[3] or not 0 <= int(match[4]) - int(match[2]) < _MAX_RANGE:
            allowed = f"one name counted upwards, such as C1..C26, over at most {_MAX_RANGE} columns"
            raise ValueError(f"{item!r} is no range of columns. Allowed: {allowed}")
        width = len(match[2]) if match[2].startswith("0") else 0
        columns += [f"{match[1]}{i:0{width}}" for i in range(int(match[2]), int(match[4]) + 1)]
    return tuple(columns)


Text = Annotated[str, pydantic.Field(min_length=1)]
Count = Annotated[int, pydantic.Field(ge=1, le=_MAX_COUNT)]
Columns = Annotated[
    tuple[Text, ...], pydantic.BeforeValidator(_expand_columns), pydantic.Field(min_length=1, strict=False)
]
Name = Annotated[str, pydantic.Field(min_length=1, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class IdFeature(_Settings):
    """Columns with one id (integer or string) per row."""

    kind: Literal["id"]
    columns: Columns
    """Column names; ranges such as `C1..C26` are written out."""
    table: Name | None = None
    """Table that all these columns share; None gives each column a table of its own name."""


class IdListFeature(_Settings):
    """Columns with a list of ids per row, pooled into one vector."""

    kind: Literal["id_list"]
    columns: Columns
    """Column names."""
    table: Name | None = None
    """Table that all these columns share; None gives each column a table of its own name."""
    pooling: Pooling = "mean"
    """How the vectors of one list become one vector."""
    max_length: Count = 100
    """Longest list; longer ones are cut and counted."""
    keep: Literal["newest", "oldest"] = "newest"
    """Which end of a list that is too long stays: newest is the end, oldest the beginning."""


class HistoryFeature(_Settings):
    """Lists of past events, oldest first, in step, each paired with a column of the candidate."""

    kind: Literal["history"]
    of: dict[Text, Text] = pydantic.Field(min_length=1)
    """History column -> id column it is compared with. Both share one table."""
    max_length: Count = 50
    """Longest history; longer ones are cut and counted."""
    keep: Literal["newest", "oldest"] = "newest"
    """Which end of a history that is too long stays: newest is the end, oldest the beginning."""


class NumberFeature(_Settings):
    """Columns with one number per row. NaN, infinity and null are errors."""

    kind: Literal["number"]
    columns: Columns
    """Column names; ranges such as `I1..I13` are written out."""
    transform: Literal["standardize", "none"] = "standardize"
    """`standardize` subtracts the training data's mean and divides by its standard deviation."""


Feature = Annotated[IdFeature | IdListFeature | HistoryFeature | NumberFeature, pydantic.Field(discriminator="kind")]

Split = Literal["train", "valid", "test"]
ShardingKind = Literal["auto", "row_wise", "table_wise", "column_wise", "data_parallel"]


class TableSettings(_Settings):
    """How raw ids become rows of a table, and where the rows live."""

    ids: Literal["exact", "hashed"] = "hashed"
    """`exact`: an id 0..rows-1 is its own row, others are errors. `hashed`: any integer or string, into `rows` rows."""
    rows: int = pydantic.Field(default=100_000, ge=1, le=_MAX_ROWS)
    """Rows for ids. Three rows for padding, missing and unknown come on top."""
    dim: int = pydantic.Field(default=16, ge=1, le=_MAX_WIDTH)
    """Width of a vector; any width up to 65536."""
    init_std: float = pydantic.Field(default=0.01, ge=0)
    """Standard deviation of the normal distribution that the vectors start from."""
    l2: float = pydantic.Field(default=0.0, ge=0)
    """Adds l2 / 2 * |vector|^2 to a row's loss for every vector that it looks up; other rows are not pulled."""
    sharding: ShardingKind = "auto"
    """How the table is split over ranks; `auto` leaves it to the planner."""


class DataSettings(_Settings):
    """Where the data is and what its columns mean."""

    train: Text
    """Parquet file or folder to train on. `${RECSYS_DATA}` stands for the data cache."""
    valid: Text | None = None
    """Parquet file or folder that chooses the best epoch; None: the last epoch is kept."""
    test: Text | None = None
    """Parquet file or folder that is evaluated once, at the end, with the best epoch."""
    label: Text = "label"
    """Column with 0 or 1."""
    group: Text | None = None
    """Column of ids that GAUC groups by; it need not be a feature."""
    batch_size_per_rank: Count = 1024
    """Most rows of one rank's batch; the rows of an epoch are spread evenly over its steps."""
    shuffle_rows: int = pydantic.Field(default=262_144, ge=0, le=_MAX_COUNT)
    """Rows held in memory and shuffled together, per rank; 0 keeps the order of the files."""


class SparseOptimizer(_Settings):
    """The fused optimizer of the tables: only rows of the batch are read and written."""

    name: Literal["rowwise_adagrad", "adagrad", "sgd"] = "rowwise_adagrad"
    """`rowwise_adagrad` keeps one number per row, `adagrad` one per weight, `sgd` none."""
    learning_rate: float = pydantic.Field(default=0.05, gt=0)
    """Step size of the tables, independent of the dense layers' one."""
    eps: float = pydantic.Field(default=1e-8, gt=0)
    """Added to the root of the squared gradients (Adagrad kinds only)."""


class DenseOptimizer(_Settings):
    """The optimizer of everything that is not a table."""

    name: Literal["adam", "adagrad", "sgd"] = "adam"
    """Optimizer of torch.optim."""
    learning_rate: float = pydantic.Field(default=1e-3, gt=0)
    """Step size."""
    eps: float = pydantic.Field(default=1e-8, gt=0)
    """Added to the denominator (not used by sgd)."""
    weight_decay: float = pydantic.Field(default=0.0, ge=0)
    """L2 penalty on the dense weights; `l2` of a table is its like for tables."""


class OptimizerSettings(_Settings):
    """One optimizer for the tables, one for the dense layers."""

    sparse: SparseOptimizer = SparseOptimizer()
    """Optimizer of the embedding tables."""
    dense: DenseOptimizer = DenseOptimizer()
    """Optimizer of the dense layers."""


class TrainSettings(_Settings):
    """The training loop."""

    epochs: Count = 1
    """Most passes over the training data."""
    patience: Count | None = None
    """Stop after this many evaluations without a better `monitor`; None: never."""
    monitor: Literal["auc", "gauc", "logloss"] = "auc"
    """Validation metric that decides which epoch is kept."""
    seed: int = pydantic.Field(default=1, ge=0, lt=2**63)
    """Decides initial values, shuffling and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA devices when there are any."""
    threads_per_rank: Annotated[int, pydantic.Field(ge=1, le=4096)] | None = None
    """Threads that torch uses; None: OMP_NUM_THREADS if that is set, else the host's cores over its ranks."""
    shared_batch_statistics: bool = True
    """Normalisation layers see the batches of all ranks, so that N ranks train as one. False saves the exchange."""
    pipeline: Literal["auto", "plain", "sparse_dist"] = "auto"
    """`sparse_dist` overlaps the exchange of the next batch's ids with this step; `auto` does so on CUDA."""
    log_every_steps: Count = 20
    """Steps between two points of the training loss curve."""


class Recipe(_Settings):
    """A whole run."""

    model: ModelConfig
    """The architecture and its sizes."""
    data: DataSettings
    """Data sets and the meaning of their columns."""
    features: tuple[Feature, ...] = pydantic.Field(min_length=1, strict=False)
    """The columns that the model reads."""
    tables: dict[str, TableSettings] = pydantic.Field(default_factory=dict)
    """Settings per table. `default` holds for all tables and is overridden key by key under a table's own name."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Optimizers of tables and dense layers."""
    train: TrainSettings = TrainSettings()
    """The training loop."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _merge_table_defaults(cls, raw: object) -> object:
        tables = raw.get("tables") if isinstance(raw, Mapping) else None
        default = tables.get("default", {}) if isinstance(tables, Mapping) else None
        if not isinstance(raw, Mapping) or not isinstance(tables, Mapping) or not isinstance(default, Mapping):
            return raw
        merged = {k: {**default, **v} if isinstance(v, Mapping) else v for k, v in tables.items()}
        return {**raw, "tables": merged}

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        problems = list(self._problems())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        names = [c for f in self.features for c in (f.of if isinstance(f, HistoryFeature) else f.columns)]
        targets = [c for f in self.features if isinstance(f, IdFeature) for c in f.columns]
        for name in sorted({n for n in names if names.count(n) > 1}):
            yield f"features: column {name!r} is declared {names.count(name)} times. Do: declare it once"
        for feature in self.features:
            for history, target in feature.of.items() if isinstance(feature, HistoryFeature) else ():
                if target not in targets:
                    yield (
                        f"features: history {history!r} is compared with {target!r}, which no `id` feature declares. "
                        f"Allowed: {sorted(targets)}.{nearest(target, targets)}"
                    )
        if self.data.label in names:
            yield f"features: the label {self.data.label!r} must not be a feature. Do: remove it from `features`"
        if self.data.group == self.data.label:
            yield f"data.group: {self.data.group!r} is the label, in whose groups no AUC is defined. Do: group by an id"
        if PREDICTION in self.key_columns:
            where = "data.group" if self.data.group == PREDICTION else "features"
            yield f"{where}: {PREDICTION!r} is the column that predictions are written to. Do: rename it in the data"
        for name, widths in self.model:
            if isinstance(widths, tuple) and max(widths, default=0) > _MAX_WIDTH:
                yield f"model.{name}: a layer is too wide. Received: {max(widths)}. Allowed: 1..{_MAX_WIDTH}"
        used = set(self.id_columns.values())
        for name in sorted(used):
            if name == "default" or "." in name:
                yield f"features: no table can be called {name!r}. Do: give that column another `table`"
        for name in self.tables:
            if name != "default" and name not in used:
                yield f"tables.{name}: no feature uses this table. Allowed: {sorted(used)}.{nearest(name, used)}"
        if isinstance(self.model, DINConfig) and not any(isinstance(f, HistoryFeature) for f in self.features):
            yield "model.name: din needs at least one feature of kind `history`. Do: add one, or use deepfm"
        if self.train.monitor == "gauc" and self.data.group is None:
            yield "train.monitor: gauc needs `data.group`. Do: name the column to group by, or monitor auc"
        yield from self._sharding_problems(used)
        if self.train.patience is not None and self.data.valid is None:
            yield "train.patience: early stopping needs `data.valid`. Do: name a validation set, or remove patience"
        if self.model.name == "deepfm":
            dims = {name: self.table_settings(name).dim for name in sorted(used)}
            if len(set(dims.values())) > 1:
                yield f"tables: deepfm multiplies vectors with each other, so all need one `dim`. Received: {dims}"

    def _sharding_problems(self, tables: set[str]) -> Iterator[str]:
        histories = [f for f in self.features if isinstance(f, HistoryFeature)]
        attended = {self.id_columns.get(t) for f in histories for t in f.of.values()} if self.model.attends else set()
        for name in sorted(tables):
            sharding = self.table_settings(name).sharding
            if sharding == "data_parallel" and name in attended:
                yield (
                    f"tables.{name}.sharding: TorchRec cannot replicate the table of a history. "
                    "Received: data_parallel. Allowed: auto, row_wise, table_wise, column_wise"
                )
            if sharding == "column_wise" and self.optimizer.sparse.name == "rowwise_adagrad":
                yield (
                    f"tables.{name}.sharding: column_wise cuts rows, of which rowwise_adagrad keeps one number each. "
                    "Do: choose another sharding, or optimizer.sparse.name=adagrad"
                )

    @property
    def id_columns(self) -> dict[str, str]:
        """Id and id list columns -> the table of each."""
        return {
            column: feature.table or column
            for feature in self.features
            if isinstance(feature, IdFeature | IdListFeature)
            for column in feature.columns
        }

    @property
    def dense_columns(self) -> tuple[str, ...]:
        """Number columns, in declaration order."""
        return tuple(c for f in self.features if isinstance(f, NumberFeature) for c in f.columns)

    def table_settings(self, name: str) -> TableSettings:
        """The settings that hold for a table: its own, else `default`, else the built-in ones."""
        return self.tables.get(name) or self.tables.get("default") or TableSettings()

    @property
    def inputs(self) -> Inputs:
        """Tables and features as models read them."""
        tables = []
        for name in dict.fromkeys(self.id_columns.values()):
            settings = self.table_settings(name)
            tables.append(Table(name, settings.rows + RESERVED_ROWS, settings.dim, settings.init_std, settings.l2))
        return Inputs(
            tables=tuple(tables),
            fields=tuple(
                Field(c, f.table or c, f.pooling if isinstance(f, IdListFeature) else "sum")
                for f in self.features
                if isinstance(f, IdFeature | IdListFeature)
                for c in f.columns
            ),
            histories=tuple(History(f.of) for f in self.features if isinstance(f, HistoryFeature)),
            dense=self.dense_columns,
        )

    @property
    def layout(self) -> Layout:
        """Which id features the recipe's model wants pooled, and which as sequences."""
        return self.inputs.layout(attends=self.model.attends)

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Columns that tell predictions apart: those of `id` features, and the group."""
        keys = [c for f in self.features if isinstance(f, IdFeature) for c in f.columns]
        return tuple(dict.fromkeys([*keys, *([self.data.group] if self.data.group else [])]))

    @property
    def paths(self) -> dict[Split, str]:
        """The data paths by split, with `${RECSYS_DATA}` and `~` written out."""
        named: dict[Split, str | None] = {"train": self.data.train, "valid": self.data.valid, "test": self.data.test}
        return {split: expand_path(path) for split, path in named.items() if path is not None}

    def resolved(self) -> "Recipe":
        """The recipe with its data paths written out, to be read from any folder."""
        return self.model_copy(
            update={"data": self.data.model_copy(update={str(split): path for split, path in self.paths.items()})}
        )

    def to_yaml(self) -> str:
        """The resolved recipe: every setting of this run, readable by `recsys.recipe_file.load`."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `recipe_file` would read as a number, such as `1e5`."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))


def data_home() -> pathlib.Path:
    """Folder of downloaded and prepared data: `RECSYS_DATA`, else ~/.cache/recsys."""
    return _with_home(os.environ.get("RECSYS_DATA") or "~/.cache/recsys", "set RECSYS_DATA to an absolute path")


def expand_path(path: str) -> str:
    """A path with `${RECSYS_DATA}` and `~` written out, absolute.

    Raises:
        UserError: It is the address of a remote file, or begins with a home folder that is not known.
    """
    if "://" in path:
        raise UserError("Data is read from local paths only", received=path, fix="copy it here, or mount its storage")
    if "${RECSYS_DATA}" in path:
        path = path.replace("${RECSYS_DATA}", str(data_home()))
    return str(_with_home(path, "give an absolute path").absolute())


def _with_home(path: str, fix: str) -> pathlib.Path:
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise UserError("The home folder that a path begins with is not known", received=path, fix=fix) from error
