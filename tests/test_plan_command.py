import os
import re
import resource
import subprocess
import sys

import pytest
from rich.console import Console

from recsys import cluster as clusters
from recsys import plan_report, recipe_file
from recsys.cluster import MACHINES, cluster_here, cluster_of, parse_bytes
from recsys.errors import UserError
from recsys.plan import Plan
from tests._plans import CRITEO, HARD_LIMIT_S, MIXED, ROOT, SMALL, T4, plan_of, tables_of, text_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("64 mib", 2**26),
        ("7B", 7),
        ("50GB/s", 50 * 10**9),
        ("0.5kb", 500),
    ],
)
def test_sizes_are_read_as_decimal_or_binary_units(text, size):
    assert parse_bytes(text, "x") == size


@pytest.mark.parametrize("text", ["80GG", "80", "GB", "-1GB", "0GB", "", "80 GB and more", "nanGB", "1e3GB"])
def test_what_is_no_size_is_one_error_that_shows_sizes(text):
    with pytest.raises(UserError, match=r"--memory is no size.*80GB or 1\.5TiB"):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"machine": "h10-80gb"}, "did you mean 'h100-80gb'"),
        ({"machine": "abacus"}, "choose one, or give --memory"),
        ({"machine": "t4-16gb", "device": "cpu"}, "has no cpu devices"),
        ({"device": "gpu"}, "Allowed: cpu, cuda"),
        ({"nodes": 0}, "--nodes must be 1 or more"),
        ({"devices_per_node": -1}, "--devices-per-node must be 1 or more"),
        ({"memory": "80GP"}, "--memory is no size.*did you mean 80GB"),
        ({"device": "cuda", "inter_bandwidth": "fast"}, "--inter-bandwidth is no size"),
    ],
)
def test_a_cluster_that_cannot_be_is_one_error(where, message):
    with pytest.raises(UserError, match=message):
        cluster_of(**where)


def test_explicit_figures_replace_those_of_a_named_machine():
    cluster = cluster_of(2, 4, machine="t4-16gb", memory="20GB", host_memory="1TB", intra_bandwidth="1GB/s")
    assert (cluster.world_size, cluster.machine.memory_bytes, cluster.machine.host_memory_bytes) == (8, 20e9, 1e12)
    assert (cluster.machine.intra_bandwidth, cluster.machine.memory_bandwidth) == (1e9, 320e9)
    assert [cluster.node_of(rank) for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]


def test_every_named_machine_has_a_source_and_sane_figures():
    for machine in MACHINES.values():
        assert machine.source
        assert machine.memory_bandwidth > machine.intra_bandwidth >= machine.inter_bandwidth > 0


def test_the_documented_figures_of_machines_are_those_in_use():
    text = (ROOT / "docs/planning.md").read_text()
    documented = {}
    for line in text[text.index("| `--machine` | memory |") :].splitlines()[2:]:
        if line.startswith("| `"):
            name, *figures, _ = (cell.strip() for cell in line.strip("|").split("|"))
            documented[name.strip("`")] = [float(figure.replace(",", "")) for figure in figures]
    for name, m in MACHINES.items():
        rates = (m.memory_bandwidth, m.intra_bandwidth, m.inter_bandwidth)
        in_gb = [m.memory_bytes, *rates, m.host_memory_bytes, m.host_bandwidth]
        assert documented[name] == pytest.approx([*(x / 1e9 for x in in_gb), m.flops / 1e12], rel=0.02)
    assert documented.keys() == MACHINES.keys()


def test_memory_of_cpu_ranks_is_this_hosts_over_its_ranks(monkeypatch):
    monkeypatch.setattr(clusters, "usable_memory_bytes", lambda: 10 * 10**9)
    asked, here = cluster_of(devices_per_node=4), cluster_here(8, 4)
    assert asked.machine.memory_bytes == here.machine.memory_bytes == 2.5e9
    assert here.nodes == 2
    assert "10.00 GB" in asked.notes[-1] and "2.50 GB for each of 4" in here.notes[0]
    assert cluster_here(8, 4, memory="64MB").machine.memory_bytes == 64 * 10**6


def test_a_gpu_that_is_here_has_its_own_memory_and_the_bandwidth_of_its_kind():
    cluster = cluster_here(8, 8, gpu=("NVIDIA A100-SXM4-40GB", 42_000_000_000))
    assert (cluster.machine.device, cluster.machine.memory_bytes) == ("cuda", 42_000_000_000)
    assert cluster.machine.memory_bandwidth == MACHINES["a100-40gb"].memory_bandwidth
    assert "assumed" in cluster_here(1, 1, gpu=("Some GPU", 10**10)).notes[0]


def recsys(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-m", "recsys", *arguments],
        capture_output=True,
        text=True,
        timeout=HARD_LIMIT_S,
        env={**environment, "PYTHONPATH": str(ROOT)},
        check=False,
    )


CLUSTER = ("--nodes", "4", "--devices-per-node", "8", "--device", "cuda")


def test_a_criteo_sized_recipe_is_planned_for_32_gpus_on_this_machine(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = recsys(
        *("plan", str(CRITEO), *CLUSTER, "--memory", "80GB"),
        *("--json", str(tmp_path / "plan.json"), "--picture", str(tmp_path / "plan.png")),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Its own time: this machine's may be shared with others.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 15
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    plan = Plan.read(tmp_path / "plan.json")
    recipe = recipe_file.load(CRITEO)
    assert plan.world_size == 32 and len(plan.tables) == 26
    for table in plan.tables:
        rows = recipe.tables[table.name].rows + 3
        copies = 32 if table.kind == "data_parallel" else 1
        assert sum(s.bytes for s in table.shards) == rows * 20 * 4 * copies  # width 16 + 1, stored as 20
        assert sum(s.state_bytes for s in table.shards) == rows * 4 * copies
    assert tables_of(plan)["C20"].kind in ("row_wise", "table_row_wise")
    assert tables_of(plan)["C6"].kind == "data_parallel"
    for text in ("C20", "292,775,617 x 20", "23.42 GB", "Imbalance", "Bottleneck", plan.fingerprint, "assumed"):
        assert text in done.stdout
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_does_not_fit_ends_with_code_1_and_table_needed_available_and_gap():
    done = recsys("plan", str(CRITEO), *CLUSTER, "--memory", "1GB")
    assert done.returncode == 1
    found = re.search(
        r"Table '(\w+)' finds no place.*?([\d.]+ MB) needed.*?([\d.]+ MB) more.*?([\d.]+ MB) available", done.stderr
    )
    assert found, done.stderr
    needed, gap, available = (parse_bytes(text, "") for text in found.groups()[1:])
    assert found[1] == "C1", "C20 alone has room"
    assert needed >= 227_605_435 / 32 * 20 * 4
    assert available < 0.9e9 - 292_775_617 / 32 * 20 * 4
    assert needed - available == pytest.approx(gap, abs=2e4)
    assert "Do: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "h20-141gb"], "did you mean 'h200-141gb'"),
        (["--memory", "80GBB"], "--memory is no size"),
        (["--json", "/nowhere/plan.json"], "cannot be written"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_message(arguments, message):
    done = recsys("plan", str(CRITEO), *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("Error:") == 1


def test_a_pinned_plan_is_shown_instead_of_a_new_one(tmp_path):
    recipe = recipe_file.parse(MIXED)
    plan = plan_of(MIXED, "tables.tiny.sharding=row_wise", **SMALL)
    plan.write(tmp_path / "plan.json")
    pinned = recipe_file.parse(MIXED, [f"train.plan={tmp_path}/plan.json"])
    shown = plan_report.plan_recipe(pinned, cluster_of(**SMALL))
    assert shown.fingerprint == plan.fingerprint != plan_report.plan_recipe(recipe, cluster_of(**SMALL)).fingerprint


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"memory_bandwidth": "1MB/s"}, "lookup"),
        ({"inter_bandwidth": "1MB/s"}, "exchange"),
        (dict.fromkeys(("memory_bandwidth", "intra_bandwidth", "inter_bandwidth"), "1000TB/s"), "dense layers"),
    ],
)
def test_the_bottleneck_is_what_was_made_slow(where, expected):
    text = text_of(user={"rows": 1_000_000, "sharding": "row_wise"}, item={"rows": 1_000_000, "sharding": "row_wise"})
    plan = plan_of(text, nodes=2, devices_per_node=2, machine="a100-80gb", **where)
    name, share = plan_report.bottleneck(plan)
    assert name == expected and share > 0.7


def test_the_report_shows_imbalance_nodes_and_equal_ranks_together():
    settings = {"sharding": "table_wise", "rows": 100_000}
    plan = plan_of(text_of(a=settings, item=settings), nodes=2, devices_per_node=2, machine="t4-16gb")
    assert plan_report.imbalance(plan) > 1.5, "two tables on four ranks, one of them with a history"
    console = Console(record=True, width=120, file=open(os.devnull, "w"))
    plan_report.print_plan(plan, cluster_of(2, 2, machine="t4-16gb"), console)
    text = console.export_text()
    assert re.search(r"Imbalance: .* [\d.]+ times", text)
    assert {int(node) for node in re.findall(r"^  ([01])\s+\d", text, re.MULTILINE)} == {0, 1}
    assert plan_report._ranges([7, 0, 1, 2, 3, 9]) == "0-3, 7, 9"


def test_the_picture_shows_the_bytes_of_every_table_on_every_rank():
    tables = {f"t{n}": {"rows": 100 + n} for n in range(45)}
    plan = plan_of(text_of(**tables), **SMALL)
    names, matrix = plan_report.heat(plan)
    assert len(names) == 40 and names[-1] == "7 smaller tables" and matrix.shape == (40, 2)
    tables_only = [load.device_bytes - plan.dense.device_bytes for load in plan.loads()]
    assert matrix.sum(axis=0).tolist() == tables_only
    figure = plan_report.draw(plan)
    assert plan.fingerprint in figure.axes[0].get_title(loc="left")


def test_a_machine_with_a_cache_is_drawn_and_shown():
    plan = plan_of(text_of(user={"rows": 500_000_000}), **T4)
    console = Console(record=True, width=120, file=open(os.devnull, "w"))
    plan_report.print_plan(plan, cluster_of(**T4), console)
    assert re.search(r"user +\w+, host, \d+% cached", console.export_text())
    plan_report.draw(plan)
