"""What a plan costs, for TorchRec's planner and for the user: memory of shards and dense layers, bandwidths."""

import copy
import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, calculate_shard_storages
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    CollectiveType,
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys import models
from recsys.cluster import RESERVED_SHARE, Cluster
from recsys.data.batch import Batch
from recsys.plan import HOST_CACHED, Dense, Shard
from recsys.recipe import Recipe

_STATE_BYTES = 4  # optimizers keep fp32, whatever the weights are
_DENSE_EFFICIENCY = 0.5  # share of the peak that matrix products of these sizes reach; 0.5 to 0.9 where measured
_PROBE_ROWS, _PROBE_IDS, _PROBE_TABLE_ROWS = 16, 100_000, 8

# Optimizer -> numbers kept per weight, and per row.
_STATES = {"sgd": (0, 0), "adagrad": (1, 0), "rowwise_adagrad": (0, 1), "adam": (2, 0), "frozen": (0, 0)}


def optimizer_of(recipe: Recipe, table: str) -> str:
    """Name of what trains a table."""
    name = recipe.table_update(table).name
    return recipe.optimizer.dense.name if name == "dense" else name


def state_bytes(optimizer: str, rows: int, cols: int) -> int:
    """What an optimizer keeps for a part of a table."""
    per_weight, per_row = _STATES[optimizer]
    return _STATE_BYTES * (per_weight * rows * cols + per_row * rows)


class MemoryEstimator(ShardEstimator):
    """Memory of every way to split every table, from its real dtype and optimizer.

    TorchRec's own estimator takes states for as wide as the weights and forgets the gradients of replicated tables.
    Its figures for buffers are used.
    """

    def __init__(self, topology: Topology, optimizers: Mapping[str, str]) -> None:
        """Args are the cluster, and the optimizer's name by the table's stored one."""
        self._topology, self._optimizers = topology, optimizers
        self._sharders: SharderDataMap = {}

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Set the storage of every shard."""
        self._sharders = sharder_data_map
        on_cpu = self._topology.compute_device == "cpu"
        for option in sharding_options:
            for shard, found in zip(option.shards, self.shards(option), strict=True):
                hbm, ddr = (0, found.device_bytes) if on_cpu else (found.device_bytes, found.host_bytes)
                shard.storage = Storage(hbm=hbm, ddr=ddr)

    def shards(self, option: ShardingOption) -> tuple[Shard, ...]:
        """An option's shards with memory, and with times where those were estimated; rank -1 is none yet."""
        size, optimizer = option.tensor.element_size(), self._optimizers[option.name]
        replicated = option.sharding_type == ShardingType.DATA_PARALLEL.value
        found = []
        for shard, buffers in zip(option.shards, self._buffers(option), strict=True):
            (rows, cols), (row_offset, col_offset) = shard.size, shard.offset
            weights, state, cache, host = rows * cols * size, state_bytes(optimizer, rows, cols), 0, 0
            if option.compute_kernel == HOST_CACHED:
                # A slot has a copy of its row, the row's number and when it was used; a row has where it is cached.
                cache = math.ceil(option.cache_load_factor * (weights + 16 * rows)) + 4 * rows
                # FBGEMM keeps state of one number per row on the GPU, all other state beside the weights.
                host = weights + (0 if optimizer == "rowwise_adagrad" else state)
            perf = shard.perf
            found.append(
                Shard(
                    rank=-1 if shard.rank is None else shard.rank,
                    row_offset=row_offset,
                    rows=rows,
                    col_offset=col_offset,
                    cols=cols,
                    bytes=weights,
                    state_bytes=state,
                    gradient_bytes=weights if replicated else 0,
                    cache_bytes=cache,
                    buffer_bytes=buffers,
                    host_bytes=host,
                    lookup_ms=perf.fwd_compute + perf.bwd_compute + perf.prefetch_compute if perf else 0.0,
                    exchange_ms=perf.fwd_comms + perf.bwd_comms if perf else 0.0,
                )
            )
        return tuple(found)

    def _buffers(self, option: ShardingOption) -> list[int]:
        """Bytes of ids received and vectors made in one step, by shard."""
        storages = calculate_shard_storages(
            sharder_data=self._sharders[option.module_type_key],
            sharding_type=option.sharding_type,
            tensor=option.tensor.detach(),  # without its optimizer, which is counted here
            compute_device="cpu",
            compute_kernel="fused",
            shard_sizes=[shard.size for shard in option.shards],
            batch_sizes=[option.batch_size] * option.num_inputs,
            world_size=self._topology.world_size,
            local_world_size=self._topology.local_world_size,
            input_lengths=option.input_lengths,
            num_poolings=[1.0] * option.num_inputs,
            caching_ratio=1.0,
            is_pooled=option.is_pooled,
            input_data_type_size=8,
            output_data_type_size=4,
        )
        size = option.tensor.element_size()
        return [s.ddr - math.prod(shard.size) * size for s, shard in zip(storages, option.shards, strict=True)]


class TimeEstimator(EmbeddingPerfEstimator):
    """TorchRec's estimates of a step, worked out once for shards of one size: on many ranks nearly all are."""

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Set the times of every shard."""
        for option in sharding_options:
            by_size = {tuple(shard.size): shard for shard in option.shards}
            sample = copy.copy(option)
            sample.shards = list(by_size.values())
            super().estimate([sample], sharder_data_map)
            for shard in option.shards:
                shard.perf = copy.copy(by_size[tuple(shard.size)].perf)


class Reservation(FixedPercentageStorageReservation):
    """Leaves to the tables what neither the reserve nor the dense layers take, on CPU ranks too."""

    def __init__(self, cluster: Cluster, dense: Dense) -> None:
        super().__init__(RESERVED_SHARE)
        free = cluster.plannable_bytes - dense.device_bytes
        on_cpu = cluster.machine.device == "cpu"
        self._left = Storage(hbm=0, ddr=free) if on_cpu else Storage(hbm=free, ddr=cluster.plannable_host_bytes)

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> Topology:
        """A copy of the topology with what is left."""
        reserved = copy.deepcopy(topology)
        for device in reserved.devices:
            device.storage = copy.copy(self._left)
        self._last_reserved_topology = reserved
        return reserved


class _Bandwidths(BasicCommsBandwidths):
    """TorchRec takes every all-reduce for one between nodes, and for one in the table's own dtype."""

    def __init__(self, intra_host_bw: float, inter_host_bw: float, replicas_share: float) -> None:
        super().__init__(intra_host_bw=intra_host_bw, inter_host_bw=inter_host_bw)
        self._replicas_share = replicas_share

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        if collective_type != CollectiveType.ALL_REDUCE:
            return super().get_bw(local_world_size, world_size, collective_type)
        # Only the gradients of replicated tables are averaged so: fewer bytes are as good as more of them per second.
        bandwidth = self.intra_host_bw if world_size <= local_world_size else self.inter_host_bw
        return bandwidth / self._replicas_share


def topology_of(cluster: Cluster, replicas_share: float = 1.0) -> Topology:
    """A cluster in TorchRec's words; `replicas_share` as in `CommunicationSettings`."""
    machine, per_ms = cluster.machine, 1e-3
    cuda = machine.device == "cuda"
    return TopologyFactory.create_topology(
        trainer_config=TrainerConfig(world_size=cluster.world_size, local_world_size=cluster.devices_per_node),
        hardware_config=HardwareConfig(
            hbm_cap_bytes=machine.memory_bytes if cuda else 0,
            ddr_cap_bytes=machine.host_memory_bytes if cuda else machine.memory_bytes,
            hbm_mem_bw=machine.memory_bandwidth * per_ms,
            ddr_mem_bw=machine.memory_bandwidth * per_ms,
            hbm_to_ddr_mem_bw=machine.host_bandwidth * per_ms,
        ),
        kernel_config=KernelConfig(
            compute_device=machine.device,
            use_hardware_based_bandwidth=True,
            generalized_comms_bandwidths=_Bandwidths(
                machine.intra_bandwidth * per_ms, machine.inter_bandwidth * per_ms, replicas_share
            ),
        ),
    )


def dense_of(model: nn.Module, recipe: Recipe, cluster: Cluster) -> Dense:
    """What a rank needs beside its tables, measured on a copy of the model with tables of a few rows.

    Lists and histories count as full, so that activations are an upper bound.

    Args:
        model: The unsharded model with its tables on the meta device.
        recipe: What it was built from.
        cluster: For times.
    """
    parameters = [p for p in model.parameters() if p.device.type != "meta"]
    weights = sum(p.numel() * p.element_size() for p in parameters)
    num_weights = sum(p.numel() for p in parameters)
    saved, flops = _probe(recipe)
    batch = recipe.data.batch_size_per_rank
    machine, alone = cluster.machine, cluster.world_size == 1
    rate = machine.intra_bandwidth if cluster.nodes == 1 else machine.inter_bandwidth
    sent = recipe.train.communication.dense_bytes(num_weights, cluster.world_size)
    return Dense(
        bytes=weights,
        gradient_bytes=weights * (2 if recipe.train.communication.dense == "top_k" else 1),  # and what is not sent
        state_bytes=state_bytes(recipe.optimizer.dense.name, 1, num_weights),
        activation_bytes=math.ceil(saved * batch),
        compute_ms=1e3 * flops * batch / (machine.flops * _DENSE_EFFICIENCY),
        exchange_ms=0.0 if alone else 1e3 * sent / rate,
    )


def _probe(recipe: Recipe) -> tuple[float, float]:
    """(bytes saved for the backward pass, floating-point operations forward and backward) per row of a batch."""
    lengths = {i.name: i.max_length or 1 for i in recipe.id_inputs}
    num_rows = max(2, min(_PROBE_ROWS, _PROBE_IDS // sum(lengths.values())))  # normalisation needs two
    second_row = _PROBE_TABLE_ROWS // 2
    tables = [
        dataclasses.replace(
            t, rows=_PROBE_TABLE_ROWS, second_row=None if t.second_row is None else second_row, dtype="fp32"
        )
        for t in recipe.inputs.tables
    ]
    inputs = dataclasses.replace(recipe.inputs, tables=tuple(tables))
    # Planning happens on one rank: it must not draw from the generator that all ranks draw from alike.
    with torch.random.fork_rng(devices=[]):
        model = models.build(inputs, recipe.model).train()
        layout = inputs.layout(attends=recipe.model.attends)
        jagged = {
            name: (
                torch.ones(num_rows * lengths[name], dtype=torch.int64),
                torch.full((num_rows,), lengths[name]),
            )
            for name in (*layout.pooled, *layout.sequence)
        }
        dense = torch.randn(num_rows, len(inputs.dense))
        batch = Batch.from_jagged(layout, jagged, dense=dense, num_rows=num_rows)
        if any(field.weighted for field in inputs.fields):
            ids = batch.pooled
            ones = torch.ones(len(ids.values()))
            batch.pooled = KeyedJaggedTensor(ids.keys(), ids.values(), weights=ones, lengths=ids.lengths())
        return _measure(model, batch)


def _measure(model: nn.Module, batch: Batch) -> tuple[float, float]:
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels)
        loss.backward()
    return sum(saved.values()) / len(batch), counter.get_total_flops() / len(batch)
