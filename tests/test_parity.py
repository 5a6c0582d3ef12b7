import json
import pathlib
import subprocess
import sys

import pytest
import torch
import yaml

WORKER = pathlib.Path(__file__).parent / "_train_batches.py"
HARD_LIMIT_S = 120

FEATURES = [
    {"kind": "id", "columns": ["user", "city"]},
    {"kind": "id", "columns": ["item"]},
    {"kind": "id", "columns": ["category"]},
    {"kind": "history", "of": {"seen_items": "item", "seen_categories": "category"}},
    {"kind": "number", "columns": ["age"]},
]


def recipe(model: str, sharding: str = "row_wise", **sparse: object) -> str:
    return yaml.safe_dump(
        {
            "model": {"name": model, "hidden": [16, 8], **({"attention_hidden": [8]} if model == "din" else {})},
            "data": {"train": "unused"},
            "features": FEATURES,
            # 7 rows and 1 row: fewer than divide evenly, fewer than ranks; width 3 is padded to 4
            "tables": {
                "default": {"dim": 3, "rows": 40, "sharding": sharding, "init_std": 0.3},
                "city": {"rows": 1},
                "category": {"rows": 4},
            },
            "optimizer": {"sparse": {"learning_rate": 0.1, **sparse}, "dense": {"learning_rate": 0.01}},
        }
    )


def train(tmp_path: pathlib.Path, ranks: int, text: str, *, steps: int, cuts: tuple[int, ...] = (16,)) -> dict:
    output = tmp_path / f"{ranks}.pt"
    config = tmp_path / f"{ranks}.json"
    config.write_text(
        json.dumps({"recipe": text, "steps": steps, "global_rows": 32, "cuts": list(cuts), "output": str(output)})
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(WORKER), str(config)], capture_output=True, text=True, timeout=HARD_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(output, weights_only=True)


def assert_close(one: dict, two: dict, tolerance: float = 1e-5) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert (one[name].double() - two[name].double()).abs().max() <= tolerance, name


@pytest.mark.dist
@pytest.mark.parametrize("cut", [16, 25, 32], ids=["equal", "uneven", "empty"])
@pytest.mark.parametrize("model", ["din", "deepfm"])
def test_two_ranks_train_the_same_weights_as_one(tmp_path, model, cut):
    one = train(tmp_path, 1, recipe(model), steps=20)
    two = train(tmp_path, 2, recipe(model), steps=20, cuts=(cut,))
    assert set(two["kinds"].values()) == {"row_wise"}
    assert_close(one["before"], two["before"], 0.0)
    assert_close(one["after"], two["after"])
    for name, value in one["after"].items():
        assert name.endswith("bias") or not torch.equal(one["before"][name], value), f"{name} never moved"
