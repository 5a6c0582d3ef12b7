"""The container recipe, as far as it can be judged without an engine; `scripts.check_container` executes its steps."""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from scripts.check_container import _BASE, DOCKERFILE, Tree, main, steps

ROOT = pathlib.Path(__file__).parent.parent
STEPS = steps(DOCKERFILE.read_text())


def of(name: str) -> list[list[str]]:
    return [step.words for step in STEPS if step.name == name]


def last_stage() -> list[tuple[str, list[str]]]:
    start = max(number for number, step in enumerate(STEPS) if step.name == "FROM")
    return [(step.name, step.words) for step in STEPS[start:]]


def test_instructions_are_read_with_continued_lines_and_without_comments():
    text = '# a\nFROM x AS y\nRUN one \\\n  # inside\n  && two\nENV A=1 \\\n    B="c d"\nCMD ["p", "q r"]\n'
    assert [tuple(step) for step in steps(text)] == [
        ("FROM", ["x", "AS", "y"]),
        ("RUN", ["one    && two"]),
        ("ENV", ["A=1", "B=c d"]),
        ("CMD", ['["p", "q r"]']),
    ]


def test_stages_start_from_one_pinned_base_with_a_python_that_the_package_takes():
    assert {words[0] for words in of("FROM")} == {_BASE}
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", _BASE)
    minor = int(_BASE.split(":3.")[1].split("-")[0])
    low, high = map(
        int, re.findall(r"3\.(\d+)", re.search(r"python_requires = (.*)", (ROOT / "setup.cfg").read_text())[1])
    )
    assert low <= minor < high


def test_versions_come_from_the_same_files_as_those_of_the_set_up_and_builds_of_fbgemm_are_not_mixed():
    (torch,) = [words[0] for words in of("RUN") if "requirements/gpu.txt" in words[0]]
    gpu, cpu = torch.split("else")
    assert 'if [ "$DEVICE" = gpu ]' in gpu and "pip install -r requirements/gpu.txt" in gpu and "cpu.txt" not in gpu
    assert "--no-deps" in cpu and "requirements/cpu.txt" in cpu
    for index in re.findall(r"https://\S+", torch):
        assert index in (ROOT / "Makefile").read_text()
    for words in of("RUN"):
        assert not re.search(r"pip install.*[a-z]==\d", words[0]), "versions stand in requirements/ alone"
    for name in ("requirements/cpu.txt", "requirements/gpu.txt", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        assert (ROOT / name).is_file()


def test_the_image_runs_as_a_user_with_a_number_and_has_a_health_check():
    names = [name for name, _ in last_stage()]
    (user,) = [words for name, words in last_stage() if name == "USER"]
    assert user[0].isdecimal() and int(user[0]) > 0
    assert not {"RUN", "COPY"} & set(names[names.index("USER") :]), "nothing is installed after that"
    assert "HEALTHCHECK" in names and "ENTRYPOINT" not in names


def test_the_package_comes_with_its_extras_at_the_versions_of_the_device():
    (package,) = [words[0] for words in of("RUN") if ".[" in words[0]]
    words = shlex.split(package)
    assert words[words.index("-c") + 1] == "requirements/$DEVICE.txt"
    assert set(words[-1].removeprefix(".[").removesuffix("]").split(",")) == {"launch", "text"}


def test_commands_of_the_environment_are_found_and_their_output_is_not_held_back():
    variables = dict(word.split("=", 1) for name, words in last_stage() if name == "ENV" for word in words)
    (environment,) = [words[-1] for name, words in last_stage() if name == "COPY" and words[0].startswith("--from")]
    assert variables["PATH"].split(":")[0] == f"{environment}/bin"
    assert variables["PYTHONUNBUFFERED"] == "1"


def test_the_health_check_passes_here():
    (words,) = [words for name, words in last_stage() if name == "HEALTHCHECK"]
    tree = Tree(pathlib.Path("/"), {})
    tree.execute(next(step for step in STEPS if step.name == "HEALTHCHECK"), {})
    assert tree.health[0] == "python", words
    subprocess.run([sys.executable, *tree.health[1:]], check=True, timeout=120)


def test_what_git_ignores_and_what_the_image_does_not_need_stays_out_of_the_build():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*", "only what is named goes in"
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {name.split("/")[0] for words in of("COPY") if not words[0].startswith("--from") for name in words[:-1]}
    assert kept == copied
    assert not any((ROOT / name).name.startswith(".") for name in kept)
    assert "**/*.parquet" in lines and "**/__pycache__" in lines


@pytest.mark.parametrize("word", ["password", "token", "secret", "apikey", "api_key"])
def test_no_secret_is_asked_for_by_the_build(word):
    assert word not in DOCKERFILE.read_text().lower()


def test_commands_of_the_recipe_are_words_that_a_shell_understands():
    for words in of("RUN"):
        subprocess.run(["bash", "-n", "-c", words[0]], check=True)
        assert shlex.split(words[0])


HADOLINT = shutil.which("hadolint", path=pathlib.Path(sys.executable).parent)


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_the_linter_of_dockerfiles_finds_nothing():
    done = subprocess.run([HADOLINT, "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_folder_that_exists_is_refused_and_left_alone(tmp_path, monkeypatch):
    (tmp_path / "mine").touch()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: name)
    with pytest.raises(SystemExit, match="name a new folder"):
        main(["--folder", str(tmp_path)])
    assert (tmp_path / "mine").exists()
