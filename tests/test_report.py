import base64
import html.parser
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from recsys.errors import UserError
from recsys.report import write_report

PICTURES = ["loss.png", "auc.png", "calibration.png", "plan.png"]
SOURCES = ["metrics.jsonl", "train_loss.jsonl", "metrics.json", "plan.json", "environment.json", "recipe.yaml"]
RECIPE = "model: {name: din}\n# <script>alert('&amp;')</script>\n"


TABLE = "_item$\\frac$<b>"  # a broken formula to matplotlib, a tag to a browser


class Page(html.parser.HTMLParser):
    """What a browser would find: tables by section heading, attributes, text; tags must be balanced."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.attributes, self.tags, self.texts = {}, [], [], {}
        self._open, self._heading = [], ""
        self.feed(text)
        self.close()
        assert not self._open, f"unclosed tags {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)
        if tag == "h2":
            self._heading = ""
        if tag == "tr":
            self.tables.setdefault(self._heading, []).append([])
        if tag in ("td", "th"):
            self.tables[self._heading][-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "h2":
            self._heading += data
        self.texts[self._heading] = self.texts.get(self._heading, "") + data
        if "td" in self._open or "th" in self._open:
            self.tables[self._heading][-1][-1] += data

    def row(self, heading, name):
        return next(row for row in self.tables[heading] if row[0] == name)

    @property
    def images(self):
        return [value for tag, name, value in self.attributes if (tag, name) == ("img", "src")]


def evaluation(epoch, **changes):
    row = {"epoch": epoch, "step": 100 * epoch, "split": "valid", "auc": 0.7 + epoch / 100, "gauc": 0.65}
    row |= {"logloss": 0.6, "normalized_entropy": 0.9, "calibration": 1.0, "rows": 9596, "train_loss": 0.61}
    return row | {"rows_per_s": 12345.6, "elapsed_s": 6.5 * epoch} | changes


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_dir(tmp_path):
    run = tmp_path / "din & run"
    run.mkdir()
    write_lines(
        run / "metrics.jsonl", [evaluation(1), evaluation(2, gauc=None), evaluation(2, split="test", auc=0.777)]
    )
    losses = 0.7 - np.arange(200) / 1000
    write_lines(run / "train_loss.jsonl", [{"step": 5 * i, "loss": loss} for i, loss in enumerate(losses)])
    curve = [{"mean_prob": i / 10, "mean_label": i / 11, "count": 100} for i in range(1, 10)]
    valid, test = ({"auc": auc, "gauc": gauc, "rows": 19633} for auc, gauc in ((0.72, None), (0.777, 0.666)))
    final = {"best_epoch": 2, "valid": valid, "test": test, "calibration_curve": {"test": curve}}
    (run / "metrics.json").write_text(json.dumps(final))
    halves = [
        {"rank": r, "row_offset": 500 * r, "rows": 500, "col_offset": 0, "cols": 16, "bytes": 32_000} for r in (0, 1)
    ]
    whole = {"rank": 1, "row_offset": 0, "rows": 10, "col_offset": 0, "cols": 8, "bytes": 320}
    tables = [
        {"name": TABLE, "rows": 1000, "dim": 16, "kind": "row_wise", "kernel": "fused", "shards": halves},
        {"name": "user$2", "rows": 10, "dim": 8, "kind": "table_wise", "kernel": "fused", "shards": [whole]},
    ]
    (run / "plan.json").write_text(json.dumps({"world_size": 2, "tables": tables, "dense_bytes": 4096}))
    (run / "environment.json").write_text(json.dumps({"torch": "2.13.0", "command": "recsys train <x>", "ranks": 2}))
    (run / "recipe.yaml").write_text(RECIPE)
    return run


def test_the_page_holds_its_pictures_and_needs_nothing_else(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert len(page.images) == len(PICTURES)
    for name, source in zip(PICTURES, page.images, strict=True):
        kind, data = source.split(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data) == (run_dir / name).read_bytes()
        assert data and base64.b64decode(data).startswith(b"\x89PNG")
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not [
        value for _, name, value in page.attributes if name in ("src", "href") and not value.startswith("data:")
    ]
    assert not re.search(r"url\(|@import|https?:", text)
    assert all(alt for tag, name, alt in page.attributes if (tag, name) == ("img", "alt"))
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes


def test_tables_show_the_numbers_of_the_files(run_dir):
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert page.row("Result", "metric")[:3] == ["metric", "valid", "test"]
    assert page.row("Result", "AUC")[1:3] == ["0.7200", "0.7770"]
    assert page.row("Result", "rows")[1:3] == ["19,633", "19,633"]
    head, *rows = page.tables["Evaluations"]
    assert [dict(zip(head, row, strict=True))["AUC"] for row in rows] == ["0.7100", "0.7200", "0.7770"]
    assert dict(zip(head, rows[0], strict=True))["elapsed, s"] == "6.5"
    item = page.row("Plan", TABLE)
    assert item[1:3] + item[4:] == ["row_wise", "fused", "1,000", "16", "62.5 KiB"]  # 2 x 32,000 bytes / 1,024
    assert "rank 1: rows 500 to 999, columns 0 to 15" in item[3]
    assert page.row("Environment", "command") == ["command", "recsys train <x>"]


def test_text_of_the_user_is_escaped_and_unchanged(run_dir):
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert RECIPE.strip() in page.texts["Recipe"]


def test_null_metrics_read_undefined_and_break_no_picture(run_dir):
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert page.row("Result", "GAUC")[1:3] == ["undefined", "0.6660"]
    write_lines(run_dir / "metrics.jsonl", [evaluation(1, auc=None, gauc=None, logloss=None, train_loss=None)])
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    row = dict(zip(*page.tables["Evaluations"], strict=True))
    assert (row["AUC"], row["GAUC"], row["train loss"]) == ("undefined", "undefined", "-")
    assert "metrics.jsonl absent or without values" in page.texts["AUC"]
    assert not (run_dir / "auc.png").exists(), "the picture of an earlier report must not stay"


def test_an_empty_folder_gives_a_page_that_names_every_absent_file(tmp_path):
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert Page(text).images == []
    assert all(name in text for name in SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_one_absent_file_costs_its_own_section_only(run_dir, name):
    (run_dir / name).unlink()
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    # The loss picture has two sources, so it stays when one of them is gone.
    lost = {"metrics.jsonl": {"AUC", "Evaluations"}, "train_loss.jsonl": set(), "plan.json": {"Plan"}}
    lost |= {"metrics.json": {"Result", "Calibration"}, "environment.json": {"Environment"}, "recipe.yaml": {"Recipe"}}
    assert {title for title, text in page.texts.items() if f"{name} absent" in text} == lost[name]


def test_a_line_cut_by_a_kill_is_left_out_but_a_broken_line_before_it_is_an_error(run_dir):
    path = run_dir / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"epoch": 3, "st')
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert len(page.tables["Evaluations"]) == 1 + 3
    path.write_text('{"epoch": 3, "st\n' + whole)
    with pytest.raises(UserError, match=r"Line 1 of .*metrics\.jsonl"):
        write_report(run_dir)


def test_a_broken_json_file_or_a_missing_folder_is_a_user_error(run_dir):
    (run_dir / "plan.json").write_text("[1, 2]")
    with pytest.raises(UserError, match=r"plan\.json is not a JSON object"):
        write_report(run_dir)
    with pytest.raises(UserError, match="no such run folder"):
        write_report(run_dir / "nowhere")


def test_steps_written_again_after_a_resume_are_drawn_once(run_dir):
    once = {name: (write_report(run_dir), (run_dir / name).read_bytes())[1] for name in ("loss.png", "auc.png")}
    for name in ("metrics.jsonl", "train_loss.jsonl"):
        path = run_dir / name
        path.write_text(path.read_text() * 2)
    write_report(run_dir)
    assert all((run_dir / name).read_bytes() == picture for name, picture in once.items())


def test_the_stacked_plan_reaches_the_bytes_of_each_rank(run_dir):
    from recsys import report

    plan = json.loads((run_dir / "plan.json").read_text())
    axes = report._draw_plan(plan).axes[0]
    tops = [max(bar.get_y() + bar.get_height() for bars in axes.containers for bar in [bars[rank]]) for rank in (0, 1)]
    assert [top * 1024 for top in tops] == pytest.approx([32_000 + 4096, 32_000 + 320 + 4096])
    assert axes.get_ylabel() == "weights (KiB)"


def test_many_tables_are_drawn_as_the_largest_and_a_rest(run_dir):
    from recsys import report

    shard = {"rank": 0, "row_offset": 0, "rows": 1, "col_offset": 0, "cols": 1}
    tables = [{"name": f"t{i}", "shards": [shard | {"bytes": 1000 * (i + 1)}]} for i in range(12)]
    axes = report._draw_plan({"world_size": 1, "tables": tables, "dense_bytes": 0}).axes[0]
    labels = [bars.get_label() for bars in axes.containers]
    assert [label.split("  ")[1] for label in labels[:7]] == [f"t{i}" for i in range(11, 4, -1)]
    assert labels[7:] == ["14.6 KiB  5 smaller tables"]  # 1000 x (1 + 2 + 3 + 4 + 5) / 1024


def test_the_module_imports_neither_matplotlib_nor_torch():
    code = "import sys, recsys.report; assert not {'matplotlib', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
