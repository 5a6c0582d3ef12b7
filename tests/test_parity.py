import json
import pathlib
import subprocess
import sys

import pytest
import torch
import yaml

from recsys import models, recipe_file
from recsys.data.batch import Batch
from recsys.embedding import table_of_parameter
from tests._train_batches import FEATURES, random_rows, run

WORKER = pathlib.Path(__file__).parent / "_train_batches.py"
HARD_LIMIT_S = 120


def recipe(model: str, **sparse: object) -> str:
    return yaml.safe_dump(
        {
            "model": {"name": model, "hidden": [16, 8], **({"attention_hidden": [8]} if model == "din" else {})},
            "data": {"train": "unused"},
            "features": FEATURES,
            # 7 rows and 1 row: fewer than divide evenly, fewer than ranks; width 3 is padded to 4
            "tables": {
                "default": {"dim": 3, "rows": 40, "sharding": "row_wise", "init_std": 0.3},
                "city": {"rows": 1},
                "category": {"rows": 4},
            },
            "optimizer": {"sparse": {"learning_rate": 0.1, **sparse}, "dense": {"learning_rate": 0.01}},
        }
    )


CUTS = {"equal": 16, "uneven": 25, "empty": 32}


def config(text: str, steps: int, output: pathlib.Path, cut: int = 16) -> dict:
    return {"recipe": text, "steps": steps, "global_rows": 32, "cuts": [cut], "output": str(output)}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[tuple[str, str], dict]:
    """(model, name of a cut) -> weights before and after, on two real ranks in one launch."""
    folder = tmp_path_factory.mktemp("trained")
    jobs = {(model, name): folder / f"{model}-{name}.pt" for model in ("din", "deepfm") for name in CUTS}
    configs = [config(recipe(model), 20, output, CUTS[name]) for (model, name), output in jobs.items()]
    (folder / "configs.json").write_text(json.dumps(configs))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(WORKER), str(folder / "configs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HARD_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {job: torch.load(output, weights_only=True) for job, output in jobs.items()}


@pytest.fixture
def one_rank(tmp_path):
    """`one_rank(recipe, steps)`: weights before and after, in this process."""

    def train(text: str, steps: int) -> dict:
        run(config(text, steps, tmp_path / "weights.pt"))
        return torch.load(tmp_path / "weights.pt", weights_only=True)

    return train


def assert_close(one: dict, two: dict, tolerance: float = 1e-5) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert (one[name].double() - two[name].double()).abs().max() <= tolerance, name


@pytest.mark.dist
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("model", ["din", "deepfm"])
def test_two_ranks_train_the_same_weights_as_one(one_rank, two_ranks, model, cut):
    one, two = one_rank(recipe(model), 20), two_ranks[model, cut]
    assert set(two["kinds"].values()) == {"row_wise"}
    assert_close(one["before"], two["before"], 0.0)
    assert_close(one["after"], two["after"])
    for name, value in one["after"].items():
        assert name.endswith("bias") or not torch.equal(one["before"][name], value), f"{name} never moved"


def test_the_tables_follow_plain_rowwise_adagrad_of_their_unpadded_width(one_rank):
    """Width 5 with its first-order weight is stored as 8; the update must be the one of the formula for 6 columns."""
    text = recipe("deepfm", eps=1e-3).replace("dim: 3", "dim: 5")
    found = one_rank(text, 3)
    parsed = recipe_file.parse(text)
    torch.manual_seed(parsed.train.seed)
    model = models.build(parsed.inputs, parsed.model)
    model.load_state_dict(
        {
            name: torch.nn.functional.pad(value, (0, state.shape[1] - value.shape[1])) if state.dim() == 2 else value
            for name, state in model.state_dict().items()
            for value in [found["before"]["model." + name]]
        }
    )
    tables = {n: p for n, p in model.named_parameters() if table_of_parameter(n)}
    dense = torch.optim.Adam([p for n, p in model.named_parameters() if n not in tables], lr=0.01)
    squares = {name: torch.zeros(len(table)) for name, table in tables.items()}
    rows_of = {name: parsed.inputs.table_of(name).rows for name in parsed.layout.pooled}
    for step in range(3):
        rows = random_rows(parsed.layout, rows_of, list(parsed.inputs.history_columns), 32, seed=step)
        batch = Batch.from_lists(parsed.layout, rows["ids"], dense=rows["dense"], labels=rows["labels"])
        model.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
        dense.step()
        with torch.no_grad():
            for name, table in tables.items():
                gradient = table.grad[:, :6]  # 5 columns of the vector and the first-order weight
                squares[name] += gradient.square().mean(1)
                table[:, :6] -= 0.1 * gradient / (squares[name].sqrt() + 1e-3).unsqueeze(1)
    for name, value in model.state_dict().items():
        width = found["after"]["model." + name].shape[-1] if value.dim() == 2 else None
        assert (value[..., :width] - found["after"]["model." + name]).abs().max() < 1e-5, name
