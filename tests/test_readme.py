import os
import pathlib
import re
import subprocess
import sys

import pytest

from recsys.data import movielens
from recsys.errors import UserError
from scripts import render_results

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.S | re.M)


def test_results_in_the_readme_and_the_cards_are_those_that_were_measured():
    assert render_results.drift() == [], "run: python -m scripts.render_results"


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "python"])
def test_python_of_the_readme_runs(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.dist
@pytest.mark.parametrize("code", [c for lang, c in BLOCKS if lang == "bash" and not c.startswith("make")])
def test_commands_of_the_readme_run_without_error_or_warning(code, tmp_path):
    """One epoch instead of all, run folders aside, everything else as it stands there."""
    try:
        movielens.fetch()
    except UserError as error:
        pytest.skip(str(error))
    code = code.replace("source .venv/bin/activate\n", "").replace(".venv/bin/", "").replace("runs/", f"{tmp_path}/")
    code = re.sub(r"^(.*torchrun .* train .*)$", r"\1 train.epochs=1", code, flags=re.M)
    # A reader's shell has no such variable; the commands must be quiet without it.
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=ROOT,
        env={**environment, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not re.search(r"\b[Ww]arning", done.stderr + done.stdout)
    assert "Traceback" not in done.stderr
    assert "run.py:" not in done.stderr + done.stdout  # torchrun's banner about threads
