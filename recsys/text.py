"""Text -> token keys: words, characters, n-grams of words, pinyin. `docs/text.md` is the contract.

The same object trains and serves: what it returns depends on the text and the settings alone, never on other texts,
on the process or on a file that something else has written.
"""

import bisect
import collections
import functools
import importlib
import re
import threading
import types
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from recsys.errors import UserError, nearest
from recsys.features import Granularity

Segmenter = Literal["jieba", "unicode"]
"""Who finds the words in runs of Han characters: jieba's dictionary, or nobody, so that each character is a word."""

RULES = "text/1"
"""Name and version of the rules of docs/text.md. Any change of a token or of its key needs a new version."""
LONGEST_TEXT = 10_000
"""Characters (code points) of a text that are read; what comes after them counts as cut."""
LONGEST_NGRAM = 5
"""Most words in one n-gram: longer ones hardly ever come back."""

_LONGEST_CACHED = 1_000
"""Longer texts are not remembered: they seldom repeat, and the cache is bounded in entries, not in bytes."""
_NEW_TEXTS = 4_096
"""Texts whose tokens exist as Python strings at a time."""
_INSTALL = {"jieba": "pip install 'jieba>=0.42.1'", "pypinyin": "pip install 'pypinyin>=0.51'"}

# Classes of characters, one letter each, so that a regular expression over the letters finds words.
_SEPARATOR, _IGNORED, _MARK, _SYMBOL, _LETTER, _HAN, _HIRAGANA, _KATAKANA = " xmswhkt"
_WORD = re.compile("w[wm]*|t[tm]*|h+|km*|s")
_CHARACTER = re.compile("[wtk]m*|h|s")
_SCRIPTS = (
    (0x3005, 0x3007, _HAN),  # iteration mark, closing mark, zero
    (0x3041, 0x309F, _HIRAGANA),
    (0x30A1, 0x30FF, _KATAKANA),
    (0x31F0, 0x31FF, _KATAKANA),
    (0x3400, 0x4DBF, _HAN),
    (0x4E00, 0x9FFF, _HAN),
    (0xF900, 0xFAFF, _HAN),
    (0x20000, 0x3FFFF, _HAN),
)
_SCRIPT_STARTS = [first for first, _, _ in _SCRIPTS]


class _Classes(dict[int, str]):
    """Code point -> class, found at the first use of each: a table of all would take most of a second."""

    def __missing__(self, code: int) -> str:
        self[code] = kind = self._found(code)
        return kind

    @staticmethod
    def _found(code: int) -> str:
        category = unicodedata.category(chr(code))
        if category in ("Cf", "Me") or 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF:
            return _IGNORED
        if category == "So":
            return _SYMBOL
        if category[0] == "M":
            return _MARK
        if category[0] not in "LN":
            return _SEPARATOR
        place = bisect.bisect_right(_SCRIPT_STARTS, code) - 1
        return _SCRIPTS[place][2] if place >= 0 and code <= _SCRIPTS[place][1] else _LETTER


_CLASSES = _Classes()


def _normalized(text: str) -> tuple[str, str]:
    """The text as it is cut into tokens, and the class of each of its characters."""
    if text.isascii():
        text = text.lower()
        return text, text.translate(_CLASSES)
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    classes = text.translate(_CLASSES)
    if _IGNORED in classes:
        kept = "".join(c for c, kind in zip(text, classes, strict=True) if kind != _IGNORED)
        text = unicodedata.normalize("NFKC", kept)
        classes = text.translate(_CLASSES)
    return text, classes


def _extra(name: str) -> types.ModuleType:
    """A module of the extra `text`.

    Raises:
        UserError: It is not installed.
    """
    try:
        with warnings.catch_warnings():
            # jieba's source has escapes that newer Pythons warn about, and it asks for the deprecated pkg_resources.
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    raise UserError(f"Text features of this recipe need the package {name}, which is not installed", fix=_INSTALL[name])


@functools.cache
def _jieba_words() -> Callable[[str], Iterable[str]]:
    """A function that cuts a run of Han characters into words. Reading the dictionary takes about half a second.

    The dictionary is read from the package itself. jieba's own way would write a cache into the temporary folder
    and believe whatever lies there next time; it saves nothing, and it would log. An object of our own also keeps
    words that the process adds to jieba's global dictionary out of the features.
    """
    tokenizer = _extra("jieba").Tokenizer()
    tokenizer.FREQ, tokenizer.total = tokenizer.gen_pfdict(tokenizer.get_dict_file())
    tokenizer.initialized = True
    return functools.partial(tokenizer.cut, HMM=False)


@functools.cache
def _readings() -> Callable[[str], list[str]]:
    """A function from a word to the readings of its characters, without tones."""
    pypinyin = _extra("pypinyin")
    if not importlib.import_module("pypinyin.constants").PHRASES_DICT:
        raise UserError(
            "pypinyin runs without its phrases, so that many words get other readings than in training",
            received="the environment variable PYPINYIN_NO_PHRASES",
            fix="unset it",
        )
    return pypinyin.lazy_pinyin


@functools.lru_cache(maxsize=65_536)
def _pinyin(word: str) -> str:
    """Readings of a word's characters, joined by a space. A character without any stands for itself."""
    # As text, not as a list: pypinyin looks for the phrases inside a word that is not one itself only then.
    return " ".join(_readings()(word))


def require_extra(granularities: Sequence[Granularity], segmenter: Segmenter) -> None:
    """Make sure that the packages are there that these settings need.

    Raises:
        UserError: One is missing; the message has the line that installs it.
    """
    for name in _packages(granularities, segmenter):
        _extra(name)


def _packages(granularities: Sequence[Granularity], segmenter: Segmenter) -> list[str]:
    """Characters alone need no words, so no segmenter either."""
    jieba = ["jieba"] if segmenter == "jieba" and set(granularities) != {"characters"} else []
    return jieba + (["pypinyin"] if "pinyin" in granularities else [])


class Tokenizer:
    """Cuts texts into tokens and hashes them. Picklable, and safe to share between threads.

    Attributes:
        granularities: What `tokens` and `keys` return, in this order.
        segmenter: As given.
        ngram: Words in one n-gram.
        max_length: Most tokens of one text and granularity; the first are kept.
    """

    def __init__(
        self,
        granularities: Sequence[Granularity],
        *,
        segmenter: Segmenter,
        ngram: int = 2,
        max_length: int,
        cache_entries: int = 65_536,
    ) -> None:
        """Check the settings; dictionaries are read when the first text arrives.

        Args:
            granularities: One or more.
            segmenter: Who finds the words in Chinese text.
            ngram: Words in one n-gram, 2 to LONGEST_NGRAM; without `word_ngrams` it has no effect.
            max_length: Most tokens of one text and granularity, 1 or more.
            cache_entries: Texts whose keys are remembered across calls, the least recently used ones leaving first.
                A title of 20 Chinese characters takes 1.5 KB with all granularities. 0 remembers nothing.

        Raises:
            UserError: A setting is not allowed, or a package is missing.
        """
        _check(granularities, segmenter, ngram, max_length, cache_entries)
        require_extra(granularities, segmenter)
        self.granularities = tuple(granularities)
        self.segmenter, self.ngram, self.max_length = segmenter, ngram, max_length
        self._cache_entries = cache_entries
        self._cache: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        make = functools.partial(
            Tokenizer,
            self.granularities,
            segmenter=self.segmenter,
            ngram=self.ngram,
            max_length=self.max_length,
            cache_entries=self._cache_entries,
        )
        return make, ()

    def versions(self) -> dict[str, str]:
        """What the tokens depend on besides the text and the settings: to be stored with a model and compared."""
        packages = {name: _extra(name).__version__ for name in _packages(self.granularities, self.segmenter)}
        return {"rules": RULES, "unicode": unicodedata.unidata_version, **packages}

    def tokens(self, text: str) -> dict[Granularity, list[str]]:
        """The tokens of a text in their order, at most `max_length` per granularity; none for an empty text."""
        return {name: tokens[: self.max_length] for name, tokens in self._all_tokens(text).items()}

    def keys(
        self, column: pa.Array, cut: "collections.Counter[Granularity] | None" = None
    ) -> dict[Granularity, tuple[np.ndarray, np.ndarray]]:
        """The keys of the tokens of n texts: FNV-1a of `<granularity>:<token>`, as docs/ids.md hashes text.

        Args:
            column: (n,) text of any Arrow layout. A null has no tokens, like an empty text.
            cut: Counts per granularity the texts that had more than `max_length` tokens, or more characters than
                LONGEST_TEXT; None counts nothing.

        Returns:
            Per granularity the number of tokens of each text, (n,) int64, and the keys of all texts one after
            another, (m,) int64.

        Raises:
            UserError: The column is not text, or a text is not valid UTF-8.
        """
        texts, rows = _distinct(column)
        num_kinds = len(self.granularities)
        entries = [np.zeros(2 * num_kinds, dtype=np.int64), *self._entries(texts)]  # The first is that of nulls.
        flat = np.concatenate(entries)
        starts = np.cumsum([0, *map(len, entries[:-1])])
        heads = flat[starts[:, None] + np.arange(2 * num_kinds)]
        lengths, were_cut = heads[:, :num_kinds], heads[:, num_kinds:]
        begins = starts[:, None] + 2 * num_kinds + np.cumsum(lengths, axis=1) - lengths
        result = {}
        for i, name in enumerate(self.granularities):
            row_lengths = lengths[rows, i]
            shifts = begins[rows, i] - (np.cumsum(row_lengths) - row_lengths)
            result[name] = (row_lengths, flat[np.arange(row_lengths.sum()) + np.repeat(shifts, row_lengths)])
            if cut is not None:
                cut[name] += int(were_cut[rows, i].sum())
        return result

    def _all_tokens(self, text: str) -> dict[Granularity, list[str]]:
        text, classes = _normalized(text[:LONGEST_TEXT])
        words = [] if self.granularities == ("characters",) else list(self._words(text, classes))
        found: dict[Granularity, list[str]] = {}
        for name in self.granularities:
            if name == "words":
                found[name] = words
            elif name == "characters":
                found[name] = [text[m.start() : m.end()] for m in _CHARACTER.finditer(classes)]
            elif name == "word_ngrams":
                found[name] = [" ".join(words[i : i + self.ngram]) for i in range(len(words) - self.ngram + 1)]
            else:
                found[name] = [_pinyin(word) for word in words if _CLASSES[ord(word[0])] == _HAN]
        return found

    def _words(self, text: str, classes: str) -> Iterator[str]:
        cut_han: Callable[[str], Iterable[str]] = _jieba_words() if self.segmenter == "jieba" else iter
        for match in _WORD.finditer(classes):
            word = text[match.start() : match.end()]
            if classes[match.start()] == _HAN:
                yield from cut_han(word)
            else:
                yield word

    def _entries(self, texts: list[str]) -> list[np.ndarray]:
        """Per text the number of keys of each granularity, whether each was cut (0 or 1), and all the keys."""
        with self._lock:
            entries = [self._cache.get(text) for text in texts]
        new = [i for i, entry in enumerate(entries) if entry is None]
        for begin in range(0, len(new), _NEW_TEXTS):
            part = new[begin : begin + _NEW_TEXTS]
            for i, entry in zip(part, self._new_entries([texts[i] for i in part]), strict=True):
                entries[i] = entry
        known = [entry for entry in entries if entry is not None]
        assert len(known) == len(texts), "a text was left without tokens"
        with self._lock:
            for text, entry in zip(texts, known, strict=True):
                if len(text) <= _LONGEST_CACHED:
                    self._cache[text] = entry
                    self._cache.move_to_end(text)
            while len(self._cache) > self._cache_entries:
                self._cache.popitem(last=False)
        return known

    def _new_entries(self, texts: list[str]) -> Iterator[np.ndarray]:
        from recsys.data.columns import id_keys

        heads, hashed = [], []
        for text in texts:
            found = self._all_tokens(text)
            lengths = [len(tokens) for tokens in found.values()]
            too_long = len(text) > LONGEST_TEXT
            heads.append(
                [
                    *(min(length, self.max_length) for length in lengths),
                    *(too_long or length > self.max_length for length in lengths),
                ]
            )
            hashed += [f"{name}:{t}" for name, tokens in found.items() for t in tokens[: self.max_length]]
        keys, _ = id_keys(pa.array(hashed, pa.large_string()))
        begin = 0
        for head in np.array(heads, dtype=np.int64).reshape(-1, 2 * len(self.granularities)):
            end = begin + int(head[: len(self.granularities)].sum())
            yield np.concatenate([head, keys[begin:end]])  # A copy, so that no entry keeps its batch alive.
            begin = end


def _distinct(column: pa.Array) -> tuple[list[str], np.ndarray]:
    """The distinct texts of a column, and for each row 1 + the position of its text, or 0 for a null."""
    from recsys.data.columns import is_text  # Here, because it imports torch, which recipes do without.

    if not (is_text(column.type) or pa.types.is_null(column.type)):
        raise UserError(
            "Only text can be cut into tokens",
            received=f"a column of the type {column.type}",
            allowed="text (string, large_string, string_view), dictionary-encoded or not",
        )
    if pa.types.is_dictionary(column.type):  # Values may repeat or be null in it, and a slice uses few of them.
        column = column.dictionary.cast(pa.large_string()).take(column.indices)
    distinct = column.cast(pa.large_string()).dictionary_encode()
    try:
        texts = distinct.dictionary.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(
            "A text is not valid UTF-8",
            received=repr(error.object[:60]),
            fix="decode the column with its true encoding when the data is prepared",
        ) from error
    return texts, distinct.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) + 1


def _check(
    granularities: Sequence[Granularity], segmenter: Segmenter, ngram: int, max_length: int, cache_entries: int
) -> None:
    allowed = get_args(Granularity)
    for name in granularities:
        if name not in allowed:
            raise UserError(
                f"Text has no such granularity.{nearest(str(name), allowed)}", received=name, allowed=allowed
            )
    if not granularities or len(set(granularities)) < len(granularities):
        raise UserError("Granularities should be one or more, each once", received=granularities, allowed=allowed)
    if segmenter not in get_args(Segmenter):
        raise UserError("Text has no such segmenter", received=segmenter, allowed=get_args(Segmenter))
    if not 2 <= ngram <= LONGEST_NGRAM:
        raise UserError("ngram is the number of words that are joined", received=ngram, allowed=f"2 to {LONGEST_NGRAM}")
    if max_length < 1:
        raise UserError("max_length is the number of tokens to keep", received=max_length, allowed="1 or more")
    if cache_entries < 0:
        raise UserError("cache_entries is the number of texts to remember", received=cache_entries, allowed="0 or more")
