"""A model's tables spread over ranks: the agreed plan, wrapping, initial values. How a plan is made: `planner.py`."""

import warnings

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recsys import strategy
from recsys.cluster import Cluster
from recsys.communication import Registry
from recsys.distributed import Ranks, agreed, broadcast, gather
from recsys.embedding import Embeddings, initial_rows, stored_name, table_of_parameter
from recsys.errors import UserError
from recsys.plan import Plan, TablePlan
from recsys.planner import Planner, sharders, torchrec_kind
from recsys.recipe import Recipe

_ROWS_AT_ONCE = 65_536


def cluster_of_ranks(ranks: Ranks, memory: str | None = None) -> Cluster:
    """The cluster as it is seen from this rank; `memory` is that of `train.memory_per_rank`."""
    return strategy.cluster_of(strategy.detect(ranks), ranks.device.type, memory, ranks.device.index or 0)


def agreed_plan(model: nn.Module, recipe: Recipe, ranks: Ranks, *, trains: bool = True) -> Plan:
    """The plan of the recipe's file, or the one that rank 0 makes, on every rank.

    Args:
        model: The unsharded model, its tables on the meta device.
        recipe: What it was built from.
        ranks: Who we are.
        trains: False for a model that is only read: any ranks may do that, so that no file binds them.

    Raises:
        UserError: There is no plan, or the ranks read different files; on all ranks.
    """
    pinned = recipe.train.plan if trains else None
    with agreed("plan"):
        plan = None
        if pinned or ranks.rank == 0:
            cluster = cluster_of_ranks(ranks, recipe.train.memory_per_rank)
            planner = Planner(model, recipe, cluster, trains=trains)
            plan = planner.adopt(Plan.read(pinned)) if pinned else planner.plan()
    if not pinned:
        plan = broadcast(plan)
    assert plan is not None, "rank 0 has a plan or an error"
    _require_one_plan(plan, ranks)
    return plan


def _require_one_plan(plan: Plan, ranks: Ranks) -> None:
    """Ranks that split tables differently would wait for each other, or train nonsense."""
    fingerprints = gather(plan.fingerprint)
    if len(set(fingerprints)) > 1:
        ranks_of = {found: [r for r, f in enumerate(fingerprints) if f == found] for found in fingerprints}
        error = UserError(
            "The ranks hold different plans: the plan fingerprint differs",
            received="; ".join(f"{found} on ranks {some}" for found, some in ranks_of.items()),
            allowed="one plan for all ranks",
            fix="let train.plan name the same file on every node",
        )
        error.is_printed_here = ranks.rank == 0
        raise error


def torchrec_plan(plan: Plan, model: nn.Module) -> ShardingPlan:
    """A plan in TorchRec's classes, by the modules that hold the tables."""
    tables = {stored_name(table.name): table for table in plan.tables}
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            bags = isinstance(module, EmbeddingBagCollection)
            configs = module.embedding_bag_configs() if bags else module.embedding_configs()
            found[path] = EmbeddingModuleShardingPlan({c.name: _parameter(tables[c.name], plan) for c in configs})
    return ShardingPlan(found)


def _parameter(table: TablePlan, plan: Plan) -> ParameterSharding:
    replicated = table.kind == "data_parallel"
    shards = [
        ShardMetadata(
            shard_offsets=[shard.row_offset, shard.col_offset],
            shard_sizes=[shard.rows, shard.cols],
            placement=placement(plan.device, shard.rank, plan.devices_per_node),
        )
        for shard in table.shards
    ]
    return ParameterSharding(
        sharding_type=torchrec_kind(table.kind),
        compute_kernel=table.kernel,
        ranks=[shard.rank for shard in table.shards],
        sharding_spec=None if replicated else EnumerableShardingSpec(shards),
        cache_params=CacheParams(load_factor=table.cached_share) if table.cached_share else None,
    )


def shard(model: nn.Module, plan: Plan, ranks: Ranks, codecs: Registry | None = None) -> DistributedModelParallel:
    """Spread the tables over the ranks as planned and replicate everything else.

    Args:
        model: The unsharded model.
        plan: Where each table lives.
        ranks: Who we are.
        codecs: What encodes the messages of each exchange; None: they are sent as they are.
    """
    # What torch says of TorchRec's and FBGEMM's own calls, when replicated tables are wrapped and when they train.
    warnings.filterwarnings(
        "ignore", "fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel", UserWarning
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        sharded = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(ranks.group),
            device=ranks.device,
            plan=torchrec_plan(plan, model),
            sharders=sharders(codecs),
            # one rank has nobody to average gradients with
            init_data_parallel=ranks.world_size > 1,
        )
    if ranks.device.type == "cpu":
        _let_kernels_be_empty(sharded)
    return sharded


def _let_kernels_be_empty(sharded: nn.Module) -> None:
    """Make FBGEMM's CPU kernels do with tables of no rows, as ranks hold of tables cut into more parts than rows.

    A kernel knows the CPU by weights in the host's memory, and without any takes a lookup for one on a GPU. Its
    backward pass looks for the next row number behind that of a table's first row, and runs out of the array where
    the last table has none.
    """
    lookups = [lookup for module in sharded.modules() for lookup in getattr(module, "_lookups", ())]
    for kernel in (kernel for lookup in lookups for kernel in lookup.modules()):
        if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
            if kernel.weights_host.numel() == 0:
                kernel.weights_host = nn.Parameter(torch.zeros(1, dtype=kernel.weights_host.dtype))
            if kernel.rows_per_table[-1] == 0:
                kernel.hash_size_cumsum[-1] += 1


@torch.no_grad()
def initialize_tables(model: DistributedModelParallel, embeddings: Embeddings, seed: int) -> None:
    """Give every local shard the initial values that `Embeddings.reset` gives the whole table."""
    tables = {table.name: table for table in embeddings.inputs.tables}
    for key, value in model.state_dict().items():
        if (name := table_of_parameter(key)) is None:
            continue
        sharded = hasattr(value, "local_shards")
        width = embeddings.padded_width(name)
        for shard in value.local_shards() if sharded else [value]:
            row, column = shard.metadata.shard_offsets if sharded else (0, 0)
            target = shard.tensor if sharded else shard
            for start in range(0, target.shape[0], _ROWS_AT_ONCE):  # a second table would not fit beside a large one
                part = target[start : start + _ROWS_AT_ONCE]
                rows = initial_rows(tables[name], seed, row + start, row + start + part.shape[0], width)
                part.copy_(rows[:, column : column + part.shape[1]])
