"""Optimizers: fused ones that run inside the tables' backward pass, and torch's for the dense layers and replicas."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.optimizers import SGD, Adagrad, Adam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys.embedding import Embeddings, table_of_parameter
from recsys.optimizer_settings import DenseOptimizer, TableUpdate
from recsys.recipe import Recipe

_FUSED = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": Adagrad, "sgd": SGD, "adam": Adam, "frozen": SGD}
_REPLICATED = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "frozen": torch.optim.SGD,
}
_DENSE = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


def fuse(embeddings: Embeddings, recipe: Recipe, *, trains: bool = True) -> None:
    """Give every table its optimizer, before sharding turns the two into one kernel.

    Args:
        embeddings: The unsharded tables.
        recipe: Says who trains which.
        trains: False: nobody trains any, and no optimizer keeps state.
    """
    for name, weight in embeddings.table_weights():
        update = recipe.table_update(name)
        if update.name == "dense":
            continue
        if not trains:
            update = TableUpdate("frozen", 0.0, None)
        _apply_optimizer_in_backward(_FUSED[update.name], [weight], _table_arguments(embeddings, name, update))


class ModelOptimizer(OptimizerWrapper):
    """All optimizers of a model behind one handle: learning rates, clipping and the step of what is not fused.

    The learning rates of a step stand before its backward pass, in which fused tables are updated: they are set when
    this object is made, and at the end of each step for the next.

    Attributes:
        steps_done: Steps taken so far. A run that goes on from a checkpoint calls `seek` with the checkpoint's.
    """

    def __init__(
        self,
        unfused: KeyedOptimizer,
        fused: KeyedOptimizer,
        recipe: Recipe,
        clipped: list[nn.Parameter],
        total_steps: int | None,
        parts: list[KeyedOptimizer],
    ) -> None:
        """Take over the optimizers.

        Args:
            unfused: Of dense layers and replicated tables.
            fused: Of all other tables; its groups are the kernels'.
            recipe: Schedule, and the largest norm of the gradients.
            clipped: The parameters whose gradients have that norm.
            total_steps: Steps of the whole run, for the schedule; None where it is not known.
            parts: What `unfused` is made of.
        """
        super().__init__(unfused)
        self._parts = parts
        for part in parts:
            _allocate_state(part)
        self._fused, self._clipped, self._total_steps, self._recipe = fused, clipped, total_steps, recipe
        self._schedule, self._clip_norm = recipe.optimizer.schedule, recipe.optimizer.dense.clip_norm
        for group in self._groups():
            group.setdefault("initial_lr", group["lr"])  # the kernels' groups outlive this object
        self._named_rates = _named_rates(recipe)
        self.seek(0)

    def step(self, closure: Any = None) -> None:
        """Update everything that no fused kernel has updated, then set the next step's learning rates."""
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._clipped, self._clip_norm)
        super().step(closure)
        self.seek(self.steps_done + 1)

    def seek(self, steps_done: int) -> None:
        """Set the learning rates of the step that follows this many others."""
        self.steps_done = steps_done
        factor = self._schedule.factor(steps_done, self._total_steps)
        for group in self._groups():
            group["lr"] = group["initial_lr"] * factor
        self._fused.step()  # hands the groups' rates to the kernels, and does nothing else

    def post_load_state_dict(self) -> None:
        """Learning rates come from the schedule, not from what a checkpoint's groups say."""
        super().post_load_state_dict()
        self.seek(self.steps_done)

    def run_lasts(self, total_steps: int) -> None:
        """Tell how many steps the whole run has, where that has changed."""
        self._total_steps = total_steps
        self.seek(self.steps_done)

    def slots(self) -> dict[str, Any]:
        """`optimizer/<parameter>/<slot>` -> its live state, by the same names and whole shapes whatever the plan."""
        found = {}
        for name, state in self._fused.state_dict()["state"].items():
            for slot, value in state.items():
                slot = slot.rpartition(".")[2]
                found[f"optimizer/{name}/{'sum' if slot == 'momentum1' else slot}"] = value
        for part in self._parts:
            for name, parameter in part.params.items():
                state = part.state[parameter]
                if self._is_replica(name):  # A fused kernel counts no steps, and keeps one number of a row as such.
                    state = {"sum": _flat_if_rowwise(state["sum"])} if "sum" in state else {}
                found |= {f"optimizer/{name}/{slot}": value for slot, value in state.items() if value is not None}
        return found

    def _is_replica(self, name: str) -> bool:
        table = table_of_parameter(name)
        return table is not None and self._recipe.table_update(table).name != "dense"

    def learning_rates(self) -> dict[str, float]:
        """Rates of the last step, of the first one before any: of `dense`, `tables`, and `tables/<name>` for others."""
        factor = self._schedule.factor(max(0, self.steps_done - 1), self._total_steps)
        return {name: rate * factor for name, rate in self._named_rates.items()}

    def _groups(self) -> list[dict[str, Any]]:
        return [*self._optimizer.param_groups, *self._fused.param_groups]


def build(
    model: DistributedModelParallel, embeddings: Embeddings, recipe: Recipe, total_steps: int | None = None
) -> ModelOptimizer:
    """The optimizer of a sharded model.

    Replicated tables are updated here too: those that the plan replicates by what the recipe says of tables, those
    with the optimizer `dense` like a dense layer.

    Args:
        model: The sharded model.
        embeddings: The unsharded description of its tables.
        recipe: Names the optimizers.
        total_steps: Steps of the whole run, for a schedule that ends with it.
    """
    parameters = _unfused(model)
    tables = {name: table for name in parameters if (table := table_of_parameter(name))}
    layers = {name: p for name, p in parameters.items() if name not in tables}
    optimizers = [("", _dense(layers, recipe.optimizer.dense))]
    clipped = list(layers.values())
    for name, table in tables.items():
        update, one = recipe.table_update(table), {name: parameters[name]}
        if update.name == "dense":
            clipped.append(parameters[name])
            own = {"learning_rate": update.learning_rate, "eps": update.eps, "weight_decay": 0.0}
            optimizers.append(("", _dense(one, recipe.optimizer.dense.model_copy(update=own))))
            continue
        arguments = _table_arguments(embeddings, table, update)
        kind = _REPLICATED[update.name]
        optimizers.append(("", KeyedOptimizerWrapper(one, lambda p, k=kind, a=arguments: k(p, **a))))
    parts = [part for _, part in optimizers]
    return ModelOptimizer(CombinedOptimizer(optimizers), model.fused_optimizer, recipe, clipped, total_steps, parts)


def describe(model: DistributedModelParallel, embeddings: Embeddings, recipe: Recipe) -> dict[str, Any]:
    """Who updates what, with every setting resolved, as plain data.

    Returns:
        `dense`, a mapping; `tables`, a list of mappings with a `name`; `schedule`. `updated_by` names the code.
    """
    replicated = {table for name in _unfused(model) if (table := table_of_parameter(name))}
    dense = recipe.optimizer.dense
    tables = []
    for name, _ in embeddings.table_weights():
        update, settings = recipe.table_update(name), recipe.table_settings(name)
        updated_by = "the fused kernel, in the backward pass"
        if update.name == "frozen":
            updated_by = "nobody"
        elif name in replicated:
            kind = _dense_kind(dense) if update.name == "dense" else _REPLICATED[update.name]
            updated_by = f"{kind.__name__}, on every rank"
        tables.append(
            {
                "name": name,
                "optimizer": update.name,
                "learning_rate": update.learning_rate,
                "eps": update.eps,
                "l2": 0.0 if settings.freeze else settings.l2,
                "dtype": settings.dtype,
                "updated_by": updated_by,
            }
        )
    return {
        "dense": {
            "optimizer": dense.name,
            **dense.model_dump(exclude={"name"}),
            "updated_by": f"{_dense_kind(dense).__name__}, on every rank",
        },
        "tables": tables,
        "schedule": recipe.optimizer.schedule.model_dump(),
    }


def sentences(described: Mapping[str, Any]) -> Iterator[str]:
    """What `describe` returns, for people: one sentence for the dense layers, one for each group of like tables."""
    yield f"Dense layers: {_settings(described['dense'])}"
    groups: dict[str, list[str]] = {}
    for table in described["tables"]:
        groups.setdefault(_settings(table), []).append(table["name"])
    for settings, names in groups.items():
        yield f"Table{'s' * (len(names) > 1)} {', '.join(names)}: {settings}"


def _settings(found: Mapping[str, Any]) -> str:
    hidden = ("name", "optimizer", "updated_by")
    shown = [f"{key} {value}" for key, value in found.items() if key not in hidden and value is not None]
    return f"{found['optimizer']} ({', '.join(shown)}), updated by {found['updated_by']}"


def _allocate_state(part: KeyedOptimizer) -> None:
    """State as it is before the first step, which torch makes in the first step: a checkpoint may be read before it."""
    for parameter in part.params.values():
        if isinstance(part._optimizer, torch.optim.Adam) and not part.state[parameter]:
            part.state[parameter].update(
                step=torch.zeros((), dtype=torch.float32, device=parameter.device),
                exp_avg=torch.zeros_like(parameter),
                exp_avg_sq=torch.zeros_like(parameter),
            )


def _flat_if_rowwise(state: torch.Tensor) -> torch.Tensor:
    """(rows, 1) -> the same memory as (rows,); that of every weight stays as it is."""
    return state.squeeze(1) if state.shape[1] == 1 else state


def _unfused(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not hasattr(p, "_in_backward_optimizers")}


def _named_rates(recipe: Recipe) -> dict[str, float]:
    """`dense`, `tables`, and the tables whose full rate is another one."""
    rates = {"dense": recipe.optimizer.dense.learning_rate, "tables": recipe.optimizer.sparse.learning_rate}
    for table in recipe.inputs.tables:
        if (rate := recipe.table_update(table.name).learning_rate) != rates["tables"]:
            rates[f"tables/{table.name}"] = rate
    return rates


def _table_arguments(embeddings: Embeddings, table: str, update: TableUpdate) -> dict[str, float]:
    """Constructor arguments of a table's optimizer.

    Row-wise Adagrad keeps the mean of the squared gradient over a row's width. The kernel sees the padded width;
    scaling learning rate and eps by sqrt(width / padded width) makes its step exactly that of the true width.
    """
    scale = 1.0
    if update.name == "rowwise_adagrad":
        scale = math.sqrt(embeddings.unpadded_share(table))
    arguments = {"lr": update.learning_rate * scale}
    return arguments if update.eps is None else arguments | {"eps": update.eps * scale}


def _dense_kind(settings: DenseOptimizer) -> type[torch.optim.Optimizer]:
    return torch.optim.AdamW if settings.weight_decay_mode == "decoupled" else _DENSE[settings.name]


def _dense(parameters: Mapping[str, nn.Parameter], settings: DenseOptimizer) -> KeyedOptimizer:
    arguments: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay, "fused": True}
    if settings.name != "sgd":
        arguments["eps"] = settings.eps
    kind = _dense_kind(settings)
    return KeyedOptimizerWrapper(parameters, lambda group: kind(group, **arguments))
