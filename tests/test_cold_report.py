import html.parser
import io
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from recsys import cold_report
from recsys.slices import by_frequency, slice_names
from recsys.usage import RANGES, TableUsage

NASTY = "item $\\frac$ [red]<b>&"  # a broken formula to matplotlib, colour to rich, a tag to a browser
UNSEEN = {"hot": 0.5, "cold": 0.25, "unknown": 0.125, "missing": 0.125}


def usage_of(num_lookups, num_rows=103, **settings):
    numbers = np.arange(num_lookups)
    usage = TableUsage(num_rows, **settings)
    usage.add(1 + numbers**2 % (num_rows - 1), numbers % 17)  # rows of no id, of one and of many
    return usage.as_dict()


def slices_of(num_rows=400, seed=0):
    rng = np.random.default_rng(seed)
    labels, counts = rng.integers(0, 2, num_rows), rng.choice([0, 1, 5, 50], num_rows)
    labels[counts == 1] = 0  # one class only; and there is no row with 100 occurrences
    return by_frequency(rng.random(num_rows), labels, None, counts)


def final_of(num_tables=2, splits=("valid", "test")):
    names = [NASTY, *(f"table_{i}" for i in range(1, num_tables))]
    policies = ["hot_cold", "hashed", "exact"]
    tables = {
        name: {"policy": policies[i % 3], **usage_of(500 + i, hot=10, max_tracked_rows=10 if i == 1 else 1000)}
        for i, name in enumerate(names)
    }
    return {
        "tables": tables,
        "traffic": {split: dict.fromkeys(tables, UNSEEN) for split in splits},
        "slices": {split: slices_of(seed=seed) for seed, split in enumerate(splits)},
    }


class Fragment(html.parser.HTMLParser):
    """Tables and tags as a browser would find them; tags must be balanced."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.sources, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert not self._open, f"unclosed tags {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "img":
            self.sources.append(dict(attrs)["src"])
        else:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "td" in self._open or "th" in self._open:
            self.tables[-1][-1][-1] += data


def printed(final):
    console = Console(file=io.StringIO(), width=140)
    cold_report.print_tables(final, console)
    return console.file.getvalue()


def test_the_tables_hold_the_numbers_of_the_file():
    final = final_of()
    usage, traffic, slices = cold_report.text_tables(final)
    assert [row[:3] for row in usage.rows] == [[NASTY, "hot_cold", "100"], ["table_1", "hashed", "100"]]
    first = final["tables"][NASTY]
    shares = [f"{100 * first[key]:.1f}%" for key in ("occupancy", "collision_rate", "shared_traffic")]
    assert len(set(shares)) == 3, "values that are alike would hide columns in a wrong order"
    assert usage.rows[0][3:] == [*shares, "all rows"]
    assert usage.rows[1][-1] == "1 in 10" and "Estimated" in usage.title
    assert [row[:2] for row in traffic.rows] == [
        [name, split] for name in (NASTY, "table_1") for split in ("train", "valid", "test")
    ]
    assert traffic.rows[0][2:] == [f"{100 * first['traffic'][name]:.1f}%" for name in RANGES]
    assert list(traffic.head[2:]) == list(RANGES)
    assert traffic.rows[1][2:] == ["50.0%", "25.0%", "12.5%", "12.5%"]
    assert [row[:2] for row in slices.rows] == [[split, name] for split in ("valid", "test") for name in slice_names()]
    zero, one, *_, most = final["slices"]["valid"]
    assert slices.rows[0][2:] == [f"{zero['rows']}", f"{zero['positives']}"] + [
        f"{zero[key]:.4f}" for key in ("auc", "logloss", "calibration")
    ]
    assert slices.rows[1][3:] == ["0", "undefined", f"{one['logloss']:.4f}", "undefined"]
    assert (most["rows"], slices.rows[4][2:]) == (0, ["0", "0", *["undefined"] * 3])


def test_a_table_nobody_looked_into_reads_as_such():
    final = {"tables": {"unused": {"policy": "hashed", **usage_of(0)}}}
    usage, traffic = cold_report.text_tables(final)
    assert "Estimated" not in usage.title
    assert usage.rows == [["unused", "hashed", "100", "0.0%", "-", "-", "all rows"]]
    assert traffic.rows == [["unused", "train", "-", "-", "-", "-"]]
    assert cold_report.draw(final) is None


def test_the_terminal_shows_every_row_and_takes_no_name_for_markup():
    text = printed(final_of())
    assert text.count(NASTY) == 1 + 3  # once with its use, once with each split
    for table in cold_report.text_tables(final_of()):
        for row in table.rows:
            assert any(all(cell in line for cell in row) for line in text.splitlines()), row


def test_the_page_shows_the_same_tables_and_escapes_names(tmp_path):
    final = final_of()
    fragment = Fragment(cold_report.html_fragment(final, tmp_path))
    expected = [[list(table.head), *map(list, table.rows)] for table in cold_report.text_tables(final)]
    assert fragment.tables == expected
    assert set(fragment.tags) <= {"img", "p", "div", "table", "tr", "td", "th"}
    assert (tmp_path / "cold.png").read_bytes().startswith(b"\x89PNG")
    assert len(fragment.sources) == 1 and fragment.sources[0].startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    ("keys", "num_tables", "num_panels"),
    [
        ([], 0, 0),
        (["tables"], 2, 1),
        (["traffic"], 1, 0),
        (["slices"], 1, 1),
        (["tables", "slices"], 3, 2),
        (["tables", "traffic"], 2, 1),
        (["tables", "traffic", "slices"], 3, 2),
    ],
)
def test_pieces_that_are_not_there_are_left_out(keys, num_tables, num_panels, tmp_path):
    (tmp_path / "cold.png").write_bytes(b"of an earlier report")
    whole = final_of()
    final = {"best_epoch": 1, **{key: whole[key] for key in keys}}
    assert len(cold_report.text_tables(final)) == num_tables
    figure = cold_report.draw(final)
    assert (figure is not None) == (num_panels > 0)
    assert figure is None or len([axes for axes in figure.axes if axes.get_title(loc="left")]) == num_panels
    fragment = cold_report.html_fragment(final, tmp_path)
    assert len(Fragment(fragment).tables) == num_tables
    assert bool(fragment) == bool(keys) == bool(printed(final))
    assert (tmp_path / "cold.png").exists() == (num_panels > 0), "a picture from before would contradict the page"


def test_empty_pieces_are_left_out_too(tmp_path):
    final = {"tables": {}, "traffic": {"test": {}}, "slices": {"test": []}}
    assert cold_report.text_tables(final) == []
    assert cold_report.draw(final) is None
    assert cold_report.html_fragment(final, tmp_path) == ""


def panel(figure, title):
    return next(axes for axes in figure.axes if axes.get_title(loc="left").startswith(title))


def test_lines_are_the_aucs_and_bars_the_rows_of_each_slice():
    final = final_of()
    figure = cold_report.draw(final)
    lines = panel(figure, "AUC").get_lines()
    bars = [bar.get_height() for axes in figure.axes if not axes.get_title(loc="left") for bar in axes.patches]
    assert [text.get_text() for text in panel(figure, "AUC").get_xticklabels()] == slice_names()
    for line, (split, rows) in zip(lines, final["slices"].items(), strict=True):
        assert line.get_label() == f"AUC, {split}"
        expected = [np.nan if row["auc"] is None else row["auc"] for row in rows]
        np.testing.assert_array_equal(line.get_ydata(), expected)
    assert bars == [row["rows"] for rows in final["slices"].values() for row in rows]


@pytest.mark.parametrize("num_tables", [1, 20, 21, 40])
def test_the_most_used_tables_are_drawn_with_all_their_traffic(num_tables):
    final = final_of(num_tables)
    axes = panel(cold_report.draw(final), "Training")
    names = [NASTY, *(f"table_{i}" for i in range(1, num_tables))]
    shown = names[::-1][:20]  # `final_of` gives each table more lookups than the one before
    assert [text.get_text() for text in axes.get_yticklabels()] == shown
    assert ("20 most used of" in axes.get_xlabel()) == (num_tables > 20)
    for kind, bars in zip(RANGES, axes.containers, strict=True):
        assert bars.get_label() == kind
        shares = [final["tables"][name]["traffic"][kind] for name in shown]
        assert [bar.get_width() for bar in bars] == pytest.approx(shares, rel=1e-12)
    assert [bar.get_x() + bar.get_width() for bar in axes.containers[-1]] == pytest.approx([1.0] * len(shown))


@pytest.mark.parametrize("num_tables", [1, 40])
def test_no_text_of_the_picture_is_cut_off_or_written_over_another(num_tables):
    final = final_of(num_tables)
    final["tables"]["x" * 300] = final["tables"][NASTY] | {"lookups": 1e6}
    figure = cold_report.draw(final)
    figure.draw_without_rendering()
    labels = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        labels += [axes.xaxis.label, axes.yaxis.label, axes._left_title]
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, sorted(axes.get_ylim()))):
            labels += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            labels += [tick.label2 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [(text, text.get_window_extent()) for text in labels if text.get_text() and text.get_visible()]
    assert len(boxes) > 15
    page = figure.bbox
    assert not [text for text, b in boxes if b.x0 < page.x0 or b.x1 > page.x1 or b.y0 < page.y0 or b.y1 > page.y1]
    assert not [(one, other) for i, (one, a) in enumerate(boxes) for other, b in boxes[:i] if a.overlaps(b)]


def test_the_module_imports_neither_matplotlib_nor_torch():
    code = "import sys, recsys.cold_report; assert not {'matplotlib', 'torch', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
