import dataclasses
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from recsys import recipe_file
from recsys.cluster import cluster_of
from recsys.distributed import process_group
from recsys.errors import UserError
from recsys.job import assemble
from recsys.plan import Plan
from recsys.plan_misfit import DoesNotFitError
from recsys.planner import Planner
from recsys.sharding import torchrec_plan
from tests._plans import (
    MIXED,
    MIXED_RANKS,
    NODES,
    ROOT,
    SMALL,
    T4,
    change,
    model_of,
    plan_of,
    planner_of,
    set_first,
    tables_of,
    text_of,
)


def test_small_tables_are_replicated_and_large_ones_spread():
    text = text_of(tiny={"rows": 20}, large={"rows": 10_000_000}, huge={"rows": 200_000_000})
    kinds = {name: table.kind for name, table in tables_of(plan_of(text, **NODES)).items()}
    assert kinds["tiny"] == "data_parallel"
    assert kinds["huge"] in ("row_wise", "table_row_wise")
    alone = plan_of(text, devices_per_node=8, machine="a100-80gb")
    assert tables_of(alone)["huge"].kind == "row_wise", "on one node table_row_wise is the same and not offered"
    assert {t.kind for t in plan_of(text, "tables.huge.rows=1000", device="cpu", memory="2GB").tables} == {"table_wise"}


def test_a_table_above_2_percent_of_a_ranks_memory_is_spread_though_one_rank_would_be_faster():
    tables = {f"t{n}": {"rows": 60_000_000} for n in range(7)}  # 1.92 GB each, of 72 GB
    where = {"devices_per_node": 8, "machine": "a100-80gb"}
    assert {t.kind for t in plan_of(text_of(**tables), **where).tables if t.name != "item"} == {"row_wise"}
    smaller = plan_of(text_of(default={"rows": 40_000_000}, **{key: {} for key in tables}), **where)  # 1.28 GB
    assert "table_wise" in {t.kind for t in smaller.tables}


def test_tables_that_a_model_attends_to_are_never_replicated():
    plan = plan_of(text_of("din", tiny={"rows": 20}, item={"rows": 20}), **SMALL)
    kinds = {name: table.kind for name, table in tables_of(plan).items()}
    assert kinds["tiny"] == "data_parallel"
    assert kinds["item"] != "data_parallel"


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise", "table_row_wise", "grid", "data_parallel"])
@pytest.mark.parametrize("model", ["deepfm", "din"])
def test_a_kind_that_the_recipe_lets_through_is_one_that_torchrec_can_do(model, kind):
    text = text_of(model, user={}, item={})
    for name, device in itertools.product(("user", "item"), ("cpu", "cuda")):
        recipe = recipe_file.parse(text)
        override = f"tables.{name}.sharding={kind}"
        if kind in recipe.excluded_kinds(name):
            with pytest.raises(UserError, match=rf"tables\.{name}\.sharding"):
                recipe_file.parse(text, [override])
            continue
        where = {"nodes": 2, "devices_per_node": 2, "device": device, "memory": "1GB"}
        assert tables_of(plan_of(text, override, **where))[name].kind == kind


@pytest.mark.parametrize("where", [SMALL, {**NODES, "nodes": 2}, {"nodes": 3, "devices_per_node": 1, "device": "cpu"}])
@pytest.mark.parametrize("kind", ["auto", "row_wise", "table_wise", "column_wise", "table_row_wise", "grid"])
def test_every_number_of_every_table_is_held_once(kind, where):
    text = text_of(one={"rows": 1}, few={"rows": 4}, many={"rows": 4091}, default={"sharding": kind, "dim": 23})
    for table in plan_of(text, **where).tables:
        held = np.zeros((table.rows, table.width), dtype=int)
        for s in table.shards:
            held[s.row_offset : s.row_offset + s.rows, s.col_offset : s.col_offset + s.cols] += 1
        assert (held == (len(table.shards) if table.kind == "data_parallel" else 1)).all(), table.name
        assert table.gap() is None
        assert len(table.shards) > 1 or kind in ("auto", "table_wise", "table_row_wise", "grid")


def test_the_same_recipe_gets_the_same_plan_in_every_process():
    code = (
        "import tests._plans as t; planner = t.planner_of(t.text_of(a={}, c={'rows': 50_000}), **t.NODES);"
        "found = planner._enumerator({f'table_{n}': planner._constraints(n, None) for n in ('a', 'c', 'item')});"
        "options = found.enumerate(planner._model, planner._sharders);"
        "print([(o.name, o.sharding_type) for o in options], planner.plan().fingerprint)"
    )
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        found.add(done.stdout.strip())
    assert len(found) == 1


def test_planning_leaves_the_random_numbers_of_training_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    planner_of_text = text_of(user={})
    recipe = recipe_file.parse(planner_of_text)
    model = model_of(recipe)
    torch.manual_seed(3)
    Planner(model, recipe, cluster_of(**SMALL)).plan()
    assert torch.equal(torch.rand(4), expected)


@pytest.fixture
def written(tmp_path):
    plan = plan_of(MIXED, nodes=2, devices_per_node=2, device="cpu", memory="1GB")
    plan.write(tmp_path / "plan.json")
    return plan, tmp_path / "plan.json"


def test_a_file_gives_the_plan_back(written):
    plan, path = written
    planner = planner_of(MIXED, **MIXED_RANKS)
    again = planner.adopt(Plan.read(path))
    assert again == plan
    assert again.fingerprint == plan.fingerprint == json.loads(path.read_text())["fingerprint"]
    model = model_of(recipe_file.parse(MIXED))
    assert torchrec_plan(again, model) == torchrec_plan(plan, model)


def test_a_file_of_cached_tables_gives_the_plan_back():
    text = text_of(user={"rows": 500_000_000})
    planner = planner_of(text, **T4)
    plan = planner.plan()
    assert planner.adopt(Plan._from_json(json.loads(json.dumps(plan.to_json())))) == plan
    (parameter,) = (
        p
        for module in torchrec_plan(plan, model_of(recipe_file.parse(text))).plan.values()
        for name, p in module.items()
        if name.endswith("user")
    )
    assert parameter.cache_params.load_factor == tables_of(plan)["user"].cached_share


def test_costs_are_estimated_anew_for_a_file_without_them(written):
    plan, path = written
    content = json.loads(path.read_text())
    for shard in (s for t in content["tables"] for s in t["shards"]):
        for key in [k for k in shard if k not in ("rank", "row_offset", "rows", "col_offset", "cols", "bytes")]:
            del shard[key]
    del content["dense"], content["ranks"]
    path.write_text(json.dumps(content))
    assert planner_of(MIXED, **MIXED_RANKS).adopt(Plan.read(path)) == plan


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("rows", {"rows": 999}, r"'rows' is 999 x 8 there, and 1003 x 8"),
        ("rows", {"width": 4}, r"'rows' is 1003 x 4 there"),
        ("rows", {"name": "row"}, r"lacks the table 'rows'(.|\n)*no table 'row'.*'rows'"),
        ("rows", {"shards": lambda s: s[1:]}, "rows 0 to 250 are lost"),
        ("rows", {"shards": lambda s: s[:-1]}, "its rows end at 753 of 1003"),
        ("rows", {"shards": set_first(rows=300)}, "rows 251 to 299 are held twice"),
        ("cols", {"shards": set_first(cols=8)}, "columns 4 to 7 are held twice"),
        ("tiny", {"shards": set_first(rows=3)}, "whole on every rank"),
        ("whole", {"shards": set_first(rank=4)}, r"ranks that do not exist: \[4\]"),
        ("whole", {"kind": "diagonal"}, "cannot be split so. Received: diagonal. Allowed: row_wise"),
        ("whole", {"kernel": "fused_uvm"}, "no such kernel. Received: fused_uvm. Allowed: fused"),
        ("whole", {"cached_share": 0.5}, "cached_share must be"),
        ("rows", {"shards": set_first(rank=1)}, r"row_wise cannot have its shards on the ranks \[1, 1, 2, 3\]"),
        ("rows", {"kind": "table_wise"}, "TorchRec splits table_wise otherwise"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_with_the_reason(written, name, values, message):
    with pytest.raises(UserError, match=message):
        planner_of(MIXED, **MIXED_RANKS).adopt(change(written[0], name, **values))


@pytest.mark.parametrize(
    ("overrides", "where", "message"),
    [
        ([], {"devices_per_node": 1}, "it is for 4 ranks. Received: 2 ranks"),
        ([], {"nodes": 1, "devices_per_node": 4, "device": "cuda"}, "it is for cpu. Received: cuda"),
        (["tables.whole.rows=6000"], {}, "5003 x 8 there, and 6003 x 8 in the recipe"),
        (["tables.default.dim=9", "tables.cols.sharding=auto"], {}, "1003 x 8 there, and 1003 x 12"),
        (
            ["tables.cols.sharding=auto", "optimizer.sparse.name=rowwise_adagrad"],
            {},
            "'cols' cannot be split so. Received: column_wise",
        ),
    ],
)
def test_a_plan_for_another_recipe_or_cluster_is_refused(written, overrides, where, message):
    with pytest.raises(UserError, match=message):
        planner_of(MIXED, *overrides, **{**MIXED_RANKS, **where}).adopt(written[0])


def test_a_pinned_plan_that_needs_too_much_memory_is_refused(written):
    plan, _ = written
    with pytest.raises(DoesNotFitError, match=r"asks too much of rank \d, first of all with table 'whole'"):
        planner_of(MIXED, "data.batch_size_per_rank=1", **{**MIXED_RANKS, "memory": "200KB"}).adopt(plan)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{}", '{"tables": 3}', '{"tables": [{"shards": [{"rank": "0"}]}]}'])
def test_a_file_that_is_no_plan_is_one_error(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"plan\.json' is no plan"):
        Plan.read(path)
    with pytest.raises(UserError, match="is no plan"):
        Plan.read(tmp_path / "absent.json")


def test_the_fingerprint_is_over_what_is_decided_and_not_over_costs_or_order(written):
    plan, _ = written
    reordered = dataclasses.replace(plan, tables=plan.tables[::-1], memory_bytes=1, notes=("x",))
    assert reordered.fingerprint == plan.fingerprint
    assert change(plan, "whole", shards=set_first(bytes=1, lookup_ms=9.0)).fingerprint == plan.fingerprint
    moved = change(plan, "whole", shards=lambda s: [{**s[0], "rank": (s[0]["rank"] + 1) % 4}])
    others = [moved, change(plan, "rows", kind="grid"), change(plan, "rows", rows=9), change(plan, "rows", kernel="x")]
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_a_model_that_is_only_read_is_not_bound_to_the_file_of_its_training():
    recipe = recipe_file.parse(text_of("din", user={}), ["train.plan=/nowhere/plan.json"])
    with process_group("cpu") as ranks:
        job = assemble(recipe, ranks, encoder=None, trains=False)
        assert sum(load.state_bytes for load in job.plan.loads()) == 0
        with pytest.raises(UserError, match="is no plan"):
            assemble(recipe, ranks, encoder=None)
