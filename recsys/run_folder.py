"""The run folder: everything that explains a run, in one place, written by rank 0."""

import contextlib
import datetime
import importlib.metadata
import json
import logging
import math
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from recsys import checkpoint
from recsys.distributed import Ranks, agreed, broadcast
from recsys.errors import UserError
from recsys.machine import usable_cores
from recsys.ownership import Ownership, require_shared
from recsys.recipe import Recipe
from recsys.recipe_file import load as load_recipe
from recsys.storage import Place

log = logging.getLogger("recsys")

CURVES = ("train_loss.jsonl", "metrics.jsonl")
"""Files that grow line by line, each with the step it belongs to."""

LOGS = "logs"
"""Folder of what each rank printed, which a launcher makes before the run begins."""

_VERSIONS = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec", "pyarrow", "numpy", "jieba", "pypinyin")


class RunFolder:
    """Paths and small writes inside one run's folder; writes happen on rank 0 only."""

    def __init__(self, path: pathlib.Path, *, writes: bool) -> None:
        self.path, self.writes = path, writes
        self.has_ended = False
        """Whether the run that is in it has nothing left to do."""
        self._owned: list[Ownership] = []

    @classmethod
    def create(cls, path: str | None, recipe: Recipe, name: str, ranks: Ranks, *, goes_on: bool = False) -> "RunFolder":
        """A new folder, or that of a run that goes on, agreed between ranks.

        Args:
            path: Where; None means `runs/<name>-<date>-<time>`, or one named by torchrun's id of the job where that
                may be restarted: each attempt must find it.
            recipe: Stored as `recipe.yaml`, resolved.
            name: The recipe's name, for the default path.
            ranks: Who we are.
            goes_on: The folder may hold a run that has not ended yet.

        Raises:
            UserError: The folder already belongs to a run, or to one that has ended; another job writes to it; or not
                all nodes see it.
        """
        if path is None and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            path = f"runs/{name}-{os.environ['TORCHELASTIC_RUN_ID']}"
        folder = pathlib.Path(path or f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
        found = cls(folder, writes=ranks.rank == 0)
        try:
            with agreed("run folder"):
                if found.writes:
                    found._own(recipe, goes_on=goes_on, is_named=path is not None)
            found.path, found.has_ended = broadcast((found.path, found.has_ended))
            require_shared(found.path, "run folder", ranks)
            kept = found.checkpoints(recipe).local_path
            if recipe.checkpoint.folder is not None and kept is not None:
                require_shared(kept, "folder of checkpoints (checkpoint.folder)", ranks)
                with agreed("checkpoint.folder"):
                    if found.writes:
                        found._owned.append(Ownership(kept))
        except BaseException:
            found.close()
            raise
        return found

    def _own(self, recipe: Recipe, *, goes_on: bool, is_named: bool) -> None:
        is_old = goes_on and (self.path / "recipe.yaml").is_file()
        if not is_old:
            self.path = _claim(self.path, recipe) if is_named else _claim_next(self.path, recipe)
        self._owned.append(Ownership(self.path))
        if is_old:
            self.has_ended = _take_over(self.path, recipe)

    def require_owned(self) -> None:
        """To be called before a checkpoint is written.

        Raises:
            UserError: Another job has taken the folder over.
        """
        for ownership in self._owned:
            ownership.require()

    def close(self) -> None:
        """Other jobs may write to the folder from now on."""
        for ownership in self._owned:
            ownership.release()

    @classmethod
    def open(cls, path: str) -> "tuple[RunFolder, Place]":
        """An existing run and a complete checkpoint of it.

        Args:
            path: A run folder (the checkpoint of its best epoch so far is taken) or a checkpoint inside one.
        """
        given = pathlib.Path(path).absolute()
        run, chosen = given, None
        if given.parent.name == "checkpoints":
            checkpoint.read_about(given)
            run, chosen = given.parent.parent, Place(given)
        if not (run / "recipe.yaml").is_file():
            raise UserError(
                f"{path!r} is not a run",
                received="no recipe.yaml there" if run.is_dir() else "no such folder",
                allowed="a run folder, or a checkpoint inside its checkpoints/",
            )
        folder = cls(run, writes=False)
        chosen = chosen or _best(folder.checkpoints(folder.recipe()))
        if chosen is None:
            raise UserError(f"The run {path!r} has no complete checkpoint", fix="train it to the end of an epoch first")
        return folder, chosen

    def recipe(self) -> Recipe:
        """The resolved recipe of the run."""
        return load_recipe(self.path / "recipe.yaml")

    @property
    def vocabularies(self) -> pathlib.Path:
        """Folder of the vocabularies that the run was trained with."""
        return self.path / "vocabulary"

    @property
    def item_counts(self) -> pathlib.Path:
        """File of the frequencies of the item column in the training data."""
        return self.path / "item_counts.parquet"

    def checkpoints(self, recipe: Recipe) -> Place:
        """Folder of the checkpoints."""
        return Place(recipe.checkpoint.folder or self.path / "checkpoints")

    @property
    def log(self) -> pathlib.Path:
        """File of everything that the run said."""
        return self.path / "log.txt"

    def write_json(self, name: str, value: Any) -> None:
        """Write one JSON file."""
        if self.writes:
            new = self.path / f".{name}"
            new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
            os.replace(new, self.path / name)  # never half of it

    def append_json(self, name: str, value: Any) -> None:
        """Add one JSON line to a file."""
        if self.writes:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(value) + "\n")

    def forget_after(self, step: int) -> None:
        """Leave out of the curves what was recorded after a step: a run that goes on from it records that anew."""
        for name in CURVES if self.writes else ():
            if (path := self.path / name).exists():
                lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
                path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Copy the log into `log.txt` for as long as the context lasts."""
        if not self.writes:
            yield
            return
        handler = logging.FileHandler(self.log, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)
            handler.close()


def _step_of(line: str) -> float:
    """The step of a recorded line; that of half a line, as a killed process leaves it, is beyond all others."""
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf


def _best(checkpoints: Place) -> Place | None:
    """The checkpoint of the best epoch so far; the newest where no epoch has ended yet."""
    whole = checkpoint.complete(checkpoints)
    if not whole:
        return None
    best = checkpoint.read_about(whole[-1]).get("progress", {}).get("best", {}).get("step")
    named = {place.name: place for place in whole}
    return named.get(checkpoint.step_name(best), whole[-1]) if best is not None else whole[-1]


def _take_over(folder: pathlib.Path, recipe: Recipe) -> bool:
    """Go on in the folder of a run; the log tells what the recipe says otherwise now.

    Returns:
        Whether the run has ended as the recipe wants it: a scheduler may start a job again that died at its very end.
    """
    before, now = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8")), recipe.resolved().to_yaml()
    if (folder / "metrics.json").exists():
        if before == yaml.safe_load(now):
            return True
        if recipe.train.epochs <= before["train"]["epochs"]:
            raise UserError(
                f"The run in {str(folder)!r} has ended",
                received=f"train.epochs={recipe.train.epochs}",
                allowed=f"more than {before['train']['epochs']}",
                fix="raise train.epochs, or name another folder with --run-dir",
            )
        (folder / "metrics.json").unlink()
    for key, old, new in _changes(before, yaml.safe_load(now)):
        log.warning("The recipe has changed since this run began: %s is %s, was %s", key, new, old)
    (folder / "recipe.yaml").write_text(now, encoding="utf-8")
    return False


def _changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _changes(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
    elif old != new:
        yield key, old, new


def _claim_next(folder: pathlib.Path, recipe: Recipe) -> pathlib.Path:
    """Take the folder, or the same name with a number behind it: two runs may start in one second."""
    first = folder
    for number in range(2, 100):
        try:
            return _claim(folder, recipe)
        except UserError:
            folder = first.with_name(f"{first.name}-{number}")
    return _claim(folder, recipe)


def _claim(folder: pathlib.Path, recipe: Recipe) -> pathlib.Path:
    """Take an empty or new folder; of two runs that try at once, one gets it."""
    problem = "The run folder {!r} already belongs to a run"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "recipe.yaml").exists() and {file.name for file in folder.iterdir()} - {LOGS}:
            problem = "The run folder {!r} is not empty"
            raise FileExistsError
        with (folder / "recipe.yaml").open("x", encoding="utf-8") as file:
            file.write(recipe.resolved().to_yaml())
        return folder
    except (FileExistsError, NotADirectoryError) as error:
        problem = problem if folder.is_dir() else "The run folder {!r} is a file, or lies in one"
        allowed = "a new or an empty folder"
        raise UserError(
            problem.format(str(folder)),
            allowed=allowed,
            fix="name another one with --run-dir, or go on with a run by --resume auto",
        ) from error
    except OSError as error:
        fix = "name another one with --run-dir"
        raise UserError(f"The run folder {str(folder)!r} cannot be written", received=str(error), fix=fix) from error


def environment(ranks: Ranks, num_threads: int) -> dict[str, Any]:
    """What a run was made with: command, versions, machine, ranks, source."""
    versions = {}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        **versions,
        "processor": _processor(),
        "cores": usable_cores(),
        "device": str(ranks.device),
        "world_size": ranks.world_size,
        "threads_per_rank": num_threads,
    }


def _processor() -> str:
    """The processor's own name where the host tells it."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()}, {names[0]}" if names else platform.machine()


def _git_commit() -> str | None:
    """The commit of the sources in use, marked when they were changed since; None outside a checkout."""
    here = pathlib.Path(__file__).parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
