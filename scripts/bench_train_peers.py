"""The training step of other libraries, on batches that lie in memory. Run by scripts.bench_train in their environment.

    PYTHON_OF_THE_PEERS -m scripts.bench_train_peers PEER FOLDER

Each builds the model of FOLDER/spec.json with its own classes and trains with its own step: forward, loss, backward,
Adam over all its weights, as its trainer does (deepctr-torch has no function for one step: the body of the loop in its
`fit` is repeated here). Nothing is counted but that step: no reading, no collating, no metrics. Penalties that are on
by default are off. What differs from ours, because the library has no setting for it:

- deepctr-torch and torch-rechub give DeepFM's numbers to the tower as they are (429 inputs); FuxiCTR gives each a
  vector, as ours does (624 inputs).
- deepctr-torch's Dice does not work in its own tower, which keeps ReLU; its attention has Dice, as all others have.
- torch-rechub puts batch normalisation into every tower and attention, and has an attention of width 16 for items and
  another for categories where the others have one of width 32; its first-order part is a linear layer over the vectors.
- FuxiCTR's package has no DeepFM: its embedding, factorization machine and tower are put together here. It clips the
  gradient's norm in every step.
- All pad histories to 100 events, and all keep dense gradients and Adam's two moments for whole tables.
"""

import argparse
import json
import pathlib
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scripts.bench_train_data import (
    DEEPFM_HIDDEN,
    DIN_ATTENTION,
    DIN_HIDDEN,
    MAX_HISTORY,
    NUM_NUMBERS,
    read_arrays,
)
from scripts.contest import median, open_channel, peak_bytes, serve, timed

NUM_BATCHES = 8
_NUMBERS = [f"I{n + 1}" for n in range(NUM_NUMBERS)]
_LEARNING_RATE = 1e-3
Step = Callable[[int], Any]


def main() -> None:
    """Build the peer's model and answer how fast it trains."""
    channel = open_channel()
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=sorted(PEERS))
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    spec = json.loads((options.folder / "spec.json").read_text())
    num_rows = spec["batch_rows"]
    arrays = read_arrays(options.folder, min(NUM_BATCHES * num_rows, spec["data_rows"] // num_rows * num_rows))
    columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
    batches = [
        {name: column[start : start + num_rows] for name, column in columns.items()}
        for start in range(0, len(columns["label"]), num_rows)
    ]
    # Histories count from 1, as 0 is their padding.
    sizes = {name: rows + (spec["model"] == "din") for name, rows in spec["tables"].items()}
    torch.manual_seed(1)
    step = PEERS[options.peer][spec["model"]](sizes, spec["dim"], batches)

    def train(seconds: float) -> dict[str, float]:
        step_s = median(timed(lambda n: step(n % len(batches)), seconds=seconds, least=3))
        return {"step_s": step_s, "rows_per_s": median([num_rows / step_s]), "peak_bytes": peak_bytes()}

    serve(channel, {"train": train})


# deepctr-torch


def _deepctr_deepfm(sizes: dict[str, int], dim: int, batches: list[dict[str, Tensor]]) -> Step:
    from deepctr_torch.inputs import DenseFeat, SparseFeat
    from deepctr_torch.models import DeepFM

    columns = [SparseFeat(name, rows, embedding_dim=dim) for name, rows in sizes.items()]
    columns += [DenseFeat(name, 1) for name in _NUMBERS]
    model = DeepFM(columns, columns, dnn_hidden_units=DEEPFM_HIDDEN, l2_reg_linear=0, l2_reg_embedding=0)
    return _deepctr_step(model, batches)


def _deepctr_din(sizes: dict[str, int], dim: int, batches: list[dict[str, Tensor]]) -> Step:
    from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat
    from deepctr_torch.models import DIN

    columns: list[Any] = [SparseFeat(name, rows, embedding_dim=dim) for name, rows in sizes.items()]
    histories = {"hist_item_id": "items", "hist_category_id": "categories"}
    for name in histories:
        target = name.removeprefix("hist_")
        shared = SparseFeat(name, sizes[target], embedding_dim=dim, embedding_name=target)
        columns.append(VarLenSparseFeat(shared, maxlen=MAX_HISTORY, length_name="length"))
    model = DIN(
        columns,
        ["item_id", "category_id"],
        dnn_use_bn=True,
        dnn_hidden_units=DIN_HIDDEN,
        att_hidden_size=DIN_ATTENTION,
        l2_reg_embedding=0,
    )
    renamed = [{name: batch[histories.get(name, name)] for name in [*batch, *histories]} for batch in batches]
    return _deepctr_step(model, renamed)


def _deepctr_step(model: Any, batches: list[dict[str, Tensor]]) -> Step:
    model.compile("adam", "binary_crossentropy")
    names = list(model.feature_index)
    inputs = [torch.cat([batch[name].float().view(len(batch[name]), -1) for name in names], dim=1) for batch in batches]
    labels = [batch["label"] for batch in batches]
    model.train()

    def step(n: int) -> None:
        y_pred = model(inputs[n]).squeeze(-1)
        model.optim.zero_grad()
        loss = model.loss_func(y_pred, labels[n], reduction="sum")
        total = loss + model.get_regularization_loss() + model.aux_loss
        loss.item(), total.item()
        total.backward()
        model.optim.step()

    return step


# torch-rechub


def _rechub_deepfm(sizes: dict[str, int], dim: int, batches: list[dict[str, Tensor]]) -> Step:
    from torch_rechub.basic.features import DenseFeature, SparseFeature
    from torch_rechub.models.ranking import DeepFM

    ids = [SparseFeature(name, rows, dim) for name, rows in sizes.items()]
    numbers = [DenseFeature(name) for name in _NUMBERS]
    tower = {"dims": list(DEEPFM_HIDDEN), "dropout": 0.0, "activation": "relu"}
    return _rechub_step(DeepFM(numbers + ids, ids, tower), batches)


def _rechub_din(sizes: dict[str, int], dim: int, batches: list[dict[str, Tensor]]) -> Step:
    from torch_rechub.basic.features import SequenceFeature, SparseFeature
    from torch_rechub.models.ranking import DIN

    user = SparseFeature("user_id", sizes["user_id"], dim)
    item, category = (SparseFeature(name, sizes[name], dim, padding_idx=0) for name in ("item_id", "category_id"))
    histories = [
        SequenceFeature(name, sizes[target], dim, pooling="concat", shared_with=target, padding_idx=0)
        for name, target in (("items", "item_id"), ("categories", "category_id"))
    ]
    model = DIN([user], histories, [item, category], {"dims": list(DIN_HIDDEN)}, {"dims": list(DIN_ATTENTION)})
    return _rechub_step(model, batches)


def _rechub_step(model: Any, batches: list[dict[str, Tensor]]) -> Step:
    from torch_rechub.trainers import CTRTrainer

    trainer = CTRTrainer(model, optimizer_params={"lr": _LEARNING_RATE}, device="cpu")
    pairs = [({k: v for k, v in batch.items() if k not in ("label", "length")}, batch["label"]) for batch in batches]

    def step(n: int) -> None:
        trainer.train_one_epoch([pairs[n]])  # Its loop over the batches of a loader, here over one.

    return step


# FuxiCTR


def _fuxi_map(features: dict[str, dict[str, Any]], dim: int) -> Any:
    from fuxictr.features import FeatureMap

    feature_map = FeatureMap("bench", tempfile.gettempdir())
    feature_map.features = OrderedDict(features)
    feature_map.labels, feature_map.default_emb_dim = ["label"], dim
    feature_map.num_fields = feature_map.get_num_fields()
    feature_map.set_column_index()
    return feature_map


_FUXI = {
    "optimizer": "adam",
    "loss": "binary_crossentropy",
    "learning_rate": _LEARNING_RATE,
    "metrics": ["AUC"],
    "model_root": tempfile.gettempdir(),
    "verbose": 0,
    "gpu": -1,
}


def _fuxi_deepfm(sizes: dict[str, int], dim: int, batches: list[dict[str, Tensor]]) -> Step:
    from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
    from fuxictr.pytorch.models import BaseModel

    class DeepFM(BaseModel):
        def __init__(self, feature_map: Any) -> None:
            super().__init__(feature_map, "DeepFM", **{k: v for k, v in _FUXI.items() if k != "learning_rate"})
            self.embedding_layer = FeatureEmbedding(feature_map, dim)
            self.fm = FactorizationMachine(feature_map)
            self.mlp = MLP_Block(feature_map.sum_emb_out_dim(), list(DEEPFM_HIDDEN), output_dim=1)
            self.compile(_FUXI["optimizer"], _FUXI["loss"], _LEARNING_RATE)
            self.reset_parameters()
            self.model_to_device()

        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            x = self.get_inputs(inputs)
            vectors = self.embedding_layer(x)
            logit = self.fm(x, vectors) + self.mlp(vectors.flatten(start_dim=1))
            return {"y_pred": self.output_activation(logit)}

    features: dict[str, dict[str, Any]] = {name: {"type": "numeric", "source": ""} for name in _NUMBERS}
    features |= {n: {"type": "categorical", "source": "", "vocab_size": rows} for n, rows in sizes.items()}
    return _fuxi_step(DeepFM(_fuxi_map(features, dim)), batches)


def _fuxi_din(sizes: dict[str, int], dim: int, batches: list[dict[str, Tensor]]) -> Step:
    from model_zoo.LongCTR.DIN.DIN import DIN

    features = {
        name: {
            "type": "categorical",
            "source": "user" if name == "user_id" else "item",
            "vocab_size": rows,
        }
        for name, rows in sizes.items()
    }
    model = DIN(
        _fuxi_map(features, dim),
        dnn_hidden_units=list(DIN_HIDDEN),
        dnn_activations="Dice",
        attention_hidden_units=list(DIN_ATTENTION),
        attention_hidden_activations="Dice",
        embedding_dim=dim,
        batch_norm=True,
        **_FUXI,
    )
    inputs = []
    for batch in batches:
        items = {  # The history with the candidate behind it, all rows one after another.
            target: torch.cat([batch[history], batch[target][:, None]], dim=1).flatten()
            for target, history in (("item_id", "items"), ("category_id", "categories"))
        }
        inputs.append(({"user_id": batch["user_id"], "label": batch["label"]}, items, batch["items"] > 0))
    return _fuxi_step(model, inputs)


def _fuxi_step(model: Any, inputs: list[Any]) -> Step:
    model._max_gradient_norm, model._batch_index = 10.0, 0  # What its `fit` sets before it trains.
    model.train()

    def step(n: int) -> None:
        model.train_step(inputs[n]).item()

    return step


PEERS: dict[str, dict[str, Callable[[dict[str, int], int, list[dict[str, Tensor]]], Step]]] = {
    "deepctr-torch": {"deepfm": _deepctr_deepfm, "din": _deepctr_din},
    "torch-rechub": {"deepfm": _rechub_deepfm, "din": _rechub_din},
    "FuxiCTR": {"deepfm": _fuxi_deepfm, "din": _fuxi_din},
}

if __name__ == "__main__":
    main()
