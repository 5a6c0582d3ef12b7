import collections
import concurrent.futures
import copy
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import time
import unicodedata
from pathlib import Path
from typing import get_args

import jieba
import numpy as np
import pyarrow as pa
import pypinyin
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys import text
from recsys.errors import UserError
from recsys.features import Granularity
from recsys.text import Tokenizer
from tests._reference_hash import WORD, fnv1a

ALL = get_args(Granularity)
ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "text.md").read_text(encoding="utf-8")

# Chinese is written in escapes, as the house style wants it; docs/text.md has examples that can be read.
YOU, GOOD, BEIJING, PHONE = "\u4f60", "\u597d", "\u5317\u4eac", "\u624b\u673a"
TSINGHUA = "\u6211\u6765\u5230\u5317\u4eac\u6e05\u534e\u5927\u5b66"  # I came to Tsinghua University in Beijing.
FORMULA, OFFENSIVE, AFFAIR = "\u516c\u5f0f", "\u653b\u52bf", "\u516c\u4e8b"  # gong1 shi4, gong1 shi4, gong1 shi4
MOTHER, HORSE = "\u5988", "\u9a6c"  # ma1, ma3
CHONGQING, GREAT_WALL, HEAVY = "\u91cd\u5e86", "\u957f\u57ce", "\u91cd"
CHONGQING_AREA = "\u91cd\u5e86\u5730\u533a"  # A word of jieba's dictionary, but no phrase of pypinyin's.

# What texts of shops and search boxes are made of, and what breaks tokenizers.
PIECES = [*TSINGHUA, *"\u3007\u3005\u9fff\U00020000", *"aZ9_ .,:-'", "iPhone15", "\u00df", "e\u0301", "\u00e9"]
PIECES += ["\uff21\uff11\u3000", "\uff0c", "\u306e\u304b\u3099", "\u30e9\u30fc", "\uff76\uff9e", "\ud55c\uae00"]
PIECES += ["\U0001f525", "\u2764\ufe0f", "\U0001f44d\U0001f3fd", "\u200d", "\u00ad", "\u0301", "\u20e3", "\u2460"]
PIECES += ["\u0939\u093f", "\u0e01\u0e33", "\u0130", "\x00", "\n", "\u00b2", "$", "\u00a9", "\ue000", "\ufdfa"]
texts = st.lists(st.sampled_from(PIECES) | st.characters(codec="utf-8"), max_size=12).map("".join)


def tokenizer(
    *granularities: Granularity, segmenter: text.Segmenter = "jieba", max_length: int = 50, **more
) -> Tokenizer:
    return Tokenizer(granularities or ALL, segmenter=segmenter, max_length=max_length, **more)


def words_of(string: str, segmenter: text.Segmenter = "jieba") -> list[str]:
    return tokenizer("words", segmenter=segmenter, max_length=1000).tokens(string)["words"]


def python_keys(granularity: str, tokens: list[str]) -> list[int]:
    return [fnv1a(f"{granularity}:{token}".encode()) for token in tokens]


def lists(result: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    """The unsigned keys of each row."""
    lengths, keys = result
    assert lengths.dtype == keys.dtype == np.int64
    return [part.tolist() for part in np.split(keys.view(np.uint64), np.cumsum(lengths)[:-1])] if len(lengths) else []


# The rules of docs/text.md once more, character by character and with Unicode's names in place of ranges.


def reference_normalized(string: str) -> str:
    string = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", string).casefold())
    kept = ""
    for c in string:
        if unicodedata.category(c) not in ("Cf", "Me") and "VARIATION SELECTOR-" not in unicodedata.name(c, ""):
            kept += c
    return unicodedata.normalize("NFKC", kept)


HAN_SIGNS = ("IDEOGRAPHIC ITERATION MARK", "IDEOGRAPHIC CLOSING MARK", "IDEOGRAPHIC NUMBER ZERO")


def reference_class(c: str) -> str:
    category, name = unicodedata.category(c), unicodedata.name(c, "")
    if category == "So":
        return "symbol"
    if category.startswith("M"):
        return "mark"
    if category[0] not in "LN":
        return "separator"
    if name.startswith(("CJK UNIFIED IDEOGRAPH", "CJK COMPATIBILITY IDEOGRAPH")) or name in HAN_SIGNS:
        return "han"
    if ord(c) < 0x10000 and name.startswith(("HIRAGANA", "KATAKANA")):  # The other planes hold historic kana only.
        return name.split(" ")[0].split("-")[0].lower()
    return "letter"


def reference_tokens(string: str) -> tuple[list[str], list[str]]:
    """Words of the segmenter `unicode`, and characters."""
    words: list[str] = []
    characters: list[str] = []
    before = "separator"  # Class of what the next mark or letter may be joined to.
    for c in reference_normalized(string):
        kind = reference_class(c)
        if kind == "mark" and before in ("letter", "hiragana", "katakana"):
            words[-1] += c
            characters[-1] += c
            continue
        if kind not in ("mark", "separator"):
            characters.append(c)
            if kind == before and kind in ("letter", "katakana"):
                words[-1] += c
            else:
                words.append(c)
        before = "separator" if kind == "mark" else kind
    return words, characters


@settings(max_examples=300, deadline=None)
@given(texts)
def test_words_and_characters_equal_a_reference_that_reads_one_character_at_a_time(string):
    found = tokenizer("words", "characters", segmenter="unicode", max_length=1000).tokens(string)
    assert (found["words"], found["characters"]) == reference_tokens(string)


@pytest.mark.parametrize(
    "same",
    [
        ["caf\u00e9", "cafe\u0301", "CAFE\u0301", "\uff23af\u00e9", "ca\u00adf\u00e9", "cafe\u200d\u0301"],
        ["\u0390", "\u03b9\u0308\u0301", "\u0399\u0308\u0301"],
        ["strasse", "Stra\u00dfe", "STRA\u1e9eE"],
        ["\u30ac 10", "\uff76\uff9e \u2469", "\u30ab\u3099\u300010"],
        ["\u2764 1", "\u2764\ufe0f1\ufe0f\u20e3"],
    ],
)
def test_writings_of_the_same_text_have_the_same_tokens(same):
    assert [tokenizer(segmenter="unicode").tokens(string) for string in same[1:]] == [
        tokenizer(segmenter="unicode").tokens(same[0])
    ] * (len(same) - 1)


def test_every_code_point_has_the_class_that_its_unicode_name_says():
    letters = {
        "symbol": "s",
        "mark": "m",
        "separator": " ",
        "han": "h",
        "letter": "w",
        "hiragana": "k",
        "katakana": "t",
    }
    for code in range(sys.maxunicode + 1):
        c = chr(code)
        # Only what normalisation can leave behind.
        if unicodedata.category(c) != "Cs" and reference_normalized(c) == c:
            assert text._CLASSES[code] == letters[reference_class(c)], hex(code)


@settings(max_examples=200, deadline=None)
@given(texts)
def test_jieba_only_divides_runs_of_han_and_loses_nothing(string):
    words, singles = words_of(string), words_of(string, "unicode")
    assert "".join(words) == "".join(singles)
    assert [w for w in words if reference_class(w[0]) != "han"] == [
        w for w in singles if reference_class(w[0]) != "han"
    ]


def test_words_of_chinese_are_those_of_jieba_without_its_markov_model(tmp_path, caplog):
    caplog.set_level("CRITICAL", logger="jieba")
    theirs = jieba.Tokenizer()
    theirs.tmp_dir = str(tmp_path)
    known = [BEIJING, PHONE, TSINGHUA, FORMULA, CHONGQING, CHONGQING_AREA, GREAT_WALL, YOU + GOOD, MOTHER, HORSE]
    rng = np.random.default_rng(0)
    for _ in range(300):
        sentence = "".join(known[i] for i in rng.integers(len(known), size=8))
        sentence += "".join(map(chr, rng.integers(0x4E00, 0x9FA5, size=6)))
        assert words_of(sentence) == list(theirs.cut(sentence, HMM=False))
    assert words_of(TSINGHUA) == [TSINGHUA[0], TSINGHUA[1:3], BEIJING, TSINGHUA[5:]]


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(2, text.LONGEST_NGRAM))
def test_ngrams_are_all_runs_of_neighbouring_words_joined_by_a_space(string, ngram):
    found = tokenizer("words", "word_ngrams", ngram=ngram, max_length=1000).tokens(string)
    expected = []
    for i, _ in enumerate(found["words"]):
        run = found["words"][i:][:ngram]
        if len(run) == ngram:
            expected.append(" ".join(run))
    assert found["word_ngrams"] == expected


@settings(max_examples=200, deadline=None)
@given(texts)
def test_tokens_are_never_empty_and_hold_no_colon_and_no_space_but_the_joining_one(string):
    found = tokenizer().tokens(string)
    for token in (*found["words"], *found["characters"]):
        assert token and not re.search(r"[:\s]", token)
    for token in (*found["word_ngrams"], *found["pinyin"]):
        assert token and ":" not in token and all(part and not re.search(r"\s", part) for part in token.split(" "))


def test_ngrams_of_other_words_with_the_same_letters_have_other_keys():
    keys = tokenizer("word_ngrams").keys(pa.array(["ab c", "a bc"]))["word_ngrams"][1]
    assert len(set(keys.tolist())) == 2


def test_homophones_share_the_pinyin_key_but_not_the_word_key():
    for words in ([FORMULA, OFFENSIVE, AFFAIR], [MOTHER, HORSE]):
        found = tokenizer("words", "pinyin").keys(pa.array(words))
        assert len(set(found["words"][1].tolist())) == len(words)
        assert len(found["pinyin"][1]) == len(words) and len(set(found["pinyin"][1].tolist())) == 1


def test_a_character_with_several_readings_is_read_as_its_word_wants():
    found = tokenizer("pinyin")
    assert found.tokens(CHONGQING + HEAVY)["pinyin"] == ["chong qing", "zhong"]
    assert words_of(CHONGQING_AREA) == [CHONGQING_AREA]
    assert found.tokens(CHONGQING_AREA)["pinyin"] == ["chong qing di qu"]
    assert tokenizer("pinyin", segmenter="unicode").tokens(CHONGQING)["pinyin"] == ["zhong", "qing"]


def test_only_han_words_have_pinyin():
    assert tokenizer("pinyin").tokens(f"ni hao {YOU}{GOOD} \u30e9 \U0001f525 5g")["pinyin"] == ["ni hao"]


def test_granularities_never_share_a_key_in_one_table():
    # The pinyin of the second text is the word of the first; a word of one character is also a character.
    found = tokenizer().keys(pa.array(["ni hao", YOU, GOOD, "a"]))
    sets = [set(keys.tolist()) for _, keys in found.values()]
    assert all(sets)
    assert len(set.union(*sets)) == sum(map(len, sets))


# Keys and Arrow.


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.none() | texts, max_size=8),
    st.sampled_from(["string", "large_string", "string_view", "dictionary"]),
    st.sampled_from(["jieba", "unicode"]),
    st.integers(1, 12),
    st.integers(0, 8),
    st.integers(0, 3),
)
def test_keys_are_the_plain_hash_of_the_tokens(strings, layout, segmenter, max_length, begin, cache_entries):
    kinds = {"large_string": pa.large_string(), "string_view": pa.string_view()}
    column = pa.array(strings, kinds.get(layout, pa.string()))
    column = (column.dictionary_encode() if layout == "dictionary" else column)[begin:]
    tool = tokenizer(segmenter=segmenter, max_length=max_length, cache_entries=cache_entries)
    whole = tokenizer(segmenter=segmenter, max_length=100_000)
    cut: collections.Counter[Granularity] = collections.Counter()
    found = tool.keys(column, cut)
    for name in ALL:
        tokens = [[] if string is None else whole.tokens(string)[name] for string in strings[begin:]]
        assert lists(found[name]) == [python_keys(name, row[:max_length]) for row in tokens]
        assert cut[name] == sum(len(row) > max_length for row in tokens)


@pytest.mark.parametrize(
    "column",
    [
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None, 3], pa.int8()), pa.array(["a b", "a b", None, "c"])),
        pa.DictionaryArray.from_arrays(
            pa.array([0, 0, 1, 1, 2], pa.uint32()), pa.array(["a b", None, "c"], pa.large_string())
        ),
        pa.DictionaryArray.from_arrays(pa.array([0, 0, 1, 1, 2]), pa.array(["a b", None, "c"], pa.string_view())),
        pa.DictionaryArray.from_arrays(pa.array([5, 0, 0, 1, 1, 2, 7]), pa.array(["a b", None, "c", *"defgh"]))[1:6],
    ],
    ids=["repeated values", "large values", "views", "slice of many values"],
)
def test_dictionaries_are_read_by_what_their_rows_say(column):
    a_b, c = python_keys("words", ["a", "b"]), python_keys("words", ["c"])
    assert lists(tokenizer("words").keys(column)["words"]) == [a_b, a_b, [], [], c]


@pytest.mark.parametrize("column", [pa.array([None, None]), pa.array([None, ""], pa.string())])
def test_null_and_empty_texts_have_no_tokens(column):
    for lengths, keys in tokenizer().keys(column).values():
        assert lengths.tolist() == [0, 0] and len(keys) == 0


def test_a_column_without_rows_has_no_lists():
    for column in (pa.array([], pa.string()), pa.array([], pa.string()).dictionary_encode(), pa.array([], pa.null())):
        assert all(len(lengths) == len(keys) == 0 for lengths, keys in tokenizer().keys(column).values())


def test_a_text_has_the_same_keys_in_any_company():
    strings = [TSINGHUA, "ab c", None, f"{PHONE}5G", "", TSINGHUA + PHONE, "ab c", "\U0001f525"] * 3
    alone = [tokenizer().keys(pa.array([string], pa.string())) for string in strings]
    order = np.random.default_rng(0).permutation(len(strings))
    small_cache = tokenizer(cache_entries=2)
    small_cache.keys(pa.array(strings[:3]))
    shuffled = small_cache.keys(pa.array([strings[i] for i in order]))
    for name in ALL:
        assert lists(shuffled[name]) == [lists(alone[i][name])[0] for i in order]


def test_more_new_texts_than_are_cut_at_a_time_keep_their_order(monkeypatch):
    monkeypatch.setattr(text, "_NEW_TEXTS", 3)
    strings = [f"w{i} x" for i in range(10)]
    found = tokenizer("words").keys(pa.array(strings))["words"]
    assert lists(found) == [python_keys("words", string.split()) for string in strings]


@pytest.mark.parametrize(
    "column", [pa.array([1]), pa.array([b"a"]), pa.array([["a"]]), pa.array([1]).dictionary_encode()]
)
def test_columns_that_are_not_text_are_refused(column):
    with pytest.raises(UserError, match="Only text can be cut"):
        tokenizer("words").keys(column)


def test_bytes_that_are_not_utf8_are_named():
    offsets = pa.py_buffer(np.array([0, 2, 4], np.int32).tobytes())
    column = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ok\xff\xfe")])
    with pytest.raises(UserError, match=r"not valid UTF-8. Received: b'\\xff\\xfe'"):
        tokenizer("words").keys(column)


def test_a_lone_surrogate_of_python_is_no_token():
    assert tokenizer().tokens("\ud800a")["characters"] == ["a"]


# Limits.


def test_the_first_tokens_stay_and_rows_with_more_are_counted():
    tool = tokenizer("words", "word_ngrams", segmenter="unicode", max_length=2)
    cut: collections.Counter[Granularity] = collections.Counter(words=5)
    found = tool.keys(pa.array(["a b c", "a b", "a b c", None]), cut)
    assert lists(found["words"]) == [python_keys("words", ["a", "b"])] * 3 + [[]]
    assert lists(found["word_ngrams"])[0] == python_keys("word_ngrams", ["a b", "b c"])
    assert cut == {"words": 5 + 2, "word_ngrams": 0}


def test_what_lies_beyond_the_longest_text_is_not_read_and_counts_as_cut():
    longest = "b " + "a" * (text.LONGEST_TEXT - 2)
    cut: collections.Counter[Granularity] = collections.Counter()
    tool = tokenizer("words", segmenter="unicode")
    just, beyond = lists(tool.keys(pa.array([longest, longest + "c d"]), cut)["words"])
    assert just == beyond == python_keys("words", longest.split())
    assert cut == {"words": 1}


def test_the_work_on_a_huge_text_stays_bounded(monkeypatch):
    lengths = []
    plain = text._normalized
    monkeypatch.setattr(text, "_normalized", lambda string: (lengths.append(len(string)), plain(string))[1])
    tokenizer().keys(pa.array([TSINGHUA * 100_000, "\ufdfa" * 50_000]))
    assert lengths == [text.LONGEST_TEXT] * 2


# The cache.


def test_remembered_texts_are_not_cut_again(monkeypatch):
    tool = tokenizer()
    column = pa.array([TSINGHUA, "a b c", None])
    first = tool.keys(column)
    monkeypatch.setattr(Tokenizer, "_all_tokens", lambda self, string: pytest.fail(f"cut {string[:20]!r} again"))
    again = tool.keys(column)
    for name in ALL:
        assert lists(first[name]) == lists(again[name])
    with pytest.raises(pytest.fail.Exception):
        tool.keys(pa.array(["new"]))


def test_the_least_recently_used_text_leaves_the_cache_first():
    tool = tokenizer("words", cache_entries=2)
    for string in ("a", "b", "a", "c"):
        tool.keys(pa.array([string]))
    assert list(tool._cache) == ["a", "c"]
    tool.keys(pa.array(["d", "e", "f", "g"]))
    assert list(tool._cache) == ["f", "g"]


def test_long_texts_and_a_cache_of_nothing_remember_nothing():
    tool = tokenizer("words")
    tool.keys(pa.array(["a" * (text._LONGEST_CACHED + 1)]))
    assert not tool._cache
    tool = tokenizer("words", cache_entries=0)
    tool.keys(pa.array(["a"]))
    assert not tool._cache


def test_entries_of_the_cache_do_not_keep_their_batch_alive():
    tool = tokenizer("words")
    tool.keys(pa.array([f"w{i}" for i in range(100)]))
    assert all(entry.base is None for entry in tool._cache.values())


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda tool: pickle.loads(pickle.dumps(tool))], ids=["copy", "pickle"]
)
def test_copies_have_the_settings_and_not_the_cache(clone):
    tool = Tokenizer(["word_ngrams", "words"], segmenter="unicode", ngram=3, max_length=2, cache_entries=7)
    column = pa.array(["a b c d e", TSINGHUA])
    before = tool.keys(column)
    other = clone(tool)
    assert not other._cache and other._cache_entries == 7
    assert {name: lists(keys) for name, keys in other.keys(column).items()} == {
        name: lists(keys) for name, keys in before.items()
    }


class Yielding(collections.OrderedDict):
    """Lets other threads run where a cache without a lock would break."""

    def __len__(self) -> int:
        length = super().__len__()
        time.sleep(1e-5)
        return length

    def move_to_end(self, key: str, last: bool = True) -> None:
        time.sleep(1e-5)
        super().move_to_end(key, last)


@pytest.mark.parametrize("cache_entries", [0, 5])
def test_threads_may_share_a_tokenizer(cache_entries):
    tool = tokenizer("words", segmenter="unicode", cache_entries=cache_entries)
    tool._cache = Yielding()

    def agrees(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        batches = [[f"w{i}" for i in rng.integers(20, size=10)] for _ in range(10)]
        return all(
            lists(tool.keys(pa.array(batch))["words"]) == [python_keys("words", [string]) for string in batch]
            for batch in batches
        )

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(agrees, range(4)))


# Other processes.


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SENTENCES = [TSINGHUA, f"{CHONGQING}{PHONE}5G, iPhone15 \U0001f525", FORMULA + OFFENSIVE + GREAT_WALL, "\u4e86" * 40]
DIGEST = f"""
import hashlib, json
from recsys.text import Tokenizer
tool = Tokenizer({ALL!r}, segmenter="jieba", max_length=50)
print(hashlib.sha256(json.dumps([tool.tokens(s) for s in {SENTENCES!r}]).encode()).hexdigest())
"""


def test_processes_that_start_together_agree_write_nothing_and_read_no_cache(tmp_path):
    planted = tmp_path / "jieba.cache"
    planted.write_bytes(b"stale")
    running = [python(DIGEST, PYTHONHASHSEED=str(seed), TMPDIR=str(tmp_path)) for seed in (0, 1, 2)]
    tool = tokenizer()
    expected = hashlib.sha256(json.dumps([tool.tokens(s) for s in SENTENCES]).encode()).hexdigest()
    for process in running:
        out, log = process.communicate(timeout=120)
        assert (out.strip(), log, process.returncode) == (expected, "", 0)
    assert [p.name for p in tmp_path.iterdir()] == ["jieba.cache"] and planted.read_bytes() == b"stale"


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
from recsys.errors import UserError
from recsys.text import Tokenizer, require_extra
{code}
"""


@pytest.mark.parametrize("missing", ["jieba", "pypinyin"])
def test_a_missing_package_is_an_error_with_the_line_that_installs_it(missing):
    code = """
for make in (lambda: Tokenizer(["words", "pinyin"], segmenter="jieba", max_length=5),
             lambda: require_extra(["words", "pinyin"], "jieba")):
    try:
        make()
    except UserError as error:
        print(error)
"""
    out, log = python(BLOCKED.format(missing=[missing], code=code)).communicate(timeout=120)
    assert log == ""
    lines = out.splitlines()
    assert len(lines) == 2
    assert all(f"the package {missing}, which is not installed" in line for line in lines)
    assert all(f"pip install '{missing}>=" in line for line in lines)


def test_the_line_that_installs_allows_what_setup_cfg_allows():
    extra = (ROOT / "setup.cfg").read_text().split("\ntext =\n")[1]
    for name, line in text._INSTALL.items():
        requirement = re.search(r"'(.*)'", line)[1]
        assert requirement.startswith(name) and f"    {requirement}\n" in extra


def test_settings_that_need_no_package_work_without_them():
    code = """
tool = Tokenizer(["words", "characters", "word_ngrams"], segmenter="unicode", max_length=5)
require_extra(["characters"], "jieba")
only_characters = Tokenizer(["characters"], segmenter="jieba", max_length=5)
print(tool.tokens("a b"), only_characters.tokens("ab"), only_characters.versions().keys())
assert "torch" not in sys.modules
"""
    out, log = python(BLOCKED.format(missing=["jieba", "pypinyin", "torch"], code=code)).communicate(timeout=120)
    assert log == ""
    expected = {"words": ["a", "b"], "characters": ["a", "b"], "word_ngrams": ["a b"]}
    assert out.strip() == f"{expected} {{'characters': ['a', 'b']}} dict_keys(['rules', 'unicode'])"


def test_a_package_that_is_there_but_broken_keeps_its_own_error(tmp_path):
    (tmp_path / "jieba.py").write_text("import not_there\n")
    code = "from recsys.text import require_extra; require_extra(['words'], 'jieba')"
    _, log = python(code, PYTHONPATH=str(tmp_path)).communicate(timeout=120)
    assert log.strip().endswith("ModuleNotFoundError: No module named 'not_there'")


def test_pinyin_without_phrases_is_refused():
    code = """
from recsys.text import Tokenizer
Tokenizer(["pinyin"], segmenter="unicode", max_length=5).tokens("\\u4f60")
"""
    _, log = python(code, PYPINYIN_NO_PHRASES="1").communicate(timeout=120)
    assert "UserError" in log and "PYPINYIN_NO_PHRASES" in log


# Settings and documentation.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"granularities": ["word"]}, "no such granularity. Did you mean 'words'"),
        ({"granularities": []}, "one or more, each once"),
        ({"granularities": ["words", "words"]}, "one or more, each once"),
        ({"segmenter": "spaces"}, "no such segmenter"),
        ({"ngram": 1}, "ngram is the number of words"),
        ({"ngram": text.LONGEST_NGRAM + 1}, "ngram is the number of words"),
        ({"max_length": 0}, "max_length is the number of tokens"),
        ({"cache_entries": -1}, "cache_entries is the number of texts"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changed, message):
    good = {"granularities": ["words"], "segmenter": "unicode", "max_length": 3}
    Tokenizer(**good)
    with pytest.raises(UserError, match=re.escape(message)):
        Tokenizer(**{**good, **changed})


def test_versions_name_all_that_the_tokens_depend_on():
    assert tokenizer().versions() == {
        "rules": "text/1",
        "unicode": unicodedata.unidata_version,
        "jieba": jieba.__version__,
        "pypinyin": pypinyin.__version__,
    }


def test_the_examples_in_the_documentation_are_right():
    pattern = rf"^\| `(.*?)` \| ({'|'.join(ALL)}) \| (jieba|unicode) \| (.*?) \|$"
    rows = re.findall(pattern, DOCUMENT, re.MULTILINE)
    assert len(rows) >= 15 and {row[1] for row in rows} == set(ALL)
    for string, granularity, segmenter, shown in rows:
        found = tokenizer(granularity, segmenter=segmenter).tokens(string)[granularity]
        assert found == ([] if shown == "(none)" else shown.split(", ")), string


def test_the_keys_and_names_in_the_documentation_are_right():
    rows = re.findall(r"^\| `(\w+:.*?)` \| (0x[0-9a-f]{16}) \|$", DOCUMENT, re.MULTILINE)
    assert {row[0].split(":")[0] for row in rows} == set(ALL)
    for data, key in rows:
        assert int(key, 16) == fnv1a(data.encode()) < WORD
    assert f"`{text.RULES}`" in DOCUMENT and f"first {text.LONGEST_TEXT:,} code points" in DOCUMENT
    for first, last, _ in text._SCRIPTS:
        assert f"{first:04X}..{last:04X}" in DOCUMENT
