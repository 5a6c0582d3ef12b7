"""Tables that do not fit: which one, what it needs, what is left for it, and the settings that would help."""

from collections.abc import Sequence

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology
from torchrec.distributed.planner.utils import reset_shard_rank

from recsys.cluster import RESERVED_SHARE, Cluster, format_bytes
from recsys.embedding import stored_name
from recsys.errors import UserError
from recsys.plan import Dense, Plan, Shard
from recsys.plan_costs import MemoryEstimator
from recsys.recipe import Recipe


class DoesNotFitError(UserError):
    """No plan, for want of memory.

    Attributes:
        table: The table that finds no place; None where nothing is left for any.
        needed_bytes: What it needs on one rank.
        available_bytes: What is left there.
    """

    table: str | None
    needed_bytes: int
    available_bytes: int

    @classmethod
    def of(
        cls, what: str, table: str | None, amounts: tuple[int, int], received: str, allowed: str, fixes: Sequence[str]
    ) -> "DoesNotFitError":
        """The error.

        Args:
            what: One sentence.
            table: See above.
            amounts: Needed and available bytes.
            received: What the need is made of.
            allowed: What takes the rest of the memory.
            fixes: Settings that would help, the easiest first.
        """
        needed, available = amounts
        gap = format_bytes(needed - available)
        error = cls(
            what,
            received=f"{format_bytes(needed)} needed ({received}), {gap} more than there is",
            allowed=f"{format_bytes(available)} available ({allowed})",
            fix="; or ".join(fixes),
        )
        error.table, error.needed_bytes, error.available_bytes = table, needed, available
        return error


def no_room(cluster: Cluster, dense: Dense) -> DoesNotFitError:
    """The error where dense layers and activations leave nothing."""
    return DoesNotFitError.of(
        "The dense layers and the activations of a batch do not fit on a rank",
        None,
        (dense.device_bytes, cluster.plannable_bytes),
        received=f"weights {format_bytes(dense.bytes)}, gradients {format_bytes(dense.gradient_bytes)}, optimizer "
        f"{format_bytes(dense.state_bytes)}, activations {format_bytes(dense.activation_bytes)}",
        allowed=f"{format_bytes(cluster.machine.memory_bytes)} less {RESERVED_SHARE:.0%}",
        fixes=["lower data.batch_size_per_rank", "cut lists shorter with max_length", "use devices with more memory"],
    )


def frugal(options: Sequence[ShardingOption]) -> list[list[ShardingOption]]:
    """Ways to split all tables that ask for little memory; where none of them fits, nothing does, or hardly anything.

    In all ranks together a table takes least where it lies whole on one; on a single rank it takes least where it is
    spread, and then every rank has buffers for it. So the largest tables are spread and the others are not: none, one,
    two, four, ..., or all of them. Each way has the tables in the order of what they need.
    """
    by_table: dict[str, list[ShardingOption]] = {}
    for option in options:
        by_table.setdefault(option.name, []).append(option)
    spread = [min(found, key=_largest) for found in by_table.values()]
    whole = [min(found, key=lambda option: (_in_all(option), _largest(option))) for found in by_table.values()]
    order = sorted(range(len(whole)), key=lambda place: _largest(whole[place]), reverse=True)
    counts = sorted({0, len(order), *(2**power for power in range(len(order).bit_length()))})
    proposals = ([spread[p] if n < count else whole[p] for n, p in enumerate(order)] for count in counts)
    return [sorted(proposal, key=_largest, reverse=True) for proposal in proposals]


def _largest(option: ShardingOption) -> tuple[int, int, float]:
    storages = [shard.storage for shard in option.shards]
    return (max(s.hbm for s in storages), max(s.ddr for s in storages), option.total_perf)


def _in_all(option: ShardingOption) -> int:
    """Bytes on all ranks together, in the memory that tables compete for."""
    return sum(shard.storage.hbm or shard.storage.ddr for shard in option.shards)


def fits(options: list[ShardingOption], left: Topology) -> bool:
    """Whether TorchRec finds ranks for these options, one per table; it leaves them in the shards."""
    reset_shard_rank(options)
    try:
        GreedyPerfPartitioner().partition(options, left)
    except PlannerError:
        return False
    return True


def misfit(
    options: Sequence[ShardingOption],
    left: Topology,
    memory: MemoryEstimator,
    cluster: Cluster,
    dense: Dense,
    recipe: Recipe,
) -> DoesNotFitError:
    """The error for tables that TorchRec finds no place for.

    Args:
        options: All ways to split every table, none of which fits.
        left: What the ranks have for tables.
        memory: Tells what a shard's memory is made of.
        cluster: The ranks.
        dense: What the ranks have beside tables.
        recipe: Where the tables come from.
    """
    chosen, placed = max(((p, _num_placed(p, left)) for p in frugal(options)), key=lambda found: found[1])
    assert placed < len(chosen), "a proposal that fits would have been a plan"
    fits(chosen[:placed], left)  # the failed attempt left ranks behind
    free = _free(chosen[:placed], left)
    option = chosen[placed]
    needed, available, tier = _shortage(option, free, cluster)
    shard = max(memory.shards(option), key=lambda s: s.device_bytes)
    name = next(n for n in recipe.inputs.tables if stored_name(n.name) == option.name).name
    whole = cluster.machine.memory_bytes if tier == "memory" else cluster.machine.host_memory_bytes
    others = sum(max(s.storage.hbm or s.storage.ddr for s in o.shards) for o in chosen[:placed])
    taken = f"{format_bytes(whole)} less {RESERVED_SHARE:.0%}"
    if tier == "memory":
        taken += f", dense layers and activations of {format_bytes(dense.device_bytes)}"
    taken += f", and up to {format_bytes(others)} for {placed} larger table(s)" if placed else ""
    return DoesNotFitError.of(
        f"Table {name!r} finds no place on {cluster.world_size} rank(s): too little {tier} on the best of them",
        name,
        (needed, available),
        received=f"{option.sharding_type.removesuffix('_shard')} on one rank: {_made_of(shard)}",
        allowed=taken,
        fixes=_fixes(name, needed, available, chosen, cluster, dense, recipe),
    )


def _num_placed(proposal: list[ShardingOption], left: Topology) -> int:
    """How many tables find a place, from the first one on."""
    low, high = 0, len(proposal) + 1  # the first `low` fit, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(proposal[:middle], left) else (low, middle)
    return low


def overfull(plan: Plan, cluster: Cluster) -> DoesNotFitError:
    """The error for a pinned plan that asks more of a rank than it has."""
    load = max(plan.loads(), key=lambda found: found.device_bytes)
    table, shard = max(
        ((t, s) for t in plan.tables for s in t.shards if s.rank == load.rank), key=lambda pair: pair[1].device_bytes
    )
    free = cluster.plannable_bytes - (load.device_bytes - shard.device_bytes)
    return DoesNotFitError.of(
        f"The plan asks too much of rank {load.rank}, first of all with table {table.name!r}",
        table.name,
        (shard.device_bytes, free),
        received=f"{table.kind}: {_made_of(shard)}",
        allowed=f"{format_bytes(cluster.machine.memory_bytes)} less {RESERVED_SHARE:.0%} and what else is there",
        fixes=["plan anew without train.plan", "use ranks with more memory"],
    )


def _made_of(shard: Shard) -> str:
    parts = {
        "weights": shard.bytes,
        "optimizer": shard.state_bytes,
        "gradients": shard.gradient_bytes,
        "cache": shard.cache_bytes,
        "buffers": shard.buffer_bytes,
    }
    return ", ".join(f"{what} {format_bytes(size)}" for what, size in parts.items() if size)


def _free(options: Sequence[ShardingOption], left: Topology) -> list[tuple[int, int]]:
    """(own memory, host memory) of every rank that the placed options leave."""
    free = [[d.storage.hbm, d.storage.ddr] for d in left.devices]
    for shard in (shard for option in options for shard in option.shards):
        free[shard.rank][0] -= shard.storage.hbm
        free[shard.rank][1] -= shard.storage.ddr
    on_cpu = left.compute_device == "cpu"
    return [(ddr, ddr) if on_cpu else (hbm, ddr) for hbm, ddr in free]


def _shortage(option: ShardingOption, free: list[tuple[int, int]], cluster: Cluster) -> tuple[int, int, str]:
    """(needed, available, which memory) of the first shard that finds no place on the ranks with most room for it."""
    on_cpu = cluster.machine.device == "cpu"
    needs = [(s.storage.ddr, 0) if on_cpu else (s.storage.hbm, s.storage.ddr) for s in option.shards]
    left = [list(pair) for pair in free]
    per_node = cluster.devices_per_node
    if len(needs) == cluster.world_size:
        ranks = list(range(cluster.world_size))
    elif len(needs) % per_node == 0 and option.sharding_type in ("table_row_wise", "grid_shard"):
        nodes = [range(node * per_node, (node + 1) * per_node) for node in range(cluster.nodes)]
        nodes.sort(key=lambda node: -min(left[rank][0] for rank in node))
        ranks = [rank for place in range(len(needs) // per_node) for rank in nodes[place % len(nodes)]]
    else:
        ranks = [-1] * len(needs)  # any rank
    for need, given in zip(needs, ranks, strict=True):
        rank = given if given >= 0 else max(range(len(left)), key=lambda r: left[r][0])
        for tier, name in ((0, "memory"), (1, "host memory")):
            if need[tier] > left[rank][tier]:
                return need[tier], left[rank][tier], name
            left[rank][tier] -= need[tier]
    # TorchRec tries neighbouring nodes only, and found none among them: then the fullest rank is in the way.
    fullest = min(range(len(free)), key=lambda rank: free[rank][0])
    return max(need[0] for need in needs), free[fullest][0], "memory"


def _fixes(
    name: str,
    needed: int,
    available: int,
    options: Sequence[ShardingOption],
    cluster: Cluster,
    dense: Dense,
    recipe: Recipe,
) -> list[str]:
    settings, fixes = recipe.table_settings(name), []
    excluded = recipe.excluded_kinds(name)
    if settings.sharding not in ("auto", "row_wise") and "row_wise" not in excluded and cluster.world_size > 1:
        fixes.append(f"set tables.{name}.sharding=row_wise")
    if settings.placement == "device" and cluster.machine.device == "cuda":
        fixes.append(f"set tables.{name}.placement=host_cached, which needs host memory")
    elif cluster.machine.device == "cuda" and cluster.machine.host_memory_bytes == 0:
        fixes.append("give --host-memory or a --machine, to keep cold rows on the host")
    total = sum(_in_all(option) for option in options)
    ranks = -(-total // (cluster.plannable_bytes - dense.device_bytes))
    if ranks > cluster.world_size:
        fixes.append(f"use {ranks} or more such ranks: all tables together need {format_bytes(total)}")
    if recipe.table_update(name).name in ("adagrad", "adam") and "row_wise" not in excluded:
        fixes.append(f"set tables.{name}.optimizer=rowwise_adagrad, which keeps one number per row")
    share = max(available, 0) / needed
    if settings.ids == "hot_cold":
        fixes.append(f"lower tables.{name}.hot and cold to about {share:.0%} of {settings.id_rows:,} rows")
    elif settings.ids == "hashed" and (rows := int(0.99 * settings.rows * share)):
        fixes.append(f"set tables.{name}.rows to about {rows:,} or less")
    if settings.dtype == "fp32":
        fixes.append(f"set tables.{name}.dtype=fp16")
    fixes.append(f"lower tables.{name}.dim from {settings.dim}")
    return fixes
