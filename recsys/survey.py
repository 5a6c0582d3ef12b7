"""What a run learns of its data before the first step: that all of it is good, scales, vocabularies, use of tables.

One pass over all data sets, each rank reading its share; afterwards every rank knows the same.
"""

import collections
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from recsys import ids
from recsys.counting import LIMIT, IdCounts, collect
from recsys.data import columns
from recsys.data.id_values import IdValues
from recsys.distributed import agreed, alike_on_host, broadcast, gather, process_group
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.features import IdInput
from recsys.frequencies import Frequencies, written_aside
from recsys.job import Data
from recsys.numbers import Statistics
from recsys.paths import data_home, expand_path, require_writable
from recsys.recipe import RESERVED_ROWS, Recipe, Split, TableSettings
from recsys.usage import TableUsage
from recsys.vocabulary import Origin, Vocabulary

_SCAN_BATCH_ROWS = 65_536  # large reads: the scan is bound by decoding
_MOST_ROWS, _FEWEST_ROWS = 2**22, 2**16  # whose use is tracked: of all tables together, and at least of each
_FEWEST_IDS = 100_000  # in memory for each table that is counted, however many there are
_MEANINGS = {
    "cut": "lists of %r are over max_length and cut",
    "unknown": "ids of %r lie outside their table and read the row for unknown ids",
    "clamped": "ids of %r lie outside their table and read the row of the nearest id",
    "filled": "numbers of %r are missing and filled",
    "skipped": "rows have no usable %r and do not count",
}
_NO_KEYS = np.zeros(1, dtype=np.int64)


@dataclasses.dataclass
class Survey:
    """What there is to know.

    Attributes:
        tables: Table -> its use in the training data, as in metrics.json; those of vocabularies on rank 0 only.
        vocabularies: Vocabulary of each `hot_cold` table, on rank 0 only.
        items: How often each id of the item column occurs in the training data; None: there is no such column.
        counters: What was cut and replaced in each split, as `Encoder.counters`, of all ranks.
        notes: Where the vocabularies came from, in sentences, on rank 0 only.
    """

    tables: dict[str, dict[str, Any]]
    vocabularies: dict[str, Vocabulary]
    items: Frequencies | None
    counters: dict[Split, collections.Counter[str]]
    notes: list[str]


def check(data: Data) -> dict[Split, collections.Counter[str]]:
    """Read everything once: bad values end the run here. Returns what was cut and replaced in each split."""
    return {split: _scan(data, split, None) for split in data.sets}


def survey(data: Data) -> Survey:
    """Read everything once, and let the encoder learn from the training set.

    Raises:
        UserError: A bad value, or a vocabulary that does not fit; on all ranks.
    """
    encoder, recipe = data.encoder, data.recipe
    origins = {t: origin(recipe, encoder, data, t) for t in encoder.tables if encoder.settings[t].ids == "hot_cold"}
    with agreed("vocabulary"):
        found = {t: v for t, o in origins.items() if data.ranks.rank == 0 and (v := _existing(recipe, o)) is not None}
    known = broadcast(set(found))
    pass_ = _Pass(encoder, set(origins) - known, recipe.item)
    counters = {split: _scan(data, split, pass_ if split == "train" else None) for split in data.sets}
    data.num_counted = data.sets["train"].num_rows - counters["train"][f"skipped/{recipe.data.label}"]
    with agreed("data.train"):
        if not data.num_counted:
            raise UserError("No row has a usable label", allowed="0 or 1", fix="correct data.label")
    stale = _stale(data, pass_, found)
    if stale:
        known -= stale
        again = _Pass(encoder, stale, None)
        _scan(data, "train", again)
        pass_.counts |= again.counts
    encoder.fit(functools.reduce(Statistics.merge, (s for s in gather(pass_.statistics) if s is not None)))
    encoder.know_kinds(data.sets["train"].schema)
    notes: list[str] = []
    for table, its_origin in origins.items():
        counts = collect(pass_.counts[table]) if table in pass_.counts else None
        index = None
        with agreed(f"vocabulary of table {table!r}"):
            if data.ranks.rank == 0:
                if counts is not None:
                    found[table] = _choose(recipe, counts, its_origin)
                index = _index(found[table], encoder.settings[table].hot)
                notes += _notes(found[table], encoder.settings[table], built=table not in known)
        encoder.set_vocabulary(table, *broadcast(index))
    items = None if pass_.items is None else collect(pass_.items)
    usage = _usage(data, pass_, found)
    frequencies = None
    with agreed("item counts"):
        if items is not None:
            frequencies = Frequencies.from_counts(items)
    frequencies = broadcast(frequencies)
    for counted in (*pass_.counts.values(), *([pass_.items] if pass_.items else [])):
        counted.close()
    return Survey(usage, found, frequencies, counters, notes)


def vocabularies(
    recipe: Recipe, *, output: str | None = None, grow: str | None = None, json_path: str | None = None
) -> list[dict[str, Any]]:
    """Count the ids of the training data and write a vocabulary for every table whose ids have no fixed range.

    Args:
        recipe: Names data, tables and features. Tables with another policy than `hot_cold` are counted all the same,
            to tell what it would give them; but not those that hold both ids of the data and tokens or crosses.
        output: Folder to write; None: where training looks for it.
        grow: Folder of vocabularies, or run, whose hot ids keep their rows.
        json_path: Where the figures are also written.

    Returns:
        Per table the figures of `Vocabulary.as_dict`, and the `path` of its file.
    """
    if grow is not None and output is None and recipe.data.vocabulary is None:
        raise UserError("A vocabulary that grows needs a new folder", fix="name one with --output")
    if output is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"vocabulary": output})})
    with alike_on_host():
        if json_path is not None:
            require_writable(pathlib.Path(json_path), pathlib.Path(recipe.paths["train"]))
    with process_group("cpu", threads=recipe.train.threads_per_rank, timeout_s=recipe.train.timeout_s) as ranks:
        with agreed("recsys vocab"):
            if ranks.world_size > 1:
                raise UserError("Vocabularies are counted by one process", received=f"{ranks.world_size} ranks")
        encoder = Encoder(recipe)
        data = Data.open(recipe, encoder, ranks, {"train": recipe.paths["train"]})
        tables = [
            table
            for table in encoder.id_tables
            if encoder.settings[table].ids != "exact" and len({i.raw for i in encoder.inputs if i.table == table}) == 1
        ]
        origins = {table: origin(recipe, encoder, data, table) for table in tables}
        olds = {t: old for t, o in origins.items() if (old := _grown_from(grow, o)) is not None}
        if recipe.data.vocabulary is not None:
            _require_free([vocabulary_path(recipe, o) for o in origins.values()], data.sets["train"].path)
        pass_ = _Pass(encoder, tables, None)
        _scan(data, "train", pass_)
        facts = []
        for table in tables:
            settings, its_origin = encoder.settings[table], origins[table]
            make = olds[table].grow if table in olds else Vocabulary.choose
            path = vocabulary_path(recipe, its_origin)
            made = make(pass_.counts[table], path, its_origin, hot=settings.hot, min_count=settings.min_count)
            facts.append({**made.as_dict(cold=settings.cold, dim=settings.dim), "path": str(path)})
            pass_.counts[table].close()
    if json_path is not None:
        with written_aside(pathlib.Path(json_path)) as aside:
            aside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts


def _grown_from(grow: str | None, its_origin: Origin) -> Vocabulary | None:
    """The old vocabulary of a table; None where there is none, as for a table that had another policy."""
    if grow is None:
        return None
    folder = pathlib.Path(expand_path(grow))
    try:
        if (folder / "vocabulary").is_dir():  # of a run folder
            folder /= "vocabulary"
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UserError(
            "There is no folder of vocabularies to grow", received=str(error), fix="name a run or such a folder"
        ) from error
    path = its_origin.path(pathlib.Path(), folder)
    return Vocabulary.load(path) if path.name in names else None


def _require_free(paths: list[pathlib.Path], data: pathlib.Path) -> None:
    """Vocabularies that a user named are never replaced: models may have been trained with their rows."""
    for path in paths:
        if path.parent.resolve() in (data.resolve(), data.resolve().parent if data.is_file() else data.resolve()):
            raise UserError("The training data lies there", received=str(path.parent), fix="name another --output")
        if os.path.lexists(path):
            raise UserError(
                f"{str(path)!r} is there already",
                allowed="a folder without vocabularies of these tables",
                fix="name a new folder with --output, and this one with --grow to keep its rows",
            )


def origin(recipe: Recipe, encoder: Encoder, data: Data, table: str) -> Origin:
    """What the ids of a table are counted in."""
    read = {
        i.name: [list(i.columns), i.max_length, i.newest, None if i.raw else i.feature.model_dump(mode="json")]
        for i in encoder.inputs
        if i.table == table
    } | ({} if all(i.raw for i in encoder.inputs if i.table == table) else {"versions": encoder.versions})
    return Origin(table, data.sets["train"].fingerprint(), dict(sorted(read.items())))


def vocabulary_path(recipe: Recipe, its_origin: Origin) -> pathlib.Path:
    """Where the vocabulary of a table stands, or will."""
    if recipe.data.vocabulary is not None:
        return its_origin.path(pathlib.Path(), pathlib.Path(expand_path(recipe.data.vocabulary)))
    settings, path = recipe.table_settings(its_origin.table), its_origin.path(data_home() / "vocabularies")
    return path.parent / f"hot{settings.hot}-min{settings.min_count}" / path.name


def _existing(recipe: Recipe, its_origin: Origin) -> Vocabulary | None:
    """The vocabulary of the data; in the data cache, one with other numbers of hot ids gives its counts."""
    path, settings = vocabulary_path(recipe, its_origin), recipe.table_settings(its_origin.table)
    try:
        if path.exists():
            return Vocabulary.load(path, its_origin)
        others = sorted(path.parent.parent.glob(f"*/{path.name}")) if recipe.data.vocabulary is None else []
    except OSError as error:
        raise UserError(
            "Vocabularies cannot be read", received=str(error), fix="make their folder readable, or set RECSYS_DATA"
        ) from error
    if not others:
        return None
    return Vocabulary.load(others[0], its_origin).rechoose(hot=settings.hot, min_count=settings.min_count, path=path)


def _stale(data: Data, pass_: "_Pass", found: dict[str, Vocabulary]) -> set[str]:
    """Tables whose vocabulary does not hold the very ids of the training data, though its files look the same.

    Raises:
        UserError: It is one that the user named; on all ranks.
    """
    sums = {table: sum(parts) % 2**64 for table, parts in _by_table(gather(pass_.sums)).items()}
    stale: set[str] = set()
    with agreed("vocabulary"):
        for table, vocabulary in found.items():
            expected = sum(_sum(run.keys, run.counts) for run in vocabulary.parts()) % 2**64
            if expected != sums.get(table, expected):
                stale.add(table)
        if stale and data.recipe.data.vocabulary is not None:
            raise UserError(
                "The vocabulary was counted in other training data",
                received=f"other ids in the tables {sorted(stale)}",
                fix="grow it: recsys vocab RECIPE --grow OLD --output NEW",
            )
    return broadcast(stale)


def _by_table(parts: list[dict[str, int]]) -> dict[str, list[int]]:
    return {table: [part[table] for part in parts] for table in parts[0]}


def _sum(keys: np.ndarray, counts: np.ndarray | None = None) -> int:
    """A number for a multiset of ids, whatever their order; that of two together is the sum, modulo 2^64."""
    mixed = ids.mix(torch.from_numpy(keys))
    return int((mixed if counts is None else mixed * torch.from_numpy(counts)).sum())


def _choose(recipe: Recipe, counts: IdCounts, its_origin: Origin) -> Vocabulary:
    settings = recipe.table_settings(its_origin.table)
    path = vocabulary_path(recipe, its_origin)
    return Vocabulary.choose(counts, path, its_origin, hot=settings.hot, min_count=settings.min_count)


def _index(vocabulary: Vocabulary, hot: int) -> tuple[np.ndarray, np.ndarray]:
    """(hot,) keys and rows; rows that no id has stay unused."""
    keys, rows = vocabulary.index()
    keys, rows = keys[: vocabulary.num_hot], rows[: vocabulary.num_hot]
    if rows.max(initial=-1) >= RESERVED_ROWS + hot:
        raise UserError(
            f"The vocabulary {str(vocabulary.path)!r} has hot ids in rows that its table does not have",
            received=f"{rows.max() - RESERVED_ROWS + 1} rows for hot ids",
            allowed=hot,
            fix=f"raise tables.{vocabulary.about.origin.table}.hot, or make another vocabulary",
        )
    free = hot - len(keys)
    return np.pad(keys, (0, free), constant_values=np.iinfo(np.int64).max), np.pad(rows, (0, free), constant_values=-1)


def _notes(vocabulary: Vocabulary, settings: TableSettings, *, built: bool) -> list[str]:
    share = vocabulary.hot_occurrences / vocabulary.occurrences if vocabulary.occurrences else 0.0
    about = vocabulary.about
    notes = [
        f"Table {vocabulary.about.origin.table}: {vocabulary.num_hot:,} hot ids ({share:.1%} of its ids in training), "
        f"{vocabulary.num_cold:,} cold ones; vocabulary {'written to' if built else 'reused from'} {vocabulary.path}"
    ]
    if (about.hot, about.min_count) != (settings.hot, settings.min_count):
        notes.append(
            f"Table {about.origin.table}: its vocabulary was chosen with hot {about.hot:,}, min_count "
            f"{about.min_count}, not with {settings.hot:,} and {settings.min_count} as in the recipe"
        )
    return notes


def describe(counters: dict[Split, collections.Counter[str]]) -> Iterator[str]:
    """What was cut, replaced and left out, in sentences."""
    for split, counter in counters.items():
        for name, count in sorted(counter.items()):
            kind, _, what = name.partition("/")
            yield f"{split}: {count:,} {_MEANINGS[kind] % what}"


def _scan(data: Data, split: Split, pass_: "_Pass | None") -> collections.Counter[str]:
    counters: collections.Counter[str] = collections.Counter()
    with agreed(f"data.{split}"):
        for table, rows in data.reader(split, batch_size=_SCAN_BATCH_ROWS).iterate(0):
            values = data.encoder.values(table, rows, counters, labelled=data.labelled)
            if pass_ is None:
                collections.deque(values, maxlen=0)
            else:
                pass_.add(table, rows, values)
    return sum(gather(counters), collections.Counter())


class _Pass:
    """What this rank's rows of the training data add up to."""

    def __init__(self, encoder: Encoder, counted: Collection[str], item: str | None) -> None:
        self._encoder, self._item = encoder, item
        self.statistics: Statistics | None = None
        limit = max(_FEWEST_IDS, LIMIT // max(len(counted), 1))
        self.counts = {table: IdCounts(limit=limit) for table in counted}
        self.items = None if item is None else IdCounts(limit=limit)
        hot_cold = [t for t in encoder.id_tables if encoder.settings[t].ids == "hot_cold"]
        self.sums = {table: 0 for table in hot_cold if table not in self.counts}
        self.usage = {t: new_usage(encoder, t) for t in encoder.id_tables if encoder.settings[t].ids != "hot_cold"}

    def add(self, table: pa.Table, rows: np.ndarray, values: Iterator[tuple[IdInput, IdValues]]) -> None:
        for i, found in values:
            if i.table in self.counts:
                present = None if found.missing is None else ~found.missing
                self.counts[i.table].add(found.keys, found.raw, present)
            elif i.table in self.sums:
                self.sums[i.table] += _sum(found.keys if found.missing is None else found.keys[~found.missing])
            elif i.table in self.usage:
                self.usage[i.table].add(self._encoder.table_rows(i, found)[0].numpy().astype(np.int64), found.keys)
        numbers = self._encoder.numbers.read(table, rows, collections.Counter())
        statistics = self._encoder.numbers.measure(numbers, rows)
        self.statistics = statistics if self.statistics is None else self.statistics.merge(statistics)
        if self.items is not None:
            keys, missing = columns.id_keys(columns.single_array(table, str(self._item)))
            self.items.add(keys, None, None if missing is None else ~missing)


def new_usage(encoder: Encoder, table: str) -> TableUsage:
    """A tracker of the rows of a table."""
    settings = encoder.settings[table]
    return TableUsage(
        settings.id_rows + RESERVED_ROWS,
        hot=settings.own_rows,
        cold_hashes=settings.num_hashes,
        max_tracked_rows=max(_FEWEST_ROWS, _MOST_ROWS // len(encoder.id_tables)),
    )


def _usage(data: Data, pass_: _Pass, vocabularies: dict[str, Vocabulary]) -> dict[str, dict[str, Any]]:
    """Use of all tables in the training data, of all ranks; on rank 0 only where a vocabulary tells it."""
    encoder, found = data.encoder, {}
    for table in encoder.id_tables:
        if table in pass_.usage:
            usage = pass_.usage[table]
            usage.merge_ranks()
            found[table] = usage.as_dict()
    with agreed("use of tables"):
        for table, vocabulary in vocabularies.items():
            usage = new_usage(encoder, table)
            _add_vocabulary(usage, encoder, vocabulary)
            found[table] = usage.as_dict()
    return {t: {"policy": encoder.settings[t].ids, **found[t]} for t in encoder.id_tables if t in found}


def _add_vocabulary(usage: TableUsage, encoder: Encoder, vocabulary: Vocabulary) -> None:
    policy = encoder.policy(vocabulary.about.origin.table)
    for run in vocabulary.parts():
        rows, second = policy(torch.from_numpy(run.keys))
        usage.add(rows.numpy(), run.keys, run.counts)
        if second is not None:
            has = second.numpy() >= 0
            usage.add(second.numpy()[has], run.keys[has], run.counts[has])
    if vocabulary.missing:
        usage.add(np.array([ids.MISSING]), _NO_KEYS, np.array([vocabulary.missing]))
