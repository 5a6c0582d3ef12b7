"""Optimizers: fused ones that run inside the tables' backward pass, and torch's for the dense layers."""

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import SGD, Adagrad
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys.embedding import Embeddings, table_of_parameter
from recsys.recipe import DenseOptimizer, OptimizerSettings, SparseOptimizer

_SPARSE = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": Adagrad, "sgd": SGD}
_REPLICATED = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


def fuse(embeddings: Embeddings, settings: SparseOptimizer) -> None:
    """Give every table its optimizer, before sharding turns the two into one kernel."""
    for name, weight in embeddings.table_weights():
        _apply_optimizer_in_backward(_SPARSE[settings.name], [weight], _table_arguments(embeddings, name, settings))


def build(model: nn.Module, embeddings: Embeddings, settings: OptimizerSettings) -> KeyedOptimizer:
    """The optimizer of every parameter of a sharded model that no fused kernel updates.

    Replicated tables are among them: they follow the tables' settings, by a plain optimizer.
    """
    parameters = {name: p for name, p in model.named_parameters() if not hasattr(p, "_in_backward_optimizers")}
    replicated = {name: table for name in parameters if (table := table_of_parameter(name))}
    optimizers: list[tuple[str, KeyedOptimizer]] = [
        ("dense", _dense({n: p for n, p in parameters.items() if n not in replicated}, settings.dense))
    ]
    for name, table in replicated.items():
        arguments = _table_arguments(embeddings, table, settings.sparse)
        kind = _REPLICATED[settings.sparse.name]
        optimizers.append(
            (table, KeyedOptimizerWrapper({name: parameters[name]}, lambda p, k=kind, a=arguments: k(p, **a)))
        )
    return CombinedOptimizer(optimizers)


def _table_arguments(embeddings: Embeddings, table: str, settings: SparseOptimizer) -> dict[str, float]:
    """Constructor arguments of a table's optimizer.

    Row-wise Adagrad keeps the mean of the squared gradient over a row's width. The kernel sees the padded width;
    scaling learning rate and eps by sqrt(width / padded width) makes its step exactly that of the true width.
    """
    scale = 1.0
    if settings.name == "rowwise_adagrad":
        scale = math.sqrt(embeddings.unpadded_share(table))
    arguments = {"lr": settings.learning_rate * scale}
    return arguments if settings.name == "sgd" else arguments | {"eps": settings.eps * scale}


def _dense(parameters: Mapping[str, nn.Parameter], settings: DenseOptimizer) -> KeyedOptimizer:
    arguments = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.name != "sgd":
        arguments["eps"] = settings.eps
    kinds = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
    return KeyedOptimizerWrapper(parameters, lambda group: kinds[settings.name](group, fused=True, **arguments))
