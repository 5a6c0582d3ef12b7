"""`recsys prepare`: raw data -> a folder of parquet splits that is complete or absent.

    OUTPUT/train/part-00000.parquet ...   valid/ ...   test/ ...   summary.json

A data set yields chunks of rows; everything else (files, counts, checksums, reuse) happens here, once for all.
"""

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pydantic

from recsys.data.movielens import MovieLens100K
from recsys.data.movietweetings import MovieTweetings100K
from recsys.data.synthetic import Synthetic
from recsys.errors import UserError, nearest
from recsys.paths import expand_path

SUMMARY = "summary.json"
PART_ROWS = 4_000_000


class DataSet(Protocol):
    """What a data set's file provides; one instance prepares once."""

    Options: ClassVar[type[pydantic.BaseModel]]
    """Settings that change the rows; the source is not one."""
    version: ClassVar[int]
    """Raised whenever the same options start to give other rows."""
    history: ClassVar[str]
    """The list column whose mean length is reported."""
    row_group_rows: ClassVar[int]
    """Rows of one parquet row group."""

    def __init__(self, options: Any, source: Path | None) -> None: ...

    def tables(self) -> Iterator[tuple[str, pa.Table]]:
        """(split, rows) chunks, each split's in order and without a break; every table has an int8 `label`."""
        ...

    def facts(self) -> dict[str, float | None]:
        """Further figures to print, asked for after the last table."""
        ...


DATASETS: dict[str, type[DataSet]] = {
    "movielens-100k": MovieLens100K,
    "movietweetings-100k": MovieTweetings100K,
    "synthetic": Synthetic,
}


@dataclasses.dataclass(frozen=True)
class SplitSummary:
    """One split.

    Attributes:
        rows: Number of rows.
        positive_share: Share of rows with label 1.
        mean_history: Mean length of the data set's history column.
        sha256: Digest of the values, whatever the file layout, compression or writer.
    """

    rows: int
    positive_share: float
    mean_history: float
    sha256: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """What was prepared, as kept in summary.json; `str()` is what the command prints.

    Attributes:
        dataset: Name in `DATASETS`.
        version: The data set's version.
        options: All options, defaults included.
        splits: Split name -> its counts and checksum.
        facts: Further figures of the data set, such as `bayes_auc`.
        output: The folder; not kept in the file, since folders move.
        reused: True when the folder was already there and complete.
    """

    dataset: str
    version: int
    options: dict[str, object]
    splits: dict[str, SplitSummary]
    facts: dict[str, float | None]
    output: Path
    reused: bool = False

    def __str__(self) -> str:
        """A table with one line per split, then one line per fact."""
        lines = [f"{self.dataset} {'was already' if self.reused else 'is now'} in {self.output}"]
        lines += [f"{'split':<6} {'rows':>12} {'positive':>9} {'mean history':>13}  sha256 of the values"]
        for name, s in self.splits.items():
            lines += [f"{name:<6} {s.rows:>12,} {s.positive_share:>9.2%} {s.mean_history:>13.2f}  {s.sha256}"]
        lines += [f"{name}: {'undefined' if v is None else format(v, '.6f')}" for name, v in self.facts.items()]
        return "\n".join(lines)


def prepare(
    name: str,
    output: str | Path,
    source: str | Path | None = None,
    options: Mapping[str, object] | None = None,
) -> Summary:
    """Prepare the data set `name` into the folder `output`.

    The folder appears by one rename when everything is written, so an interrupted run leaves none. If it is
    there already, from the same data set and options, it is reused; anything else that is there is left alone.

    Args:
        name: A key of `DATASETS`.
        output: Folder to make; missing parents are made too.
        source: Local folder, zip or wheel to read instead of fetching.
        options: Fields of the data set's `Options`; text is converted.

    Raises:
        UserError: Unknown name or option, unusable source, or a folder in the way.
    """
    made = _options(name, options or {})
    output = Path(expand_path(str(output)))
    if (there := _existing(name, output, made)) is not None:
        return there
    dataset = DATASETS[name](made, None if source is None else Path(expand_path(str(source))))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.partial-", dir=output.parent) as aside:
            folder = Path(aside) / "data"  # a folder inside, since the temporary one is private to its owner
            splits = _write(folder, dataset)
            summary = Summary(name, dataset.version, made.model_dump(mode="json"), splits, dataset.facts(), output)
            (folder / SUMMARY).write_text(json.dumps(_as_json(summary), indent=1) + "\n", encoding="utf-8")
            try:
                folder.rename(output)
            except OSError:
                # Another process may have finished the same folder first; that one is as good.
                if (there := _existing(name, output, made)) is None:
                    raise
                return there
    except OSError as error:
        raise UserError(
            f"{output} cannot be written", received=str(error), fix="choose another --output or free the disk"
        ) from error
    return summary


def _options(name: str, options: Mapping[str, object]) -> pydantic.BaseModel:
    if name not in DATASETS:
        raise UserError(
            f"There is no data set {name!r}",
            allowed=", ".join(DATASETS),
            fix=f"choose one of these.{nearest(name, DATASETS)}",
        )
    model = DATASETS[name].Options
    try:
        return model.model_validate(dict(options))
    except pydantic.ValidationError as error:
        problems = []
        for problem in error.errors():
            key = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                problems.append(f"{key}: unknown option.{nearest(key, model.model_fields)}")
            else:
                problems.append(f"{key}: {problem['msg']}, received {problem['input']!r}")
        known = ", ".join(model.model_fields)
        raise UserError.collect(
            f"Options of {name} are wrong", problems, fix=f"use {known}" if known else "give no option"
        ) from error


def _existing(name: str, output: Path, options: pydantic.BaseModel) -> Summary | None:
    """The summary of a complete folder that fits; None if the place is free; `UserError` if it is taken."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    wanted = {"dataset": name, "version": DATASETS[name].version, "options": options.model_dump(mode="json")}
    try:
        saved = json.loads((output / SUMMARY).read_text(encoding="utf-8"))
        splits = {split: SplitSummary(**values) for split, values in saved["splits"].items()}
        there = Summary(**{**saved, "splits": splits, "output": output, "reused": True})
        cut = [split for split, expected in splits.items() if _num_rows(output / split) != expected.rows]
        found = f"a folder whose {cut} lost rows" if cut else str({key: saved[key] for key in wanted})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        found = f"something without a readable {SUMMARY} ({type(error).__name__}: {error})"
    if found != str(wanted):
        raise UserError(
            f"{output} is taken by something else",
            received=found,
            allowed=f"a new or empty folder, or one with {wanted}",
            fix="choose another --output, or delete this one if it is not needed",
        )
    return there


def _num_rows(folder: Path) -> int:
    return sum(pq.read_metadata(part).num_rows for part in folder.glob("part-*.parquet"))


def _as_json(summary: Summary) -> dict[str, object]:
    values = dataclasses.asdict(summary)
    return {key: value for key, value in values.items() if key not in ("output", "reused")}


def _write(folder: Path, dataset: DataSet) -> dict[str, SplitSummary]:
    """Write every chunk; returns each split's summary."""
    splits: dict[str, _SplitWriter] = {}
    try:
        for name, table in dataset.tables():
            if name not in splits:
                splits[name] = _SplitWriter(folder / name, dataset)
            splits[name].write(table)
    finally:
        for writer in splits.values():
            writer.close()
    return {name: writer.summary() for name, writer in splits.items()}


class _SplitWriter:
    """The part files of one split, with its counts and checksum."""

    def __init__(self, folder: Path, dataset: DataSet) -> None:
        self._folder, self._dataset = folder, dataset
        self._rows = self._positives = self._events = self._parts = self._part_rows = 0
        self._digest = ValueDigest()
        self._file: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        if self._file is None or self._part_rows >= PART_ROWS:
            self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            part = self._folder / f"part-{self._parts:05}.parquet"
            self._file = pq.ParquetWriter(part, table.schema, compression="zstd")
            self._parts, self._part_rows = self._parts + 1, 0
        self._file.write_table(table, row_group_size=self._dataset.row_group_rows)
        self._part_rows += table.num_rows
        self._rows += table.num_rows
        self._positives += pc.sum(table["label"]).as_py()
        self._events += pc.sum(pc.list_value_length(table[self._dataset.history])).as_py()
        self._digest.update(table)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def summary(self) -> SplitSummary:
        return SplitSummary(
            rows=self._rows,
            positive_share=self._positives / self._rows,
            mean_history=self._events / self._rows,
            sha256=self._digest.hexdigest(),
        )


class ValueDigest:
    """sha256 of a stream of tables: of the values and column names, not of how they are cut or encoded.

    Each column feeds a digest of its own (values; for lists and strings, their lengths besides), so that a part
    file, a row group or another version of the parquet writer changes nothing. Nulls are not allowed.
    """

    def __init__(self) -> None:
        self._digests: dict[str, hashlib._Hash] = {}

    def update(self, table: pa.Table) -> None:
        """Add rows."""
        for name, column in zip(table.column_names, table.columns, strict=True):
            for chunk in column.chunks:
                self._add(name, chunk)

    def hexdigest(self) -> str:
        """The digest of everything so far."""
        text = "".join(f"{name}:{digest.hexdigest()}\n" for name, digest in sorted(self._digests.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def _add(self, name: str, values: pa.Array) -> None:
        assert values.null_count == 0, f"column {name} holds nulls, which prepared data must not"
        if pa.types.is_list(values.type):
            self._add(f"{name}/length", pc.list_value_length(values))
            self._add(f"{name}/value", values.flatten())
        elif pa.types.is_string(values.type):
            self._add(f"{name}/length", pc.binary_length(values))
            self._hash(name, "".join(values.to_pylist()).encode())
        else:
            self._hash(f"{name}/{values.type}", np.ascontiguousarray(values.to_numpy(zero_copy_only=False)).data)

    def _hash(self, name: str, data: bytes | memoryview) -> None:
        self._digests.setdefault(name, hashlib.sha256()).update(data)
