import itertools
import json
import math
import re
import resource
import time

import pytest
import torch
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator

from recsys import recipe_file
from recsys.cluster import MACHINES, cluster_of, format_bytes, parse_bytes
from recsys.distributed import process_group
from recsys.embedding import stored_name
from recsys.errors import UserError
from recsys.job import assemble
from recsys.plan import HOST_CACHED
from recsys.plan_misfit import DoesNotFitError
from recsys.planner import Planner
from tests._plans import NODES, SMALL, T4, WIDTH, model_of, plan_of, planner_of, tables_of, text_of


@pytest.mark.parametrize(
    ("sparse", "per_weight", "per_row"), [("sgd", 0, 0), ("adagrad", 4, 0), ("rowwise_adagrad", 0, 4)]
)
@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("fp16", 2)])
def test_bytes_are_those_of_plain_arithmetic(sparse, per_weight, per_row, dtype, size):
    settings = {"sharding": "row_wise", "dtype": dtype}
    plan = plan_of(text_of(big={"rows": 1_000_003, **settings}, item=settings, sparse=sparse), **NODES)
    table = tables_of(plan)["big"]
    rows, ranks = 1_000_003 + 3, 32
    block = math.ceil(rows / ranks)
    for rank, shard in enumerate(table.shards):
        here = min(block, rows - rank * block)
        assert (shard.rank, shard.row_offset, shard.rows) == (rank, rank * block, here)
        assert shard.bytes == here * WIDTH * size
        assert shard.state_bytes == here * WIDTH * per_weight + here * per_row
        assert shard.gradient_bytes == shard.cache_bytes == shard.host_bytes == 0
        # 100 ids of 8 bytes from the ranks together, and a partial sum for each of 100 rows of 32 ranks.
        assert shard.buffer_bytes == 100 * 8 + 100 * ranks * WIDTH * 4
    for shard in tables_of(plan)["item"].shards:
        # The item and its history of 10: two sums for each row.
        assert shard.buffer_bytes == 100 * 11 * 8 + 2 * 100 * ranks * WIDTH * 4
    (load, *_) = plan.loads()
    parts = [s for t in plan.tables for s in t.shards if s.rank == 0]
    assert load.device_bytes == plan.dense.device_bytes + sum(
        s.bytes + s.state_bytes + s.gradient_bytes + s.buffer_bytes for s in parts
    )


def test_a_replicated_table_has_gradients_and_a_dense_one_the_state_of_the_dense_optimizer():
    text = text_of(tiny={"rows": 20, "optimizer": "dense"}, dense={"name": "adam"})
    weights = 23 * WIDTH * 4
    shards = tables_of(plan_of(text, **SMALL))["tiny"].shards
    assert [(s.rank, s.bytes, s.gradient_bytes, s.state_bytes) for s in shards] == [
        (rank, weights, weights, 2 * weights) for rank in range(2)
    ]


def test_sizes_beyond_32_bits_are_exact_and_nothing_is_allocated():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = text_of(user={"rows": 3_000_000_000 - 3, "dim": 64}, item={"dim": 64}, model="din", sparse="rowwise_adagrad")
    plan = plan_of(text, nodes=8, devices_per_node=8, machine="h200-141gb")
    table = tables_of(plan)["user"]
    assert sum(s.bytes for s in table.shards) == 768_000_000_000
    assert sum(s.state_bytes for s in table.shards) == 12_000_000_000
    assert sum(s.rows for s in table.shards) == 3_000_000_000
    assert json.loads(json.dumps(plan.to_json()))["tables"][0]["rows"] == 3_000_000_000
    (warning,) = plan.warnings()
    assert "'user'" in warning and "2^31" in warning
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 300e6


@pytest.mark.parametrize("sparse", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_memory_of_weights_and_states_is_that_of_the_real_tensors(sparse, dtype):
    text = text_of("din", user={"rows": 30_000, "dtype": dtype}, item={"rows": 20_000}, sparse=sparse)
    with process_group("cpu") as ranks:
        job = assemble(recipe_file.parse(text), ranks, encoder=None)
        real = 0
        lookups = [lookup for module in job.task.modules() for lookup in getattr(module, "_lookups", ())]
        for kernel in (m for m in itertools.chain(*(x.modules() for x in lookups)) if hasattr(m, "momentum1_host")):
            for name, tensor in [*kernel.named_buffers(), *kernel.named_parameters()]:
                if re.fullmatch(r"(weights|momentum\d)_(host|dev|uvm)", name):
                    real += tensor.numel() * tensor.element_size()
        (load,) = job.plan.loads()
    assert real > 0
    assert load.weight_bytes + load.state_bytes == pytest.approx(real, rel=0.001)


def test_activations_grow_with_the_longest_list_that_is_let_through():
    text = text_of("din", user={})
    short, long = (planner_of(text, f"features.1.max_length={n}", **SMALL).dense for n in (10, 30))
    # Each event has at least its vector of 7 and the activation unit's 8 units, in fp32.
    assert long.activation_bytes - short.activation_bytes > 20 * 100 * 4 * (7 + 8)
    assert long.compute_ms > 2 * short.compute_ms


@pytest.mark.parametrize("kind", ["auto", "row_wise", "column_wise", "table_row_wise", "grid"])
def test_times_are_those_that_torchrec_estimates_for_every_shard(kind):
    text = text_of(a={"rows": 4091}, b={"rows": 2}, default={"dim": 31, "sharding": kind})
    planner = planner_of(text, **NODES)
    constraints = {stored_name(name): planner._constraints(name, 0.1) for name in ("a", "b", "item")}
    enumerator = planner._enumerator(constraints)
    options = enumerator.enumerate(planner._model, planner._sharders)
    found = [shard.perf for option in options for shard in option.shards]
    EmbeddingPerfEstimator(planner._topology, constraints).estimate(options, enumerator._sharder_data_map)
    assert found == [shard.perf for option in options for shard in option.shards]


def test_an_all_reduce_inside_a_node_does_not_wait_for_the_network():
    text = text_of(tiny={"rows": 20, "sharding": "data_parallel"})

    def exchange_ms(**where) -> float:
        return tables_of(plan_of(text, machine="a100-80gb", devices_per_node=4, **where))["tiny"].shards[0].exchange_ms

    assert exchange_ms() == exchange_ms(inter_bandwidth="1KB/s") < exchange_ms(intra_bandwidth="1KB/s")
    assert exchange_ms(nodes=2) < exchange_ms(nodes=2, inter_bandwidth="1KB/s")


def test_dense_memory_is_that_of_layers_gradients_and_optimizer():
    text = text_of(user={}, dense={"name": "adam"})
    recipe = recipe_file.parse(text)
    model = model_of(recipe)
    weights = sum(p.numel() * 4 for p in model.parameters() if p.device.type == "cpu")
    dense = Planner(model, recipe, cluster_of(**SMALL)).dense
    assert (dense.bytes, dense.gradient_bytes, dense.state_bytes) == (weights, weights, 2 * weights)
    # DeepFM saves at least the vectors of its 3 features and the 16 hidden units of every row, in fp32.
    assert 100 * 4 * (3 * 7 + 16) < dense.activation_bytes < 100 * 4 * (3 * 8 + 16) * 20
    twice = planner_of(text, "data.batch_size_per_rank=200", **SMALL).dense
    assert twice.activation_bytes == 2 * dense.activation_bytes
    # Products with weights cost 2 operations per weight and row forward, and twice that backward.
    (linear,) = (m for m in model.tower.modules() if isinstance(m, torch.nn.Linear))
    flops = 6 * 100 * (linear.in_features * linear.out_features + linear.out_features)
    assert dense.compute_ms == pytest.approx(1e3 * flops / (0.5 * MACHINES["cpu"].flops), rel=0.1)


def test_a_table_that_does_not_fit_is_named_with_needed_available_and_settings_that_help():
    text = text_of(user={"rows": 10_000_000, "sharding": "table_wise"})
    with pytest.raises(DoesNotFitError) as caught:
        plan_of(text, devices_per_node=4, device="cpu", memory="400MB")
    error = caught.value
    assert error.table == "user"
    own = 10_000_003 * WIDTH * 4 * 2  # Adagrad keeps as much as there are weights
    assert own <= error.needed_bytes <= own * 1.01
    assert 350e6 < error.available_bytes < 0.9 * 400e6
    for shown in (error.needed_bytes, error.available_bytes, error.needed_bytes - error.available_bytes):
        assert format_bytes(shown) in str(error)
    assert "set tables.user.sharding=row_wise" in str(error)
    plan = plan_of(text, "tables.user.sharding=row_wise", devices_per_node=4, device="cpu", memory="400MB")
    assert max(load.device_bytes for load in plan.loads()) <= 0.9 * 400e6


def test_what_is_proposed_instead_fits():
    text = text_of(user={"rows": 9_000_000})
    where = {"device": "cpu", "memory": "400MB"}
    with pytest.raises(DoesNotFitError) as caught:
        plan_of(text, devices_per_node=1, **where)
    (rows,) = re.findall(r"set tables\.user\.rows to about ([\d,]+)", str(caught.value))
    assert plan_of(text, f"tables.user.rows={rows.replace(',', '')}", devices_per_node=1, **where)
    (ranks,) = re.findall(r"use (\d+) or more such ranks", str(caught.value))
    assert plan_of(text, devices_per_node=int(ranks), **where)
    assert "tables.user.optimizer=rowwise_adagrad" in str(caught.value)
    half = plan_of(text, "tables.user.optimizer=rowwise_adagrad", devices_per_node=1, **where)
    assert half.loads()[0].device_bytes < 0.9 * 400e6


def test_tables_that_fit_one_by_one_but_not_together_name_the_first_without_a_place():
    settings = {"rows": 4_000_000, "sharding": "row_wise"}
    text = text_of(a=settings, b={**settings, "rows": 3_500_000}, c={**settings, "rows": 3_000_000}, sparse="sgd")
    with pytest.raises(DoesNotFitError) as caught:
        plan_of(text, devices_per_node=2, device="cpu", memory="150MB")
    assert caught.value.table == "c"  # a takes 64 MB and b 56 MB of 135 MB
    assert caught.value.needed_bytes == pytest.approx(3_000_003 / 2 * WIDTH * 4, rel=0.01)
    assert caught.value.available_bytes == pytest.approx(135e6 - (4_000_003 + 3_500_003) / 2 * WIDTH * 4, rel=0.02)


@pytest.mark.parametrize("kind", ["table_row_wise", "grid", "column_wise", "data_parallel"])
def test_every_kind_that_does_not_fit_is_reported_with_more_needed_than_available(kind):
    text = text_of(user={"rows": 10_000_000, "sharding": kind})
    with pytest.raises(DoesNotFitError) as caught:
        plan_of(text, nodes=2, devices_per_node=2, device="cpu", memory="100MB")
    assert caught.value.table == "user"
    assert caught.value.needed_bytes > caught.value.available_bytes > 0


def test_what_fits_only_with_large_tables_spread_and_small_ones_whole_is_found():
    small = {f"t{n}": {"rows": 100_000} for n in range(20)}
    text = text_of(large={"rows": 2_000_000}, batch=20_000, **small)
    beside_tables = planner_of(text, devices_per_node=8, device="cpu", memory="100GB").dense.device_bytes
    # Whole, `large` takes 128 MB; spread, 21 tables need 21 x 5.12 MB of buffers on every rank.
    memory = f"{math.ceil((beside_tables + 70e6) / 0.9)}B"
    kinds = {t.name: t.kind for t in plan_of(text, devices_per_node=8, device="cpu", memory=memory).tables}
    assert kinds["large"] == "row_wise"
    assert "table_wise" in kinds.values()


def test_activations_that_leave_no_room_are_reported_as_such():
    with pytest.raises(DoesNotFitError, match=r"activations of a batch do not fit.*data\.batch_size_per_rank"):
        plan_of(text_of(user={}, batch=1_000_000), device="cpu", memory="64MB")


def test_a_small_limit_refuses_training_before_anything_is_allocated():
    text = text_of("din", user={"rows": 3_200_000})
    limited = recipe_file.parse(text, ["train.memory_per_rank=64MB"])
    whole = recipe_file.parse(text, [f"tables.user.rows={10**12}"])
    for recipe in (limited, whole):
        start_s = time.perf_counter()
        with (
            pytest.raises(UserError, match="Table 'user' finds no place on 1 rank"),
            process_group("cpu") as ranks,
        ):
            assemble(recipe, ranks, encoder=None)
        assert time.perf_counter() - start_s < 5


def test_tables_that_gpus_cannot_hold_go_to_the_host_with_a_cache():
    text = text_of(user={"rows": 500_000_000}, small={"rows": 1000})
    plan = plan_of(text, **T4)
    user, small = tables_of(plan)["user"], tables_of(plan)["small"]
    assert (user.kernel, small.kernel == HOST_CACHED) == (HOST_CACHED, False)
    assert 0 < user.cached_share <= 0.2
    for load in plan.loads():
        assert load.device_bytes <= 0.9 * 16e9
        assert 0 < load.host_bytes <= 0.9 * 48e9
    for s in user.shards:
        weights = s.rows * WIDTH * 4
        assert s.cache_bytes == math.ceil(user.cached_share * (weights + 16 * s.rows)) + 4 * s.rows
        assert s.host_bytes == weights + s.state_bytes  # Adagrad's state lies beside the weights
    assert "on the host, cached: user" in "\n".join(plan.summary())


@pytest.mark.parametrize("memory", ["16GB", "3GB", "1.5GB"])
def test_the_cache_holds_the_largest_share_that_fits(memory):
    plan = plan_of(text_of(user={"rows": 500_000_000}), **T4, memory=memory)
    (load, _), user = plan.loads(), tables_of(plan)["user"]
    rows = math.ceil(500_000_003 / 2)
    others = load.device_bytes - user.shards[0].cache_bytes
    sizes = {share: math.ceil(share * rows * (WIDTH * 4 + 16)) + 4 * rows for share in (0.2, 0.1, 0.05, 0.02, 0.01)}
    assert user.cached_share == max(share for share in sizes if sizes[share] + others <= 0.9 * parse_bytes(memory, ""))
    assert (user.cached_share < 0.2) == (memory != "16GB")


def test_placement_is_settable_per_table():
    text = text_of(user={"rows": 1_000_000}, other={"rows": 1_000_000}, sparse="rowwise_adagrad")
    plan = tables_of(plan_of(text, "tables.user.placement=host_cached", **T4))
    assert (plan["user"].kernel, plan["other"].kernel) == (HOST_CACHED, "fused")
    assert all(s.host_bytes == s.bytes for s in plan["user"].shards), "one number per row stays on the GPU"
    large = text_of(user={"rows": 500_000_000, "placement": "device"})
    with pytest.raises(DoesNotFitError, match=r"tables\.user\.placement=host_cached"):
        plan_of(large, **T4)


def test_the_host_is_not_counted_on_where_nobody_named_it():
    text = text_of(user={"rows": 500_000_000})
    with pytest.raises(DoesNotFitError, match="give --host-memory or a --machine"):
        plan_of(text, devices_per_node=2, device="cuda", memory="16GB")
    plan = plan_of(text, devices_per_node=2, device="cuda", memory="16GB", host_memory="48GB")
    assert tables_of(plan)["user"].kernel == HOST_CACHED


def test_a_host_that_is_too_small_is_named():
    text = text_of(user={"rows": 900_000_000, "placement": "host_cached"})
    with pytest.raises(DoesNotFitError, match="too little host memory"):
        plan_of(text, **T4, host_memory="10GB", memory="80GB")


def test_a_cache_needs_gpus():
    text = text_of(user={"placement": "host_cached"})
    with pytest.raises(UserError, match=r"tables\.user\.placement.*needs GPUs"):
        plan_of(text, **SMALL)
    with pytest.raises(UserError, match=r"tables\.user\.placement"):
        recipe_file.parse(text, ["train.device=cpu"])
    with pytest.raises(UserError, match=r"tables\.user\.placement"):
        recipe_file.parse(text, ["tables.user.sharding=data_parallel"])
