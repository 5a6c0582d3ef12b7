"""Topology, planner, plan, wrapping: the only file that knows how tables are spread over ranks."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    PlannerError,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType

from recsys.distributed import Ranks, broadcast
from recsys.embedding import Embeddings, initial_rows, stored_name, table_of_parameter
from recsys.errors import UserError
from recsys.machine import usable_memory_bytes
from recsys.recipe import Recipe

_MEMORY_RESERVE = 0.1  # share of a rank's memory that the planner leaves alone


class _BagSharder(EmbeddingBagCollectionSharder):
    """TorchRec leaves the row-wise kinds out on CPU ranks, where gloo's reduce-scatter now carries them."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        row_wise = [ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value]
        return list(dict.fromkeys([*super().sharding_types(compute_device_type), *row_wise]))


class _SequenceSharder(EmbeddingCollectionSharder):
    """TorchRec 1.8 cannot replicate a sequence table that two features share, so replicas are not offered."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [t for t in super().sharding_types(compute_device_type) if t != ShardingType.DATA_PARALLEL.value]


def sharders() -> list[Any]:
    """What can split which collection."""
    return [_BagSharder(), _SequenceSharder()]


def topology(ranks: Ranks) -> Topology:
    """The cluster as it is: kind and memory of each rank, ranks per host."""
    host = usable_memory_bytes() // ranks.local_world_size
    device = torch.cuda.get_device_properties(ranks.device).total_memory if ranks.device.type == "cuda" else 0
    return TopologyFactory.create_topology(
        trainer_config=TrainerConfig(world_size=ranks.world_size, local_world_size=ranks.local_world_size),
        hardware_config=HardwareConfig(hbm_cap_bytes=device, ddr_cap_bytes=host),
        kernel_config=KernelConfig(compute_device=ranks.device.type),
    )


def make_plan(model: nn.Module, recipe: Recipe, cluster: Topology, batch_size_per_rank: int) -> ShardingPlan:
    """Plan the tables of an unsharded model for a cluster, which need not be the one we are on.

    Raises:
        UserError: No plan fits.
    """
    constraints = {}
    for module in model.modules():
        if not isinstance(module, Embeddings):
            continue
        for name, _ in module.table_weights():
            wanted = recipe.table_settings(name).sharding
            constraints[stored_name(name)] = ParameterConstraints(sharding_types=_kinds(wanted, recipe, cluster))
    planner = EmbeddingShardingPlanner(
        topology=cluster,
        batch_size=batch_size_per_rank,
        storage_reservation=FixedPercentageStorageReservation(_MEMORY_RESERVE),
        constraints=constraints,
        debug=False,
        stats=[],
    )
    try:
        return planner.plan(model, sharders())
    except PlannerError as error:
        raise UserError(
            f"The tables do not fit on {cluster.world_size} ranks",
            received=" ".join(str(error).split()),
            fix="use more ranks, fewer or narrower rows, or another `sharding`",
        ) from error


def _kinds(wanted: str, recipe: Recipe, cluster: Topology) -> list[str]:
    """The kinds that the planner may choose from."""
    if wanted != "auto":
        return [ShardingType[wanted.upper()].value]
    if cluster.world_size == 1:
        # nothing to split: a replica would only lose the fused kernel
        return [ShardingType.TABLE_WISE.value]
    kinds = [ShardingType.DATA_PARALLEL, ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE]
    if recipe.optimizer.sparse.name != "rowwise_adagrad":  # see Recipe: its state is one number per whole row
        kinds.append(ShardingType.COLUMN_WISE)
    return [kind.value for kind in kinds]


def shard(model: nn.Module, plan: ShardingPlan, ranks: Ranks) -> DistributedModelParallel:
    """Spread the tables over the ranks as planned and replicate everything else."""
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(ranks.group),
        device=ranks.device,
        plan=plan,
        sharders=sharders(),
        # one rank has nobody to average gradients with
        init_data_parallel=ranks.world_size > 1,
    )


def agreed_plan(model: nn.Module, recipe: Recipe, ranks: Ranks) -> ShardingPlan:
    """The plan that rank 0 makes, on every rank; also its error."""
    outcome: ShardingPlan | UserError
    if ranks.rank == 0:
        try:
            outcome = make_plan(model, recipe, topology(ranks), recipe.data.batch_size_per_rank)
        except UserError as error:
            outcome = error
    outcome = broadcast(outcome if ranks.rank == 0 else None)
    if isinstance(outcome, UserError):
        outcome.is_printed_here = ranks.rank == 0
        raise outcome
    return outcome


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
            rows = initial_rows(tables[name], seed, row, row + target.shape[0], width)
            target.copy_(rows[:, column : column + target.shape[1]])


def describe(plan: ShardingPlan, embeddings: Embeddings, world_size: int, dense_bytes: int) -> dict[str, Any]:
    """The plan as plain data: table -> kind, kernel, and the rows, columns and bytes of each shard."""
    rows_of = {name: weight.shape for name, weight in embeddings.table_weights()}
    tables_by_stored_name = {stored_name(name): name for name in rows_of}
    tables = []
    for module_plan in plan.plan.values():
        for stored, parameter in module_plan.items():
            name = tables_by_stored_name[stored]
            shape = rows_of[name]
            spec = parameter.sharding_spec
            if spec is None:
                whole = {
                    "row_offset": 0,
                    "rows": shape[0],
                    "col_offset": 0,
                    "cols": shape[1],
                    "bytes": 4 * shape.numel(),
                }
                shards = [{"rank": rank, **whole} for rank in range(world_size)]
            else:
                shards = [
                    {
                        "rank": s.placement.rank(),
                        "row_offset": s.shard_offsets[0],
                        "rows": s.shard_sizes[0],
                        "col_offset": s.shard_offsets[1],
                        "cols": s.shard_sizes[1],
                        "bytes": 4 * s.shard_sizes[0] * s.shard_sizes[1],
                    }
                    for s in spec.shards
                ]
            table = embeddings.inputs.table(name)
            tables.append(
                {
                    "name": name,
                    "rows": table.rows,
                    "dim": table.dim,
                    "kind": parameter.sharding_type,
                    "kernel": parameter.compute_kernel,
                    "shards": shards,
                }
            )
    return {"world_size": world_size, "dense_bytes": dense_bytes, "tables": tables}
