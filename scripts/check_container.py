"""Executes the steps of docker/Dockerfile without a container engine, in a tree of Debian's packages.

    python -m scripts.check_container [--folder DIR] [--keep]

Every FROM is a tree that debootstrap makes (so the base image is Debian's own Python of the same version, not that of
the file), every RUN runs there by chroot, every COPY copies. Then, as the image's user: the health check, the image's
command and a small training on two ranks. Needs root, debootstrap, unshare, and some 6 GB; Linux only. The CPU image
alone: what a GPU needs is several GB large, and there is none here to try it with.

All of that happens in mount and process namespaces of its own. Nothing outside sees the mounts, so that removing the
trees never reaches this machine's own files through them. At the end, an error, SIGTERM and the time limit included,
no process and no tree is left; after SIGKILL the steps go on, and the trees stay.
"""

import argparse
import json
import os
import pathlib
import shlex
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
DOCKERFILE = ROOT / "docker" / "Dockerfile"
_BASE = "python:3.11-slim-bookworm"
_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
_LIMIT_S = 1800
_MOUNTS = ("/dev", "/dev/shm", "/sys")
_FILES = (pathlib.Path("/etc/resolv.conf"), pathlib.Path("/etc/hosts"))  # an engine gives both
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
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
    parser.add_argument("--folder", type=pathlib.Path, help="new one, for the trees; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="leave the trees there")
    parser.add_argument("--inside", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        return _build_and_try(options.inside)
    missing = [name for name in ("debootstrap", "unshare") if not shutil.which(name)]
    if os.geteuid() or missing:
        sys.exit("Needs root, debootstrap and unshare: apt-get install debootstrap util-linux")
    if options.folder and options.folder.exists():
        sys.exit(f"{options.folder} exists, and would be removed at the end; name a new folder")
    folder = options.folder or pathlib.Path(tempfile.mkdtemp(prefix="container-"))
    folder.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    # Python ends on SIGTERM without cleaning up, unless it is an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        inside = [sys.executable, "-m", "scripts.check_container", "--inside", str(folder.resolve())]
        code = subprocess.run([*_NAMESPACES, *inside], timeout=_LIMIT_S, cwd=ROOT).returncode
        if code:
            sys.exit(code)
        size, ours = (_megabytes(folder / "image" / part) for part in ("", "opt/recsys"))
        print(f"The image's tree has {size} MB, of which /opt/recsys {ours} MB")
    except subprocess.TimeoutExpired:
        sys.exit(f"Not done after {_LIMIT_S} s")
    finally:
        if not options.keep:
            shutil.rmtree(folder)
    print(f"All steps, the health check and a training passed in {time.monotonic() - start_s:.0f} s")


def _megabytes(path: pathlib.Path) -> int:
    return int(subprocess.check_output(["du", "-sm", path], text=True).split()[0])


def _build_and_try(folder: pathlib.Path) -> None:
    base = folder / "base"
    print(f"{_BASE} is replaced by Debian bookworm's own Python", flush=True)
    command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(base), _mirror()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)
    pip, shared = _way_to_packages()
    stages: dict[str, Tree] = {}
    tree = Tree(base, pip)
    for step in steps(DOCKERFILE.read_text(encoding="utf-8")):
        if step.name == "FROM":
            if step.words[0] != _BASE:
                raise ValueError(f"The base is {step.words[0]}; known here is {_BASE}")
            name = step.words[2] if len(step.words) > 2 else "image"
            tree = stages[name] = Tree(folder / name, pip)
            subprocess.run(["cp", "-a", base, tree.folder], check=True)
            _mount(tree.folder, shared)
            continue
        print(f"{step.name} {' '.join(step.words)[:100]}", flush=True)
        tree.execute(step, stages)
    tried = [["recsys", "--help"], ["torchrun", "--help"], ["bash", "-c", _TRAINING]]
    for command in (tree.health, tree.command, *tried):
        print(f"as user {tree.user}: {' '.join(command)[:100]}", flush=True)
        tree.run(command)
    tree.run(["bash", "-c", "test -s /shared/runs/check/metrics.json && test $(id -u) = 10001"])


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


def _mount(tree: pathlib.Path, shared: list[pathlib.Path]) -> None:
    """The kernel's file systems, and read-only what pip and the network need of this machine; for as long as we run."""
    read_only = [*shared, *_FILES]
    for source in [*map(pathlib.Path, _MOUNTS), *read_only]:
        target = tree / str(source.resolve() if source in shared else source).lstrip("/")
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif not target.exists():  # it does in a folder that is mounted already
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        subprocess.run(["mount", "--bind", source, target], check=True)
        if source in read_only:
            subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)
    # That of this process namespace, not the machine's.
    subprocess.run(["mount", "-t", "proc", "proc", tree / "proc"], check=True)


if __name__ == "__main__":
    main()
