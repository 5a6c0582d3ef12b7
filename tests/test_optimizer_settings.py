"""What a recipe may say of optimizers, what is refused and in which words; that the kernels are as `SUPPORT` says."""

import pathlib
import re

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from recsys import optim, recipe_file
from recsys.check import check
from recsys.errors import UserError
from recsys.optimizer_settings import SUPPORT, TableUpdate, choices
from recsys.schedule import Schedule
from recsys.table_settings import KINDS

ROOT = pathlib.Path(__file__).parents[1]
TEXT = """
model: {name: din, hidden: [8]}
data: {train: unused}
features:
  - {kind: id, columns: [user, item, shop]}
  - {kind: history, of: {clicked_item: item}}
tables:
  default: {dim: 6, rows: 100}
  user: {optimizer: {learning_rate_factor: 1.0}}
optimizer: {sparse: {learning_rate: 0.2}, dense: {learning_rate: 0.01, eps: 1e-4}, schedule: {}}
train: {device: cpu}
"""


def update(*overrides: str, table: str = "user") -> TableUpdate:
    return recipe_file.parse(TEXT, overrides).table_update(table)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("rowwise_adagrad", 0.2, 1e-8)),
        (["tables.user.optimizer=sgd"], ("sgd", 0.2, None)),
        (["tables.user.optimizer={name: sgd, learning_rate: 3.0}"], ("sgd", 3.0, None)),
        (["tables.user.optimizer.learning_rate_factor=0.5"], ("rowwise_adagrad", 0.1, 1e-8)),
        (["tables.user.optimizer={learning_rate: 0.5, eps: 0.1}"], ("rowwise_adagrad", 0.5, 0.1)),
        (["tables.user.optimizer=dense"], ("dense", 0.01, 1e-4)),
        (["tables.user.optimizer={name: dense, learning_rate_factor: 2.0, eps: 0.1}"], ("dense", 0.02, 0.1)),
        (["tables.user.optimizer=dense", "optimizer.dense={name: sgd, learning_rate: 0.3}"], ("dense", 0.3, None)),
        (["tables.user.freeze=true"], ("frozen", 0.0, None)),
        (["tables.default.optimizer=adagrad", "tables.user={dim: 6}"], ("adagrad", 0.2, 1e-8)),
        (["optimizer.sparse.name=adam", "train.device=cuda"], ("adam", 0.2, 1e-8)),
    ],
)
def test_a_tables_own_settings_replace_the_recipes(overrides, expected):
    found = update(*overrides)
    assert (found.name, found.learning_rate, found.eps) == pytest.approx(expected)


def test_other_tables_keep_the_recipes_optimizer_and_a_resolved_recipe_reads_back():
    recipe = recipe_file.parse(TEXT, ["tables.user.optimizer=dense", "optimizer.schedule.decay=cosine"])
    assert recipe.table_update("item") == TableUpdate("rowwise_adagrad", 0.2, 1e-8)
    assert recipe_file.parse(recipe.to_yaml()) == recipe


REFUSED = {
    "a table with adam": ("tables.user.optimizer=adam", "CUDA devices only.*Allowed: rowwise_adagrad, adagrad, sgd"),
    "adam on the CPU": ("optimizer.sparse.name=adam", "tables.item.optimizer: adam trains tables on CUDA devices only"),
    "adam where a CPU may be": ("optimizer.sparse.name=adam train.device=auto", "Received: train.device=auto"),
    "lamb": ("optimizer.sparse.name=lamb", r"unknown value 'lamb'. Allowed: \['rowwise_adagrad', 'adagrad'"),
    "unknown key": ("tables.user.optimizer.lr=1", "tables.user.optimizer.lr: unknown key.*'learning_rate_factor'"),
    "two rates": ("tables.user.optimizer.learning_rate=1.0", "exclude each other"),
    "eps of sgd": ("tables.user.optimizer={name: sgd, eps: 0.1}", "tables.user.optimizer.eps: sgd reads none"),
    "eps of all sgd": ("optimizer.sparse={name: sgd, eps: 0.1}", "optimizer.sparse: `eps` has no effect"),
    "eps of dense sgd": ("optimizer.dense={name: sgd, eps: 0.1}", "optimizer.dense: `eps` has no effect"),
    "no rate": ("tables.user.optimizer.learning_rate_factor=0.0", "must be greater than 0"),
    "decoupled": ("optimizer.dense={name: sgd, weight_decay_mode: decoupled}", "needs `name: adam`"),
    "table clipping": ("optimizer.sparse.clip_norm=1.0", "holds for each lookup.*Allowed: optimizer.dense.clip_norm"),
    "a table's clipping": ("tables.user.optimizer.max_gradient=1.0", "holds for each lookup"),
    "table weight decay": ("optimizer.sparse.weight_decay=0.1", "Do: set `l2` of the table"),
    "accumulation": ("train.accumulate=2", "a step of its own. Do: raise data.batch_size_per_rank"),
    "accumulation at the top": ("gradient_accumulation_steps=2", "a step of its own"),
    "fp16 layers": ("train.precision=fp16", "needs its loss scaled.*Allowed: fp32, bf16"),
    "bf16 tables": ("tables.user.dtype=bf16", "no bf16. Allowed: fp32, fp16"),
    "fp64": ("train.precision=fp64", r"Allowed: \['fp32', 'bf16'\]"),
    "large dense": ("tables.user.optimizer=dense tables.user.rows=2_000_000", "12,000,000 weights.*up to 10,000,000"),
    "attended dense": ("tables.item.optimizer=dense", "dense needs replicas.*history.*Allowed: rowwise"),
    "dense fp16": ("tables.user.optimizer=dense tables.user.dtype=fp16", "gradients would be fp16"),
    "split dense": ("tables.user.optimizer=dense tables.user.sharding=row_wise", "on every rank.*Allowed: auto, data"),
    "replicated fp16": ("tables.user.dtype=fp16 tables.user.sharding=data_parallel", "gradients would be fp16"),
    "cut rows": ("tables.user.sharding=column_wise", "It cuts rows, of which rowwise_adagrad keeps one number"),
    "gamma without steps": ("optimizer.schedule.gamma=0.5", "`gamma` has no effect with `decay: constant`"),
    "steps without a size": ("optimizer.schedule.decay=step", "`decay: step` needs `step_size`"),
    "a fall in steps": ("optimizer.schedule={decay: step, step_size: 3, final_factor: 0.1}", "`final_factor` has no"),
    "unknown decay": ("optimizer.schedule.decay=cosin", "mean 'cosine'"),
    "unknown schedule key": ("optimizer.schedule.warm_up=3", "mean 'warmup_steps'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_the_impossible_is_refused_with_what_is_allowed(case, tmp_path):
    overrides, expected = REFUSED[case]
    overrides = re.split(r" (?=[a-z_.]+=)", overrides)
    with pytest.raises(UserError) as caught:
        recipe_file.parse(TEXT, overrides)
    assert re.search(expected, str(caught.value), re.DOTALL), str(caught.value)
    (tmp_path / "recipe.yaml").write_text(TEXT)
    (told,) = check(str(tmp_path / "recipe.yaml"), overrides)
    assert told == str(caught.value).replace("recipe has problems", f"{tmp_path}/recipe.yaml has problems")


@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
@pytest.mark.parametrize("name", [name for name in SUPPORT if name != "frozen"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("sharding", KINDS)
def test_a_recipe_takes_what_the_matrix_has_and_nothing_else(device, name, dtype, sharding):
    support = SUPPORT[name]
    possible = (
        name in choices(device)
        and dtype in support.dtypes
        and sharding not in support.excluded
        and (dtype, sharding) != ("fp16", "data_parallel")
    )
    overrides = [
        f"train.device={device}",
        f"tables.user={{dim: 6, optimizer: {name}, dtype: {dtype}, sharding: {sharding}}}",
    ]
    if possible:
        assert update(*overrides).name == name
    else:
        with pytest.raises(UserError, match="Allowed"):
            update(*overrides)


# The kernels.


def kernel(optimizer: EmbOptimType, **arguments) -> SplitTableBatchedEmbeddingBagsCodegen:
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=optimizer,
        learning_rate=1.0,
        pooling_mode=PoolingMode.SUM,
        **arguments,
    )


def test_the_cpu_kernels_have_no_adam():
    with pytest.raises(AssertionError, match="not supported in CPU"):
        kernel(EmbOptimType.ADAM)


def test_torchrec_knows_the_kernel_of_every_fused_optimizer():
    kinds = {name: optimizer_type_to_emb_opt_type(kind).value for name, kind in optim._FUSED.items()}
    assert kinds == {
        "rowwise_adagrad": "exact_row_wise_adagrad",
        "adagrad": "exact_adagrad",
        "sgd": "exact_sgd",
        "adam": "adam",
        "frozen": "exact_sgd",
    }


def test_the_cpu_kernels_have_no_bf16():
    with pytest.raises(RuntimeError, match="not implemented for 'BFloat16'"):
        kernel(EmbOptimType.EXACT_SGD, weights_precision=SparseType.BF16)(torch.tensor([1]), torch.tensor([0, 1]))


def test_the_kernels_own_limit_on_gradients_does_not_bound_the_change_of_a_row():
    table = kernel(EmbOptimType.EXACT_SGD, gradient_clipping=True, max_gradient=0.1)
    before = table.split_embedding_weights()[0].clone()
    table(torch.tensor([1, 1, 1]), torch.tensor([0, 1, 2, 3])).sum().backward()
    change = (before - table.split_embedding_weights()[0])[1]
    torch.testing.assert_close(change, torch.full((4,), 0.3))  # three lookups, 0.1 each; a bounded row moved by 0.1


def test_the_cpu_kernels_ignore_weight_decay():
    table = kernel(EmbOptimType.EXACT_SGD, weight_decay=0.5)
    table.split_embedding_weights()[0].fill_(1.0)
    (table(torch.tensor([1]), torch.tensor([0, 1])) * 0).sum().backward()
    assert table.split_embedding_weights()[0][1].tolist() == [1.0] * 4  # a decay of any mode moved it


# The schedule.


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "step"])
def test_a_schedule_is_that_of_torch(warmup, decay):
    total, final = 30, 0.2
    keys = {
        "linear": {"final_factor": final},
        "cosine": {"final_factor": final},
        "step": {"step_size": 7, "gamma": 0.5},
    }
    schedule = Schedule(warmup_steps=warmup, decay=decay, **keys.get(decay, {}))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers, length = torch.optim.lr_scheduler, total - warmup
    expected = {
        "constant": lambda: schedulers.LambdaLR(optimizer, lambda _: 1.0),
        "linear": lambda: schedulers.LinearLR(optimizer, 1.0, final, total_iters=length),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, length, eta_min=final),
        "step": lambda: schedulers.StepLR(optimizer, 7, 0.5),
    }[decay]()
    for step in range(warmup):
        assert schedule.factor(step, total) == pytest.approx((step + 1) / warmup)
    for step in range(warmup, total):
        assert schedule.factor(step, total) == pytest.approx(optimizer.param_groups[0]["lr"]), step
        optimizer.step()
        expected.step()


def test_a_fall_ends_after_its_own_steps_and_stays_there():
    schedule = Schedule(decay="linear", decay_steps=4, final_factor=0.5)
    assert [schedule.factor(step, None) for step in range(7)] == [1.0, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5]


def test_the_page_shows_the_matrix():
    rows = []
    for name, support in SUPPORT.items():
        cpu, without = "yes" if "cpu" in support.devices else "no", ", ".join(support.excluded) or "-"
        rows.append(f"| `{name}` | {cpu} | yes | {', '.join(support.dtypes)} | {support.state} | {without} |")
    text = (ROOT / "docs/optimizers.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in text
