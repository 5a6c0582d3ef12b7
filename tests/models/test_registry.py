import ast
import subprocess
import sys

import pytest
import torch

import recsys.models
from recsys.errors import UserError
from recsys.models import MODELS, DeepFMConfig, DINConfig, build, model_class


def test_importing_the_registry_and_the_settings_loads_no_torch():
    code = "import sys, recsys.models, recsys.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_every_name_leads_to_the_class_that_its_settings_build(make_inputs):
    for config in (DINConfig(hidden=(4,)), DeepFMConfig(hidden=(4,))):
        model = build(make_inputs(), config, table_device="meta")
        assert type(model) is model_class(config.name)
        assert MODELS[config.name].endswith(f":{type(model).__name__}")


def test_exported_names_exist():
    assert all(hasattr(recsys.models, name) for name in recsys.models.__all__)
    with pytest.raises(AttributeError, match="Transformer"):
        recsys.models.Transformer  # noqa: B018


@pytest.mark.parametrize(("name", "hint"), [("DIN", "did you mean 'din'"), ("depfm", "'deepfm'"), ("xyz", "choose")])
def test_an_unknown_name_is_an_error_that_shows_the_near_ones(name, hint):
    with pytest.raises(UserError, match=hint):
        model_class(name)


def test_the_notebook_example_runs_and_is_short():
    example = recsys.models.__doc__.split("\n\n    ", 1)[1].rsplit("\n\n", 1)[0].replace("\n    ", "\n")
    assert len(ast.unparse(ast.parse(example)).splitlines()) < 10
    names: dict = {}
    exec(example, names)
    assert names["probabilities"].shape == (2,)
    assert ((names["probabilities"] > 0) & (names["probabilities"] < 1)).all()
    names["probabilities"].sum().backward()
    assert all(isinstance(p.grad, torch.Tensor) for p in names["model"].parameters())
