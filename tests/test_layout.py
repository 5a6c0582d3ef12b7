import ast
import configparser
import os
import re
import typing
from pathlib import Path

import pytest
import setuptools

from recsys.models import MODELS, ModelConfig

ROOT = Path(__file__).parent.parent
CODE = sorted((ROOT / "recsys").rglob("*.py"))
GENERATED = {".git", ".hypothesis", ".venv", "__pycache__", "build", "dist", "runs", "shared"}


def files() -> list[Path]:
    """Everything that could be committed."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            f for f in folders if f not in GENERATED and not f.endswith(("_cache", ".egg-info", ".hypothesis"))
        ]
        found += [Path(folder) / name for name in names]
    return found


def test_every_model_has_one_code_file_one_zoo_folder_and_one_test():
    names = set(MODELS)
    code = {p.stem for p in (ROOT / "recsys/models").glob("*.py")} - {"__init__", "config"}
    assert {name for name in code if not name.startswith("_")} == names
    assert {p.name for p in (ROOT / "models").iterdir() if p.is_dir()} == names
    assert names <= {p.stem.removeprefix("test_") for p in (ROOT / "tests/models").glob("test_*.py")}
    for name in names:
        assert (ROOT / "models" / name / "README.md").is_file()
        assert list((ROOT / "models" / name).glob("*.yaml"))


def test_every_registered_model_has_the_settings_that_a_recipe_needs():
    settings = typing.get_args(typing.get_args(ModelConfig)[0])
    assert {kind.model_fields["name"].default for kind in settings} == set(MODELS)


def test_zoo_opens_with_where_the_classes_are():
    assert "recsys/models/" in "".join((ROOT / "models/README.md").read_text().splitlines(keepends=True)[:5])


@pytest.mark.parametrize("folder", ["models", "data"])
def test_top_level_folders_of_cards_hold_no_code(folder):
    assert (ROOT / folder).is_dir()
    assert list((ROOT / folder).rglob("*.py")) == []


def test_nothing_imports_the_scripts():
    for path in CODE:
        assert not re.search(r"^\s*(from|import) scripts\b", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize("path", CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_readable_in_one_sitting(path):
    text = path.read_text()
    assert text.isascii()
    assert len(text.splitlines()) <= 400
    # The training loop is read top to bottom.
    limit = 80 if path.name == "train.py" else 60
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < limit, f"{path.name}: {node.name} is too long"


def test_code_parses_on_the_oldest_supported_python():
    for path in CODE:
        ast.parse(path.read_text(), feature_version=(3, 10))


def test_no_file_exceeds_250_kilobytes():
    assert [str(p) for p in files() if p.stat().st_size > 250_000] == []


def test_the_only_packaged_top_level_name_is_recsys():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    include = setup["options.packages.find"]["include"].split()
    packages = set(setuptools.find_packages(str(ROOT), include=include))
    assert {name.split(".")[0] for name in packages} == {"recsys"}
    # A folder of code without __init__.py would be left out of the wheel.
    assert packages == {".".join(p.parent.relative_to(ROOT).parts) for p in CODE}


def test_readme_shows_every_top_level_folder():
    text = (ROOT / "README.md").read_text()
    for path in ROOT.iterdir():
        if (
            path.is_dir()
            and path.name not in GENERATED
            and not path.name.startswith(".")
            and path.suffix != ".egg-info"
        ):
            assert f"    {path.name}/" in text, f"README's tree lacks {path.name}/"


def test_every_make_target_that_the_readme_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^\s*make ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named and named <= targets
