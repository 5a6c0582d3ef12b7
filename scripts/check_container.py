"""Executes the steps of docker/Dockerfile without a container engine, in a tree of Debian's packages.

    python -m scripts.check_container [--folder DIR] [--keep]

Every FROM is a tree that debootstrap makes (so the base image is Debian's own Python of the same version, not that of
the file), every RUN runs there by chroot, every COPY copies. Then, as the image's user: the health check, the image's
command and a small training on two ranks. Needs root, debootstrap, and some 6 GB; Linux only. The CPU image alone: what
a GPU needs is several GB large, and there is none here to try it with.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
DOCKERFILE = ROOT / "docker" / "Dockerfile"
_BASE = "python:3.11-slim-bookworm"
_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
_LIMIT_S = 1800
_MOUNTS = ("/proc", "/dev", "/sys")
_FILES = (pathlib.Path("/etc/resolv.conf"), pathlib.Path("/etc/hosts"))  # an engine gives both
_TRAINING = (
    "python - <<'END'\n"
    "from recsys.data.prepare import prepare\n"
    "prepare('synthetic', '/shared/data', options={'rows': 600, 'users': 20, 'items': 30, 'seed': 1})\n"
    "END\n"
    "printf '%s' "
    + shlex.quote(
        json.dumps(
            {
                "model": {"name": "deepfm", "hidden": [8]},
                "data": {split: f"/shared/data/{split}" for split in ("train", "valid", "test")},
                "features": [{"kind": "id", "columns": ["user_id", "item_id"]}],
                "tables": {"default": {"dim": 4, "rows": 64}},
                "train": {"epochs": 1, "device": "cpu"},
            }
        )
    )
    + " > /shared/recipe.yaml && torchrun --standalone --nproc-per-node 2 -m recsys train /shared/recipe.yaml"
    " --run-dir /shared/runs/check"
)


class Step(NamedTuple):
    """One instruction of a Dockerfile.

    Attributes:
        name: In capitals.
        words: All after it: words, or one text for RUN and for lists; of a HEALTHCHECK its command alone.
    """

    name: str
    words: list[str]


def steps(text: str) -> list[Step]:
    """The instructions of a Dockerfile, comments and continued lines resolved; no heredocs."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "HEALTHCHECK":
            rest = rest.partition("CMD ")[2]
        whole = name == "RUN" or rest.startswith("[")
        found.append(Step(name, [rest.strip()] if whole else shlex.split(rest)))
    return found


class Tree:
    """A stage: a folder that stands for its file system, and what the instructions have set."""

    def __init__(self, folder: pathlib.Path, pip: dict[str, str]) -> None:
        self.folder, self.pip = folder, pip
        self.variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.work, self.user = "/", "0"
        self.health: list[str] = []
        self.command: list[str] = []

    def at(self, path: str) -> pathlib.Path:
        """Where a path of the stage lies on this machine."""
        return self.folder / os.path.normpath(os.path.join(self.work, path)).lstrip("/")

    def run(self, command: list[str]) -> None:
        """Run a command inside, as the user of the moment, with this machine's way to packages."""
        user = ["--userspec", f"{self.user}:{self.user}"] if self.user != "0" else []
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', self.work, *command]
        home = {"HOME": "/root" if self.user == "0" else "/home/recsys", "LANG": "C.UTF-8"}
        subprocess.run(
            ["chroot", *user, str(self.folder), *inside],
            env={**home, **self.pip, **self.variables},
            check=True,
            timeout=_LIMIT_S,
        )

    def execute(self, step: Step, stages: "dict[str, Tree]") -> None:
        """Do what one instruction says; FROM is not for a tree."""
        words = [string.Template(word).safe_substitute(self.variables) for word in step.words]
        if step.name in ("ARG", "ENV"):
            self.variables |= dict(word.partition("=")[::2] for word in words)
        elif step.name == "WORKDIR":
            self.work = words[0]
            self.at(".").mkdir(parents=True, exist_ok=True)
        elif step.name == "COPY":
            source = ROOT
            if words[0].startswith("--from="):
                source = stages[words.pop(0).removeprefix("--from=")].folder
            self._copy(source, words[:-1], words[-1])
        elif step.name == "RUN":
            self.run(["sh", "-c", step.words[0]])
        elif step.name == "USER":
            self.user = words[0]
        elif step.name == "HEALTHCHECK":
            self.health = json.loads(step.words[0])
        elif step.name == "CMD":
            self.command = json.loads(step.words[0])
        elif step.name != "LABEL":
            raise ValueError(f"{step.name} is not known here")

    def _copy(self, source: pathlib.Path, names: list[str], target: str) -> None:
        for name in names:
            given = source / name.lstrip("/")
            to = self.at(target) / given.name if len(names) > 1 else self.at(target)
            to.parent.mkdir(parents=True, exist_ok=True)
            if given.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.parquet")
                shutil.copytree(given, to, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy2(given, to)


def main(arguments: list[str] | None = None) -> None:
    """Build and try the CPU image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, help="for the trees; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="leave the trees there")
    options = parser.parse_args(arguments)
    if os.geteuid() or not shutil.which("debootstrap"):
        sys.exit("Needs root and debootstrap: apt-get install debootstrap")
    folder = options.folder or pathlib.Path(tempfile.mkdtemp(prefix="container-"))
    folder.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    try:
        _build_and_try(folder)
    finally:
        if not options.keep:
            shutil.rmtree(folder)
    print(f"All steps, the health check and a training passed in {time.monotonic() - start_s:.0f} s")


def _build_and_try(folder: pathlib.Path) -> None:
    base = folder / "base"
    print(f"{_BASE} is replaced by Debian bookworm's own Python", flush=True)
    command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(base), _mirror()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)
    pip, shared = _way_to_packages()
    stages: dict[str, Tree] = {}
    with contextlib.ExitStack() as mounts:
        tree = Tree(base, pip)
        for step in steps(DOCKERFILE.read_text(encoding="utf-8")):
            if step.name == "FROM":
                if step.words[0] != _BASE:
                    raise ValueError(f"The base is {step.words[0]}; known here is {_BASE}")
                name = step.words[2] if len(step.words) > 2 else "image"
                tree = stages[name] = Tree(folder / name, pip)
                subprocess.run(["cp", "-a", base, tree.folder], check=True)
                mounts.enter_context(_mounted(tree.folder, shared))
                continue
            print(f"{step.name} {' '.join(step.words)[:100]}", flush=True)
            tree.execute(step, stages)
        for command in (tree.health, tree.command, ["torchrun", "--help"], ["bash", "-c", _TRAINING]):
            print(f"as user {tree.user}: {' '.join(command)[:100]}", flush=True)
            tree.run(command)
        tree.run(["bash", "-c", "test -s /shared/runs/check/metrics.json && test $(id -u) = 10001"])
    size = int(subprocess.check_output(["du", "-sm", folder / "image"]).split()[0])
    ours = int(subprocess.check_output(["du", "-sm", folder / "image" / "opt" / "recsys"]).split()[0])
    print(f"The image's tree has {size} MB, of which /opt/recsys {ours} MB")


def _mirror() -> str:
    """The one that this machine's apt asks."""
    said = subprocess.check_output(["apt-get", "indextargets", "--format", "$(SITE)"], text=True)
    return said.splitlines()[0]


def _way_to_packages() -> tuple[dict[str, str], list[pathlib.Path]]:
    """This machine's settings of pip and of certificates as variables, and the local paths that they name."""
    found = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or "CERT_" in name}
    said = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    for line in said.splitlines():
        key, _, value = line.partition("=")
        scope, _, name = key.partition(".")
        if scope in ("global", "user"):
            found.setdefault(f"PIP_{name.upper().replace('-', '_')}", " ".join(value.strip("'").split("\\n")))
    words = [word for value in found.values() for word in value.split()]
    # A local index has its files beside the pages that lead to them.
    paths = [pathlib.Path(w.removeprefix("file://")).parent if "file://" in w else pathlib.Path(w) for w in words]
    return found, sorted({path for path in paths if path.is_absolute() and path.exists()})


@contextlib.contextmanager
def _mounted(tree: pathlib.Path, shared: list[pathlib.Path]) -> Iterator[None]:
    """The kernel's file systems and what pip needs of this machine, for as long as the context lasts."""
    done: list[pathlib.Path] = []
    try:
        for source in [*map(pathlib.Path, _MOUNTS), *shared, *_FILES]:
            target = tree / str(source.resolve() if source in shared else source).lstrip("/")
            if source.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            subprocess.run(["mount", "--bind", source, target], check=True)
            done.append(target)
        yield
    finally:
        for target in reversed(done):
            subprocess.run(["umount", "--lazy", target], check=True)


if __name__ == "__main__":
    main()
