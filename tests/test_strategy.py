"""Automatic choices: on machines that nobody here owns, and on this one."""

import dataclasses
import html
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch

from recsys import doctor, machine, network, recipe_file, stack, strategy
from recsys.cluster import MACHINES
from recsys.distributed import Ranks, process_group
from recsys.errors import UserError
from recsys.strategy import Facts, Gpu
from scripts.chaos import _prepare

ROOT = pathlib.Path(__file__).parent.parent

GB = 10**9
H100, CONSUMER = Gpu("NVIDIA H100 80GB HBM3", 85 * GB), Gpu("NVIDIA GeForce RTX 3090", 25 * GB)
BETWEEN = network.Choice("eth0", "10.0.0.7", "route to head")
FLEET = Facts(
    cores=96,
    memory_bytes=2000 * GB,
    gpus=(H100,) * 8,
    gpu_link="NVLink",
    world_size=32,
    local_world_size=8,
    ranks_here=8,
    hosts=("n1", "n2", "n3", "n4"),
    among_launched=True,
    omp_threads="1",
    choice=BETWEEN,
    interface_bits=25e9,
    infiniband_bits=8 * 400e9,
)
DESK = Facts(cores=16, memory_bytes=64 * GB, gpus=(CONSUMER,) * 2, gpu_link="PCIe")


def recipe(*overrides: str):
    text = """
model: {name: deepfm, hidden: [8]}
data: {train: unused}
features: [{kind: id, columns: [user, item]}]
tables: {user: {sharding: row_wise}}
"""
    return recipe_file.parse(text, list(overrides))


def chosen(facts: Facts, *overrides: str) -> strategy.Strategy:
    found = strategy.choose(facts, recipe(*overrides))
    assert [line.split(":")[0] for line in found.lines] == ["Machine", "Ranks", "Network", "Tables", "Batches"]
    assert not any("\n" in line for line in found.lines)
    json.dumps(found.to_json())
    return found


def test_a_box_without_gpu_shares_its_quota_of_cores_and_memory_between_its_ranks():
    facts = Facts(cores=6, memory_bytes=12 * GB, world_size=3, local_world_size=3, ranks_here=3, among_launched=True)
    found = chosen(dataclasses.replace(facts, omp_threads="1"))
    assert (found.device, found.backend, found.threads_per_rank, found.host_cache) == ("cpu", "gloo", 2, False)
    assert found.cluster.machine.memory_bytes == 4 * GB and found.cluster.nodes == 1
    assert found.kinds == ("data_parallel", "table_wise", "row_wise", "column_wise")
    assert found.batches == strategy.Batches(pinned=False, threads=1, overlaps=False)
    assert "2 threads each (6 cores over 3 ranks)" in found.lines[1]
    assert "one host" in found.lines[2] and "user row_wise" in found.lines[3]


def test_32_gpus_with_nvlink_and_infiniband_on_4_nodes():
    found = chosen(FLEET)
    assert (found.device, found.backend, found.threads_per_rank) == ("cuda", "cuda:nccl,cpu:gloo", 12)
    own, cluster = found.cluster.machine, found.cluster
    assert (cluster.nodes, cluster.devices_per_node, own.name) == (4, 8, "h100-80gb")
    assert (own.memory_bytes, own.host_memory_bytes) == (85 * GB, 250 * GB)
    assert own.intra_bandwidth == MACHINES["h100-80gb"].intra_bandwidth and own.inter_bandwidth == 400e9 / 8
    assert "table_row_wise" in found.kinds and found.host_cache
    assert found.batches == strategy.Batches(pinned=True, threads=2, overlaps=True)
    assert found.lines[0].startswith("Machine: 4 hosts (n1, n2, n3, n4); here 96 cores, 2.00 TB of memory, 8 x NVIDIA")
    assert found.lines[2] == "Network: eth0 10.0.0.7, 25 Gb/s (route to head); InfiniBand 3200 Gb/s"


def test_two_consumer_gpus_without_a_launcher_use_one_and_say_how_to_use_both():
    found = chosen(DESK)
    assert (found.device, found.ranks_that_fit) == ("cuda", 2)
    assert "2 GPUs, one in use; start with torchrun --nproc-per-node 2" in found.lines[1]
    both = chosen(dataclasses.replace(DESK, world_size=2, local_world_size=2, ranks_here=2, among_launched=True))
    assert "in use" not in both.lines[1]
    assert both.cluster.machine.intra_bandwidth == both.cluster.machine.host_bandwidth, "PCIe is no NVLink"


def test_fewer_gpus_than_ranks_is_one_clear_error_unless_the_cpu_is_asked_for():
    facts = dataclasses.replace(DESK, world_size=3, local_world_size=3, ranks_here=3)
    with pytest.raises(
        UserError, match=r"3 ranks, 2 GPUs\. Do: start with --nproc-per-node 2, or set train.device=cpu"
    ):
        chosen(facts)
    assert chosen(facts, "train.device=cpu").backend == "gloo"
    with pytest.raises(UserError, match="asks for CUDA"):
        chosen(Facts(cores=2, memory_bytes=GB), "train.device=cuda")


def test_two_launchers_on_one_host_share_its_cores_and_memory():
    found = chosen(Facts(cores=8, memory_bytes=8 * GB, world_size=4, local_world_size=2, ranks_here=4))
    assert (found.threads_per_rank, found.cluster.machine.memory_bytes, found.cluster.nodes) == (2, 2 * GB, 2)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.device=cpu", lambda s: s.device),
        ("train.threads_per_rank=3", lambda s: s.threads_per_rank),
        ("train.memory_per_rank=7GB", lambda s: s.cluster.machine.memory_bytes // GB),
        ("train.pipeline=plain", lambda s: s.batches.overlaps),
        ("train.pin_memory=false", lambda s: s.batches.pinned),
        ("tables.default.placement=device", lambda s: s.host_cache),
    ],
)
def test_the_recipe_overrides_each_choice_and_the_line_says_so(override, value):
    found, key = chosen(FLEET, override), override.split("=")[0]
    assert value(found) == {"cpu": "cpu", "3": 3, "7GB": 7}.get(override.split("=")[1], False)
    assert value(found) != value(chosen(FLEET))
    assert key.startswith("tables.") or key in "\n".join(found.lines)


def test_pinned_memory_has_no_effect_on_cpu_and_the_line_says_so():
    found = chosen(Facts(cores=2, memory_bytes=GB), "train.pin_memory=true")
    assert not found.batches.pinned and "train.pin_memory=true) has no effect on CPU" in found.lines[4]


@pytest.mark.parametrize(
    ("wanted", "omp", "among_launched", "threads"),
    [
        (None, None, False, 4),
        (None, "1", True, 4),  # torchrun's own default
        (None, "1", False, 1),
        (None, "3", True, 3),
        (None, "3,2", False, 3),
        (None, "many", False, 4),
        (5, "3", True, 5),
    ],
)
def test_threads_are_cores_over_local_ranks_unless_somebody_says_otherwise(wanted, omp, among_launched, threads):
    assert strategy.threads_of(wanted, omp, among_launched=among_launched, cores=8, ranks_here=2)[0] == threads
    assert strategy.threads_of(None, None, among_launched=True, cores=2, ranks_here=4)[0] == 1


def test_one_thread_is_torchruns_own_word_only_where_a_node_has_several_processes(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert [strategy.among_launched(n) for n in (1, 2)] == [False, True]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not strategy.among_launched(2)


def test_a_model_that_was_trained_on_gpus_is_read_where_there_are_none():
    assert [strategy.device_to_read_with("cuda", n) for n in (0, 1)] == ["auto", "cuda"]
    assert strategy.device_to_read_with("cpu", 1) == "cpu"


NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = (void *)42; return index; }
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, unsigned *state) {
    if (gpu != (void *)42) return 2;
    *state = link == ACTIVE;
    return link < 4 ? 0 : 2;
}
"""


@pytest.mark.parametrize(("active", "expected"), [(3, True), (5, False)])
def test_nvlink_is_what_the_driver_calls_active(active, expected, tmp_path):
    library = tmp_path / "nvml.so"
    try:
        command = ["cc", "-shared", "-fPIC", "-x", "c", f"-DACTIVE={active}", "-", "-o", str(library)]
        subprocess.run(command, input=NVML, text=True, check=True)
    except OSError:
        pytest.skip("no C compiler to stand in for NVIDIA's driver with")
    assert strategy.has_nvlink(str(library)) is expected
    assert strategy.has_nvlink(str(tmp_path / "absent.so")) is False


def test_what_is_detected_here_is_what_the_system_tells():
    found = strategy.detect(Ranks(0, 1, 1, torch.device("cpu")))
    assert (found.cores, found.memory_bytes) == (machine.usable_cores(), machine.usable_memory_bytes())
    assert len(found.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert found.world_size == found.ranks_here == 1 and found.choice is None
    with process_group("cpu", threads=1) as ranks:
        assert ranks.hosts == (network.identity()[0],) and torch.get_num_threads() == 1


def test_doctor_says_how_to_use_all_gpus(monkeypatch):
    facts = {"load_s": 1.0, "cuda": "13.0", "devices": ["GPU (24 GiB)"] * 2, "threads": 1}
    monkeypatch.setattr(doctor, "_load_apart", lambda: facts)
    monkeypatch.setattr(stack, "installed", lambda: {**dict.fromkeys(stack.supported("gpu")), **stack.supported("cpu")})
    monkeypatch.delenv("RANK", raising=False)
    assert "2 GPUs, one in use; start with torchrun --nproc-per-node 2" in doctor.report("gpu")[0]


@pytest.mark.dist
def test_two_ranks_print_the_five_lines_once_and_keep_them_in_the_run_folder(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "recsys"]
    command += ["train", str(_prepare(tmp_path, epochs=1)), "--run-dir", str(run)]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    kept = json.loads((run / "environment.json").read_text())
    found, log = kept["strategy"], (run / "log.txt").read_text()
    assert len(found["lines"]) == 5
    for line in found["lines"]:
        assert done.stderr.count(line) == 1 and log.count(line) == 1
        assert html.escape(line) in (run / "report.html").read_text()
    threads = max(1, machine.usable_cores() // 2)
    assert found["threads_per_rank"] == kept["threads_per_rank"] == threads
    assert found["lines"][1].startswith("Ranks: 2 on cpu (train.device=cpu) with gloo, 2 on this host")
    assert found["facts"]["hosts"] == [socket.gethostname()] and found["facts"]["choice"] is None
