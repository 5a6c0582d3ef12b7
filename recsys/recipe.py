"""What a run is: one YAML file plus `key.path=value`, read into frozen, strict, typed models.

Nothing here imports torch: `recsys check` and `--help` stay quick and work without the compiled stack. Every
problem of a recipe is reported at once, an unknown key with the nearest right one.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import pydantic
import yaml

from recsys.cluster import size_text
from recsys.communication_settings import CommunicationSettings
from recsys.errors import nearest
from recsys.features import (
    MAX_COUNT,
    Count,
    Feature,
    HistoryFeature,
    IdFeature,
    IdInput,
    NumberFeature,
    Settings,
    Text,
)
from recsys.models.config import DINConfig, ModelConfig
from recsys.optimizer_settings import OptimizerSettings, TableUpdate
from recsys.paths import expand_path
from recsys.schema import Field, History, Inputs, Layout, Table
from recsys.table_settings import MAX_WIDTH, RESERVED_ROWS, TableSettings, excluded_kinds, table_problems

PREDICTION = "probability"
"""The column that `recsys predict` writes beside the key columns."""

FLOAT = re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$")
"""Numbers that YAML 1.1 takes for text: `1e-3`."""


Split = Literal["train", "valid", "test"]


class DataSettings(Settings):
    """Where the data is and what its columns mean."""

    train: Text
    """Parquet file or folder to train on. `${RECSYS_DATA}` stands for the data cache."""
    valid: Text | None = None
    """Parquet file or folder that chooses the best epoch; None: the last epoch is kept."""
    test: Text | None = None
    """Parquet file or folder that is evaluated once, at the end, with the best epoch."""
    label: Text = "label"
    """Column with 0 or 1."""
    bad_labels: Literal["error", "skip"] = "error"
    """What a label other than 0 and 1 does: end the run, or leave its row out of loss and metrics, counted."""
    group: Text | None = None
    """Column of ids that GAUC groups by; it need not be a feature."""
    item: Text | None = None
    """Column of ids by whose frequency in training the metrics are sliced. None: the target of the first history, if
    there is one."""
    vocabulary: Text | None = None
    """Folder of the vocabularies of `hot_cold` tables; None: the one in the data cache that fits the training data."""
    batch_size_per_rank: Count = 1024
    """Most rows of one rank's batch; the rows of an epoch are spread evenly over its steps."""
    shuffle_rows: int = pydantic.Field(default=262_144, ge=0, le=MAX_COUNT)
    """Rows held in memory and shuffled together, per rank; 0 keeps the order of the files."""


class TrainSettings(Settings):
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
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the dense layers' matrix products while they train; weights, tables, evaluation and prediction are fp32."""
    communication: CommunicationSettings = CommunicationSettings()
    """What ranks send each other in fewer bits than fp32."""
    shared_batch_statistics: bool = True
    """Normalisation layers see the batches of all ranks, so that N ranks train as one. False saves the exchange."""
    pipeline: Literal["auto", "plain", "sparse_dist"] = "auto"
    """`sparse_dist` overlaps the exchange of the next batch's ids with this step; `auto` does so on CUDA."""
    pin_memory: bool | None = None
    """Batches wait for their GPU in pinned host memory, from where they are copied beside a step; None: on CUDA."""
    plan: Text | None = None
    """Plan file (a run's `plan.json`, or from `recsys plan --json`) to spread the tables by; None: plan anew."""
    memory_per_rank: Annotated[Text, pydantic.AfterValidator(size_text)] | None = None
    """Memory that a rank may use, such as `64MB` or `24GiB`; None: its GPU's, or its share of the host's."""
    warm_start: Text | None = None
    """Checkpoint, or run folder, whose tables and layers a new run starts with, as far as they fit; the log says which
    do not. Optimizers start afresh."""
    timeout_s: float = pydantic.Field(default=600.0, ge=1, le=604_800)
    """Longest time that ranks wait for each other; then the run ends and names the missing ones. An evaluation computes
    its metrics on one rank while the others wait."""
    log_every_steps: Count = 20
    """Steps between two points of the training loss curve."""


class CheckpointSettings(Settings):
    """When a run is saved; after every epoch in any case."""

    every_steps: Count | None = None
    """Steps between two checkpoints inside an epoch; None: none inside."""
    delta_steps: Count | None = None
    """Steps between two incremental checkpoints, which hold of the tables the rows touched since the one before; None:
    none. Where both fall on one step, it is a full one."""
    keep: Count = 2
    """Newest checkpoints that stay, with those they build on; that of the best epoch stays too."""
    asynchronous: bool = False
    """Training goes on while a copy of the moment's values is written; each rank needs memory for that copy."""
    folder: Text | None = None
    """Where they are written: a path, or an address such as `s3://bucket/run`; None: in the run folder."""


class Recipe(Settings):
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
    checkpoint: CheckpointSettings = CheckpointSettings()
    """What is saved of it, and where."""

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
        names = [*(i.name for i in self.id_inputs), *self.dense_inputs]
        targets = [c for f in self.features if isinstance(f, IdFeature) for c in f.columns]
        for name in sorted({n for n in names if names.count(n) > 1}):
            yield f"features: {name!r} is declared {names.count(name)} times. Do: declare it once"
        for feature in self.features:
            for history, target in feature.of.items() if isinstance(feature, HistoryFeature) else ():
                if target not in targets:
                    yield (
                        f"features: history {history!r} is compared with {target!r}, which no `id` feature declares. "
                        f"Allowed: {sorted(targets)}.{nearest(target, targets)}"
                    )
        if self.data.label in {column for i in self.id_inputs for column in i.columns} | set(self.number_columns):
            yield f"features: the label {self.data.label!r} must not be a feature. Do: remove it from `features`"
        if self.data.group == self.data.label:
            yield f"data.group: {self.data.group!r} is the label, in whose groups no AUC is defined. Do: group by an id"
        if PREDICTION in self.key_columns:
            where = "data.group" if self.data.group == PREDICTION else "features"
            yield f"{where}: {PREDICTION!r} is the column that predictions are written to. Do: rename it in the data"
        for name, widths in self.model:
            if isinstance(widths, tuple) and max(widths, default=0) > MAX_WIDTH:
                yield f"model.{name}: a layer is too wide. Received: {max(widths)}. Allowed: 1..{MAX_WIDTH}"
        used = {i.table for i in self.id_inputs}
        for name in sorted(used):
            if name == "default" or "." in name:
                yield f"features: no table can be called {name!r}. Do: give that column another `table`, or name"
        yield from self._id_problems()
        for name in self.tables:
            if name != "default" and name not in used:
                yield f"tables.{name}: no feature uses this table. Allowed: {sorted(used)}.{nearest(name, used)}"
        if isinstance(self.model, DINConfig) and not any(isinstance(f, HistoryFeature) for f in self.features):
            yield "model.name: din needs at least one feature of kind `history`. Do: add one, or use deepfm"
        if self.train.monitor == "gauc" and self.data.group is None:
            yield "train.monitor: gauc needs `data.group`. Do: name the column to group by, or monitor auc"
        yield from self._training_problems(used)
        if self.train.patience is not None and self.data.valid is None:
            yield "train.patience: early stopping needs `data.valid`. Do: name a validation set, or remove patience"
        if self.model.name == "deepfm":
            dims = {name: self.table_settings(name).dim for name in sorted(used)}
            if len(set(dims.values())) > 1:
                yield f"tables: deepfm multiplies vectors with each other, so all need one `dim`. Received: {dims}"

    def _training_problems(self, tables: set[str]) -> Iterator[str]:
        if self.train.communication.dense == "top_k" and self.optimizer.dense.clip_norm is not None:
            yield (
                "optimizer.dense.clip_norm: with train.communication.dense=top_k there is no whole gradient whose norm "
                "could be limited. Do: remove one of them"
            )
        for name in sorted(tables):
            settings, update = self.table_settings(name), self.table_update(name)
            yield from table_problems(name, settings, update, self.train.device, self.excluded_kinds(name))
            is_replicated = settings.sharding == "data_parallel" or update.name == "dense"
            if settings.placement == "host_cached" and (is_replicated or self.train.device == "cpu"):
                yield (
                    f"tables.{name}.placement: host_cached needs CUDA devices and a table that is not replicated. "
                    "Allowed: auto, device"
                )

    def _id_problems(self) -> Iterator[str]:
        for i in self.id_inputs:
            settings = self.table_settings(i.table)
            if i.num_rows is None and not i.raw and settings.ids == "exact":
                yield (
                    f"tables.{i.table}.ids: the ids of a {i.feature.kind} have no range. Received: exact. "
                    "Allowed: hashed, hot_cold"
                )
            if settings.ids == "hot_cold" and settings.hot + settings.cold < 1:
                yield f"tables.{i.table}: hot and cold are both 0. Do: give the table rows"
            if settings.second_row is not None and settings.cold < 2:
                yield (
                    f"tables.{i.table}.cold: two hashes need a row each. Received: {settings.cold}. Allowed: 2 and more"
                )
            if i.weights and i.table in self.attended:
                yield (
                    f"features: {i.name!r} has weights and shares its table with a history, whose vectors the model "
                    "reads one by one. Do: give it another `table`"
                )
        for table in sorted({i.table for i in self.id_inputs}):
            kinds = {i.feature.kind for i in self.id_inputs if i.table == table}
            fixed = [i.name for i in self.id_inputs if i.table == table and i.num_rows is not None]
            if fixed and len(kinds) > 1:
                yield f"features: the table of {fixed[0]!r} cannot be shared. Do: give the others another `table`"
            raw = {i.raw for i in self.id_inputs if i.table == table}
            if self.table_settings(table).ids == "hot_cold" and len(raw) > 1:
                yield (
                    f"tables.{table}.ids: ids of the data and ids made of them are not counted together. "
                    "Received: hot_cold. Do: give the tokens or crosses another `table`, or set ids to hashed"
                )

    @functools.cached_property
    def id_inputs(self) -> tuple[IdInput, ...]:
        """The id inputs of all features, in declaration order, each with the table that it is looked up in."""
        found = [i for feature in self.features for i in feature.id_inputs()]
        targets = {i.name: i.table for i in found if isinstance(i.feature, IdFeature)}
        return tuple(
            dataclasses.replace(i, table=targets.get(i.table, i.table)) if isinstance(i.feature, HistoryFeature) else i
            for i in found
        )

    @property
    def number_columns(self) -> tuple[str, ...]:
        """Number columns, in declaration order."""
        return tuple(c for f in self.features if isinstance(f, NumberFeature) for c in f.columns)

    @property
    def dense_inputs(self) -> tuple[str, ...]:
        """The numbers that the model reads, in order."""
        return tuple(name for f in self.features if isinstance(f, NumberFeature) for name in f.dense_inputs())

    @property
    def item(self) -> str | None:
        """The column by whose frequency in training metrics are sliced."""
        histories = [f for f in self.features if isinstance(f, HistoryFeature)]
        return self.data.item or (next(iter(histories[0].of.values())) if histories else None)

    def table_settings(self, name: str) -> TableSettings:
        """The settings that hold for a table: its own, else `default`, else the built-in ones."""
        settings = self.tables.get(name) or self.tables.get("default") or TableSettings()
        fixed = next((i.num_rows for i in self.id_inputs if i.table == name and i.num_rows is not None), None)
        return settings if fixed is None else settings.model_copy(update={"ids": "exact", "rows": fixed})

    @functools.cached_property
    def attended(self) -> frozenset[str]:
        """Tables that the model reads event by event: those of histories, where it attends to them."""
        histories = [i for i in self.id_inputs if isinstance(i.feature, HistoryFeature)]
        return frozenset(i.table for i in histories) if self.model.attends else frozenset()

    def table_update(self, name: str) -> TableUpdate:
        """How a table is trained, with every setting resolved."""
        settings = self.table_settings(name)
        return self.optimizer.of_table(settings.optimizer, freeze=settings.freeze)

    def excluded_kinds(self, name: str) -> dict[str, str]:
        """Sharding kind -> why a table cannot be split so."""
        attended = name in self.attended
        excluded = excluded_kinds(self.table_settings(name), self.table_update(name), attended=attended)
        return {**excluded, **self.train.communication.excluded_kinds(attended=attended)}

    @functools.cached_property
    def inputs(self) -> Inputs:
        """Tables and features as models read them."""
        tables = []
        for name in dict.fromkeys(i.table for i in self.id_inputs):
            settings = self.table_settings(name)
            rows = settings.id_rows + RESERVED_ROWS
            tables.append(
                Table(name, rows, settings.dim, settings.init_std, settings.l2, settings.second_row, settings.dtype)
            )
        return Inputs(
            tables=tuple(tables),
            fields=tuple(
                Field(i.name, i.table, i.pooling, i.weights is not None)
                for i in self.id_inputs
                if not isinstance(i.feature, HistoryFeature)
            ),
            histories=tuple(History(f.of) for f in self.features if isinstance(f, HistoryFeature)),
            dense=self.dense_inputs,
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
        data = self.data.model_copy(update={str(split): path for split, path in self.paths.items()})
        tables = {
            name: t.model_copy(update={"vectors": expand_path(t.vectors)}) if t.vectors else t
            for name, t in self.tables.items()
        }
        return self.model_copy(update={"data": data, "tables": tables})

    def model_copy(self, *, update: Mapping[str, object] | None = None, deep: bool = False) -> "Recipe":
        """A copy with other values, unchecked."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("id_inputs", "attended", "inputs"):  # Derived from the values that may have changed.
            copied.__dict__.pop(name, None)
        return copied

    def to_yaml(self) -> str:
        """The resolved recipe: every setting of this run, readable by `recsys.recipe_file.load`."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `recipe_file` would read as a number, such as `1e5`."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))
