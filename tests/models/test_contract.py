"""What every registered model promises; a new model is held to it by its registry line and CONFIGS entry."""

import copy

import pytest
import torch
import torch.fx
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recsys.models import MODELS, Batch, DeepFMConfig, DINConfig, model_class

CONFIGS = {
    "deepfm": [DeepFMConfig(hidden=(6, 4)), DeepFMConfig(hidden=(6,), activation="dice", batch_norm=True)],
    "din": [
        DINConfig(attention_hidden=(6, 4), hidden=(8, 4)),
        DINConfig(attention_hidden=(6,), hidden=(8,), attention_normalization="softmax", activation="prelu"),
    ],
}
EACH = pytest.mark.parametrize(
    "config", [c for configs in CONFIGS.values() for c in configs], ids=lambda c: f"{c.name}-{c.activation}"
)


def test_every_registered_model_is_tested_here():
    assert set(CONFIGS) == set(MODELS)


@pytest.fixture
def case(config, make_inputs, make_model, make_batch):
    """(model, function from rows to a batch)."""
    inputs = make_inputs()
    return make_model(inputs, config), lambda rows: make_batch(inputs, config.name, rows)


@EACH
def test_one_logit_per_row(case, rows):
    model, batch = case
    logits = model(batch(rows))
    assert logits.shape == (4,) and logits.dtype == torch.float32
    assert (logits < 0).any() or (logits > 1).any()  # no sigmoid inside


@EACH
def test_every_parameter_gets_a_gradient(case, rows, config):
    model, batch = case
    model.eval()  # in training, a bias before batch normalisation has the gradient 0
    (model(batch(rows)) * torch.tensor([1.0, -2.0, 3.0, 0.5])).sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # Softmax does not see a shift of all scores, so their bias may have the gradient 0.
    softmax = getattr(config, "attention_normalization", "none") == "softmax"
    assert without <= ({"interests.attentions.0.rest.2.bias"} if softmax else set())


@EACH
def test_row_order_does_not_change_a_result(case, rows):
    model, batch = case
    model.eval()
    torch.testing.assert_close(model(batch(rows[::-1])).flip(0), model(batch(rows)))


@EACH
def test_longer_neighbours_do_not_change_a_result(case, rows):
    model, batch = case
    model.eval()
    alone = torch.cat([model(batch([row])) for row in rows])
    torch.testing.assert_close(alone, model(batch(rows)))


@EACH
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("num_empty", [1, 4])
def test_empty_lists_and_histories_are_finite(case, rows, num_empty, training):
    model, batch = case
    for row in rows[:num_empty]:
        row.update(tags=[], clicked=[], clicked_category=[])
    logits = model.train(training)(batch(rows))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@EACH
def test_a_history_of_unknown_ids_differs_from_an_empty_one(case, rows):
    model, batch = case
    model.eval()
    rows[1].update(clicked=[], clicked_category=[])
    empty = model(batch(rows))[1]
    rows[1].update(clicked=[2], clicked_category=[2])  # row 2 of a table stands for ids that were never seen
    assert not torch.isclose(model(batch(rows))[1], empty)


@EACH
@pytest.mark.parametrize("num_rows", [0, 1])
def test_tail_batches_train(case, rows, num_rows):
    model, batch = case
    logits = model.train()(batch(rows[:num_rows]))
    logits.sum().backward()
    assert logits.shape == (num_rows,) and logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@EACH
def test_state_round_trips(case, rows, config, make_inputs):
    model, batch = case
    other = type(model)(make_inputs(), config)
    assert not torch.allclose(other.eval()(batch(rows)), model.eval()(batch(rows)))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(other(batch(rows)), model(batch(rows)))


class _PipelineTracer(torch.fx.Tracer):
    """Like TorchRec's pipeline tracer: collections, and modules without one inside, are leaves."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        collections = (EmbeddingBagCollection, EmbeddingCollection)
        return isinstance(m, collections) or not any(isinstance(inner, collections) for inner in m.modules())


@EACH
def test_forward_can_be_traced_with_the_batch_unknown(case, rows):
    model, batch = case
    model.eval()
    traced = torch.fx.GraphModule(model, _PipelineTracer().trace(model))
    for part in (rows, rows[:1], []):
        assert torch.equal(traced(batch(part)), model(batch(part)))


@EACH
def test_ids_reach_the_collections_as_they_come_in_the_batch(case):
    # TrainPipelineSparseDist starts the exchange of ids early only where nothing was done to them before.
    model, _ = case
    graph = _PipelineTracer().trace(model)
    lookups = [
        n
        for n in graph.nodes
        if n.op == "call_module" and n.target.startswith(("embeddings.pooled", "embeddings.sequence"))
    ]
    assert lookups
    for node in lookups:
        source, attribute = node.args[0].args
        assert source.op == "placeholder" and attribute in ("pooled", "sequence")


@EACH
def test_dense_layers_start_alike_wherever_the_tables_are(config, make_inputs):
    dense = []
    for device in (None, "meta"):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = model_class(config.name)(make_inputs(), config, table_device=device)
        dense.append({n: p for n, p in model.named_parameters() if not n.startswith("embeddings")})
        is_meta = {p.is_meta for n, p in model.named_parameters() if n.startswith("embeddings")}
        assert is_meta == {device == "meta"}
    torch.testing.assert_close(*dense)


@EACH
def test_no_dense_columns_are_needed(config, make_inputs, make_model, make_batch, rows):
    inputs = make_inputs(dense=())
    logits = make_model(inputs, config)(make_batch(inputs, config.name, rows))
    assert logits.shape == (4,)


@EACH
def test_a_step_downhill_lowers_the_loss(case, rows):
    model, batch = case
    model.eval()
    data: Batch = batch(rows)
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(data), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
