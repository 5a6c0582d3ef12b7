"""Which rank gets which part of which table: TorchRec's planner with our choices, memory and messages."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import Enumerator, PlannerError, Proposer, ShardingOption, Stats, Topology
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingType

from recsys.cluster import Cluster
from recsys.communication import Registry, registry
from recsys.embedding import Embeddings, stored_name
from recsys.errors import UserError
from recsys.plan import HOST_CACHED, Plan, TablePlan
from recsys.plan_costs import MemoryEstimator, Reservation, TimeEstimator, dense_of, optimizer_of, topology_of
from recsys.plan_misfit import fits, frugal, misfit, no_room, overfull
from recsys.recipe import Recipe
from recsys.strategy import kinds_of
from recsys.table_settings import KINDS

_TYPES = {kind: ShardingType["GRID_SHARD" if kind == "grid" else kind.upper()].value for kind in KINDS}
_NAMES = {theirs: ours for ours, theirs in _TYPES.items()}
_LARGE_SHARE = 0.02  # of a rank's memory: a table above it is spread over ranks whatever the estimates say
_TINY_BYTES = 16 * 2**20  # a table up to here may be replicated; with gradients and state, three times that
_MIN_COLUMNS = 128  # TorchRec cuts columns into pieces of no less, unless asked to
_CACHED_SHARES = (0.2, 0.1, 0.05, 0.02, 0.01)  # of a table's rows, tried in order; TorchRec's default comes first
_MAX_THOROUGH = 1500  # tables x ranks up to which everything is tried, in a second or two
_MAX_INFERIOR = 10  # proposals in a row without a better plan that end the search above it
_MAX_GRID_PROPOSALS = 300  # combinations of options up to which all are tried


class _BagSharder(EmbeddingBagCollectionSharder):
    """TorchRec leaves the row-wise kinds out on CPU ranks, where gloo's reduce-scatter now carries them."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        row_wise = [ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value]
        return list(dict.fromkeys([*super().sharding_types(compute_device_type), *row_wise]))


class _SequenceSharder(EmbeddingCollectionSharder):
    """TorchRec 1.8 cannot replicate a sequence table that two features share, so replicas are not offered."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [t for t in super().sharding_types(compute_device_type) if t != ShardingType.DATA_PARALLEL.value]


def sharders(codecs: Registry | None = None) -> list[Any]:
    """What can split which collection, with what encodes the messages of each exchange."""
    return [kind(qcomm_codecs_registry=dict(codecs) if codecs else None) for kind in (_BagSharder, _SequenceSharder)]


def torchrec_kind(kind: str) -> str:
    """TorchRec's name of a way to split a table."""
    return _TYPES[kind]


class Planner:
    """Plans of one model on one cluster, which need not be the one we are on.

    Args:
        model: The unsharded model, its tables on the meta device.
        recipe: What it was built from.
        cluster: The ranks.
        trains: False for a model that is only read, whose tables keep no optimizer's state.

    Raises:
        DoesNotFitError: The dense layers and activations alone take more than there is.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, cluster: Cluster, *, trains: bool = True) -> None:
        (embeddings,) = (module for module in model.modules() if isinstance(module, Embeddings))
        self.cluster, self.dense = cluster, dense_of(model, recipe, cluster)
        self._model, self._recipe, self._inputs = model, recipe, embeddings.inputs
        self._weights = dict(embeddings.table_weights())
        self._sequence = {embeddings.inputs.table_of(name).name for name in embeddings.layout.sequence}
        self._lengths: dict[str, list[float]] = {}
        for i in recipe.id_inputs:
            rows_per_id = recipe.table_settings(i.table).num_hashes
            self._lengths.setdefault(i.table, []).append(float((i.max_length or 1) * rows_per_id))
        self._batch_size = recipe.data.batch_size_per_rank
        self._sharders = sharders(registry(recipe) if trains else None)
        self._topology = topology_of(cluster, recipe.train.communication.replicas_share)
        self._optimizers = {
            stored_name(name): optimizer_of(recipe, name) if trains else "frozen" for name in self._weights
        }
        self._memory = MemoryEstimator(self._topology, self._optimizers)
        if cluster.plannable_bytes <= self.dense.device_bytes:
            raise no_room(cluster, self.dense)

    def plan(self) -> Plan:
        """The plan that is estimated to be fastest among those that fit.

        Raises:
            DoesNotFitError: There is none.
        """
        attempts = [(None, False), (None, True), *((share, True) for share in self._cached_shares())]
        for share, anyhow in attempts:
            if (chosen := self._solve(self._all_constraints(share, anyhow=anyhow))) is not None:
                return self._described(chosen)
        enumerator = self._enumerator(self._all_constraints(None, anyhow=True))
        options = enumerator.enumerate(self._model, self._sharders)
        raise misfit(options, self._reserved(), self._memory, self.cluster, self.dense, self._recipe)

    def adopt(self, plan: Plan) -> Plan:
        """A plan from a file, checked against model and cluster, with the costs that it has here.

        Raises:
            UserError: It is for another model or cluster, or splits a table as nothing here can.
            DoesNotFitError: It needs more memory than a rank has.
        """
        widths = {name: weight.shape[1] for name, weight in self._weights.items()}
        plan.check(self._inputs.tables, widths, self.cluster)
        tables = {stored_name(t.name): t for t in plan.tables}
        problems = [p for t in plan.tables if (p := self._impossible(t)) is not None]
        if not problems:
            constraints = {name: self._pinned(table) for name, table in tables.items()}
            options = self._enumerator(constraints).enumerate(self._model, self._sharders)
            problems = [
                p for option in options if (p := _assign(option, tables[option.name], self.cluster)) is not None
            ]
        if problems:
            raise UserError.collect("The plan cannot be carried out", problems, fix="plan anew, or change train.plan")
        adopted = self._described(options)
        if max(load.device_bytes for load in adopted.loads()) > self.cluster.plannable_bytes:
            raise overfull(adopted, self.cluster)
        return adopted

    def _solve(self, constraints: dict[str, ParameterConstraints]) -> list[ShardingOption] | None:
        """One option per table, ranks assigned; None when nothing fits."""
        recorder, enumerator = _Recorder(), self._enumerator(constraints)
        options = enumerator.enumerate(self._model, self._sharders)
        if not any(fits(proposal, self._reserved()) for proposal in frugal(options)):
            return None
        thorough = len(self._weights) * self.cluster.world_size <= _MAX_THOROUGH
        threshold = None if thorough else _MAX_INFERIOR
        planner = EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=self._batch_size,
            enumerator=enumerator,
            storage_reservation=Reservation(self.cluster, self.dense),
            proposer=[
                _LeastMemory(),
                GridSearchProposer(_MAX_GRID_PROPOSALS if thorough else 1),
                GreedyProposer(threshold=threshold),
                GreedyProposer(use_depth=False, threshold=threshold),
                UniformProposer(),
            ],
            constraints=constraints,
            debug=False,
            stats=[recorder],
        )
        try:
            with _quiet():
                planner.plan(self._model, self._sharders)
        except PlannerError:
            return None
        return recorder.chosen

    def _enumerator(self, constraints: dict[str, ParameterConstraints]) -> EmbeddingEnumerator:
        estimators = [TimeEstimator(self._topology, constraints), self._memory]
        return _Enumerator(self._topology, self._batch_size, constraints, estimator=estimators)

    def _reserved(self) -> Topology:
        reservation = Reservation(self.cluster, self.dense)
        return reservation.reserve(self._topology, self._batch_size, self._model, self._sharders)

    def _cached_shares(self) -> Sequence[float]:
        has_host = self.cluster.machine.device == "cuda" and self.cluster.machine.host_memory_bytes > 0
        may = any(self._recipe.table_settings(name).placement != "device" for name in self._weights)
        return _CACHED_SHARES if may and has_host else ()

    def _all_constraints(self, share: float | None, *, anyhow: bool) -> dict[str, ParameterConstraints]:
        return {stored_name(name): self._constraints(name, share, anyhow=anyhow) for name in self._weights}

    def _constraints(self, name: str, share: float | None, *, anyhow: bool = False) -> ParameterConstraints:
        """What the planner may do with a table.

        Args:
            name: Of the table.
            share: Share of its rows in a cache, if it may live on the host; None: it may not, unless it must.
            anyhow: Offer all that is possible, and not only what is sensible for its size.
        """
        settings = self._recipe.table_settings(name)
        cached = settings.placement == "host_cached"
        if cached and self.cluster.machine.device == "cpu":
            raise UserError(
                f"tables.{name}.placement: a cache in front of the host's memory needs GPUs",
                received="host_cached on CPU ranks",
                allowed="auto, device",
                fix="remove the key, or train on GPUs",
            )
        kinds = [settings.sharding] if settings.sharding != "auto" else self._kinds(name, anyhow)
        kernels = [] if cached else ["fused", "dense"]
        if cached or (share is not None and settings.placement == "auto"):
            kernels.append(HOST_CACHED)
        if cached:
            kinds = [kind for kind in kinds if kind != "data_parallel"]
        # The default keeps columns together up to 128; who asks for columns gets as many pieces as ranks, or nodes.
        pieces = {"column_wise": self.cluster.world_size, "grid": self.cluster.nodes}.get(settings.sharding)
        return ParameterConstraints(
            sharding_types=[_TYPES[kind] for kind in kinds],
            compute_kernels=kernels,
            min_partition=_piece(self._weights[name].shape[1], pieces) if pieces else None,
            pooling_factors=self._lengths[name],
            cache_params=CacheParams(load_factor=share or _CACHED_SHARES[0]) if HOST_CACHED in kernels else None,
        )

    def _kinds(self, name: str, anyhow: bool) -> list[str]:
        """The kinds that the planner may choose from, where the recipe leaves it to the planner."""
        possible = self._possible(name)
        everything = kinds_of(self.cluster.world_size, self.cluster.nodes)
        weight = self._weights[name]
        if weight.shape[1] < 2 * _MIN_COLUMNS:
            everything = tuple(kind for kind in everything if kind != "column_wise")
        rows = [kind for kind in everything if kind.endswith("row_wise")]
        size = weight.numel() * weight.element_size()
        wanted: Sequence[str]
        if anyhow or self.cluster.world_size == 1:
            wanted = everything
        elif size > _LARGE_SHARE * self.cluster.plannable_bytes:
            wanted = rows
        elif size <= _TINY_BYTES and weight.shape[0] <= self._batch_size * sum(self._lengths[name]):
            # its gradient is no larger than the vectors that would be exchanged
            wanted = ["data_parallel"]
        else:
            wanted = everything
        return [kind for kind in wanted if kind in possible] or possible

    def _possible(self, name: str) -> list[str]:
        """What sharder, optimizer and dtype allow."""
        sharder = self._sharders[1 if name in self._sequence else 0]
        types, excluded = sharder.sharding_types(self.cluster.machine.device), self._recipe.excluded_kinds(name)
        return [ours for ours, theirs in _TYPES.items() if theirs in types and ours not in excluded]

    def _impossible(self, table: TablePlan) -> str | None:
        """Why nothing can split and look up a table as a file says."""
        possible = self._possible(table.name)
        if table.kind not in possible:
            return f"table {table.name!r} cannot be split so. Received: {table.kind}. Allowed: {', '.join(possible)}"
        fused = ["fused", HOST_CACHED] if self.cluster.machine.device == "cuda" else ["fused"]
        kernels = ["dense"] if table.kind == "data_parallel" else fused
        if table.kernel not in kernels:
            return f"table {table.name!r} has no such kernel. Received: {table.kernel}. Allowed: {', '.join(kernels)}"
        if (table.kernel == HOST_CACHED) != (0 < (table.cached_share or 0) < 1):
            return f"table {table.name!r}: cached_share must be between 0 and 1 with {HOST_CACHED}, and null without"
        return None

    def _pinned(self, table: TablePlan) -> ParameterConstraints:
        """Constraints that leave one way to split a table."""
        return ParameterConstraints(
            sharding_types=[_TYPES[table.kind]],
            compute_kernels=[table.kernel],
            min_partition=table.shards[0].cols if table.shards else None,
            pooling_factors=self._lengths[table.name],
            cache_params=CacheParams(load_factor=table.cached_share) if table.cached_share else None,
        )

    def _described(self, options: Sequence[ShardingOption]) -> Plan:
        """The plan that chosen options make."""
        by_name, tables = {option.name: option for option in options}, []
        for name, weight in self._weights.items():
            option = by_name[stored_name(name)]
            cached = option.compute_kernel == HOST_CACHED
            tables.append(
                TablePlan(
                    name=name,
                    rows=weight.shape[0],
                    dim=self._inputs.table(name).dim,
                    width=weight.shape[1],
                    kind=_NAMES[option.sharding_type],
                    kernel=option.compute_kernel,
                    optimizer=self._optimizers[option.name],
                    shards=self._memory.shards(option),
                    cached_share=option.cache_load_factor if cached else None,
                )
            )
            assert tables[-1].gap() is None, f"table {name!r}: {tables[-1].gap()}"
        cluster = self.cluster
        return Plan(
            world_size=cluster.world_size,
            devices_per_node=cluster.devices_per_node,
            device=cluster.machine.device,
            memory_bytes=cluster.machine.memory_bytes,
            batch_size_per_rank=self._batch_size,
            tables=tuple(tables),
            dense=self.dense,
            notes=cluster.notes,
        )


def _piece(width: int, most: int) -> int:
    """Columns of a piece: the smallest that kernels take and that makes no more than `most` equal pieces."""
    return min(cols for cols in range(4, width + 1, 4) if width % cols == 0 and width // cols <= most)


def _assign(option: ShardingOption, table: TablePlan, cluster: Cluster) -> str | None:
    """Give an option's shards the ranks of a plan; what does not fit, or None."""
    areas = [(s.offset[0], s.size[0], s.offset[1], s.size[1]) for s in option.shards]
    if areas != [shard.area for shard in table.shards]:
        return (
            f"table {table.name!r}: TorchRec splits {table.kind} otherwise over {cluster.nodes} x "
            f"{cluster.devices_per_node} ranks"
        )
    ranks = [shard.rank for shard in table.shards]
    for shard, rank in zip(option.shards, ranks, strict=True):
        shard.rank = rank
    per_node = cluster.devices_per_node
    nodes = [ranks[start : start + per_node] for start in range(0, len(ranks), per_node)]
    whole_nodes = [[*range(node * per_node, (node + 1) * per_node)] for node in range(cluster.nodes)]
    right = {
        "row_wise": ranks == [*range(cluster.world_size)],
        "data_parallel": ranks == [*range(cluster.world_size)],
        "table_row_wise": len(nodes) == 1 and nodes[0] in whole_nodes,
        "grid": all(node in whole_nodes for node in nodes),
    }.get(table.kind, True)
    return None if right else f"table {table.name!r}: {table.kind} cannot have its shards on the ranks {ranks}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without TorchRec's warnings on the root logger that a replicated table has no shards."""

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Sharding spec not found")

    handler = logging.NullHandler()  # else logging itself would add one that prints
    logging.root.addHandler(handler)
    logging.root.addFilter(is_news)
    try:
        yield
    finally:
        logging.root.removeFilter(is_news)
        logging.root.removeHandler(handler)


class _Enumerator(EmbeddingEnumerator):
    """The ways to split the tables of one model, in an order of their own.

    TorchRec goes through sets of names, whose order changes from process to process, and with it the choice between
    equals.
    """

    _found: list[ShardingOption] | None = None

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        if self._found is None:
            found = super().enumerate(module, sharders)
            self._found = sorted(found, key=lambda option: (option.fqn, option.sharding_type, option.compute_kernel))
        return self._found


class _LeastMemory(Proposer):
    """Proposals that ask for little memory, so that what fits at all is found."""

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        self._proposals = frugal(search_space)

    def propose(self) -> list[ShardingOption] | None:
        return self._proposals.pop() if self._proposals else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Nothing is learnt from it."""


class _Recorder(Stats):
    """Keeps the options that the planner chose, which its plan does not contain."""

    chosen: list[ShardingOption] | None = None

    def log(self, *args: Any, best_plan: list[ShardingOption], **kwargs: Any) -> None:
        self.chosen = best_plan
