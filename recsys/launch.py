"""TorchX components: one command from a laptop to a cluster, and nothing queued that cannot work.

    torchx run -s SCHEDULER recsys/launch.py:train --recipe RECIPE -j NODESxPROCESSES [KEY=VALUE ...]

Where the package is installed, `recsys.train` names the same component from any folder. What a component starts is
torchrun with `-m recsys`; docs/cluster.md has complete commands for each scheduler, and the same without TorchX.
"""

import datetime
import os
import random
import re
import secrets
import shlex
from pathlib import Path
from typing import NamedTuple

from torchx import specs
from torchx.components import dist
from torchx.specs.finder import ComponentValidationException

from recsys.check import check as problems_of
from recsys.errors import UserError
from recsys.recipe_file import load

_NAME = re.compile(r"[a-z][a-z0-9-]{0,19}")  # Kubernetes takes 63 characters for job, role and replica together
_PORTS = range(20_000, 29_000)  # below those that Linux hands out itself
_PLAIN = re.compile(r"[\w./:@%+=-]*")
_JOIN_TIMEOUT_S = 900  # nodes of one job may get their images and names minutes apart
_HEAD_OF_TORCHX = ":=localhost}"
_HEAD_OR_END = ":?is not set: the scheduler has not told which node of the job is the first}"


def train(
    *overrides: str,
    recipe: str,
    j: str = "1x1",
    name: str | None = None,
    run_dir: str | None = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,  # noqa: N803  TorchX's own word
    h: str | None = None,
    max_restarts: int = 3,
    max_retries: int = 0,
    env: dict[str, str] | None = None,
    interface: str | None = None,
    image: str = "",
    mounts: list[str] | None = None,
    rdzv_port: int = 0,
    log_level: str = "WARNING",
    check_data: bool = True,
) -> specs.AppDef:
    """Train a recipe with torchrun; a job that is started again goes on from its newest checkpoint.

    Args:
        overrides: KEY=VALUE of the recipe, as for `recsys train`
        recipe: file, as the nodes see it from the job's working folder
        j: NODESxPROCESSES, such as 2x8: processes on each node, one for each GPU
        name: of the job: small letters, digits, dashes, 20 at most; default: from the recipe's path
        run_dir: run folder, on storage that all nodes share; default: runs/NAME-DATE-TIME-xxxx here, not in containers
        cpu: cores of a node; 0: two for each process
        gpu: GPUs of a node; at least as many as processes
        memMB: memory of a node; 0: nothing is asked for
        h: named resource of TorchX, in place of cpu, gpu and memMB
        max_restarts: how often torchrun starts all processes again inside the running job
        max_retries: how often the scheduler runs the whole job again (slurm, kubernetes)
        env: environment variables, NAME=VALUE,NAME=VALUE
        interface: network interface of gloo and NCCL; default: that of the route to the first node
        image: container image; unused by local_cwd and slurm
        mounts: of containers, such as type=volume,src=CLAIM,dst=/shared
        rdzv_port: port of the rendezvous on the first node; 0: a random one, so that jobs on one host do not meet
        log_level: of torchrun
        check_data: whether data and run folder are looked at before the job is queued; not where only nodes see them
    """
    with _Refusals():
        given = list(overrides)
        _check(recipe, given, check_data)
        name = _checked_name(name, recipe)
        now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        if run_dir is None and (image or mounts):
            raise UserError(
                "The run folder of a container has no default: its own disk ends with it",
                received="image or mounts, and no run_dir",
                fix="name one on mounted storage with --run_dir",
            )
        folder = str(Path(run_dir or f"runs/{name}-{now}").absolute())
        if check_data:
            _require_writable(Path(folder))
        job = _Job(name, j, cpu, gpu, memMB, h, env, interface, image, mounts, rdzv_port, log_level)
        arguments = ["train", recipe, *given, "--run-dir", folder, "--resume", "auto"]
        return job.app(arguments, f"{folder}/logs", max_restarts, max_retries)


def evaluate(
    run: str,
    j: str = "1x1",
    data: str | None = None,
    json: str | None = None,
    name: str = "evaluate",
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,  # noqa: N803
    h: str | None = None,
    env: dict[str, str] | None = None,
    interface: str | None = None,
    image: str = "",
    mounts: list[str] | None = None,
    rdzv_port: int = 0,
    log_level: str = "WARNING",
    check_data: bool = True,
) -> specs.AppDef:
    """Metrics of a trained model on any number of nodes.

    Args:
        run: run folder, or a checkpoint inside one, as the nodes see it
        j: NODESxPROCESSES, such as 2x8: processes on each node, one for each GPU
        data: parquet file or folder; default: the recipe's test set
        json: file that the metrics are written to as well
        name: of the job: small letters, digits, dashes, 20 at most
        cpu: cores of a node; 0: two for each process
        gpu: GPUs of a node; at least as many as processes
        memMB: memory of a node; 0: nothing is asked for
        h: named resource of TorchX, in place of cpu, gpu and memMB
        env: environment variables, NAME=VALUE,NAME=VALUE
        interface: network interface of gloo and NCCL; default: that of the route to the first node
        image: container image; unused by local_cwd and slurm
        mounts: of containers, such as type=volume,src=CLAIM,dst=/shared
        rdzv_port: port of the rendezvous on the first node; 0: a random one, so that jobs on one host do not meet
        log_level: of torchrun
        check_data: whether run and data are looked at before the job is queued; not where only the nodes see them
    """
    with _Refusals():
        run = str(Path(run).absolute())
        for path in (run, data) if check_data else ():
            if path is not None and not Path(path).exists():
                raise UserError("There is no such file or folder", received=path, fix="correct the path")
        options = [f"--{key}={value}" for key, value in (("data", data), ("json", json)) if value is not None]
        job = _Job(_checked_name(name, ""), j, cpu, gpu, memMB, h, env, interface, image, mounts, rdzv_port, log_level)
        return job.app(["evaluate", run, *options])


def _check(recipe: str, overrides: list[str], check_data: bool) -> None:
    if not check_data:
        load(recipe, overrides)
    elif problems := problems_of(recipe, overrides):
        raise UserError(f"{recipe} cannot be trained", received="; ".join(problems), fix="see `recsys check`")


def _require_writable(folder: Path) -> None:
    """The launchers make it, whose own errors are no help."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError("The run folder cannot be made", received=str(folder), fix="name another one with --run_dir")


class _Refusals:
    """A mistake of the user's, in the words of TorchX: one message before anything is queued, and exit code 1."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UserError):
            raise ComponentValidationException(f"Error: {error}") from None


class _Job(NamedTuple):
    """What both components are asked for; the names are those of their arguments."""

    name: str
    j: str
    cpu: int
    gpu: int
    memory_mb: int
    h: str | None
    env: dict[str, str] | None
    interface: str | None
    image: str
    mounts: list[str] | None
    rdzv_port: int
    log_level: str

    def app(
        self, arguments: list[str], logs: str | None = None, max_restarts: int = 0, max_retries: int = 0
    ) -> specs.AppDef:
        """TorchX's torchrun component, with what it leaves to its caller."""
        nodes, processes = _nodes_and_processes(self.j)
        for key, number in (
            ("max_restarts", max_restarts),
            ("max_retries", max_retries),
            ("rdzv_port", self.rdzv_port),
        ):
            if not 0 <= number < 2**16:
                raise UserError(f"{key} cannot be", received=number, allowed="0 to 65535", fix=f"correct --{key}")
        cpu = self.cpu or 2 * processes
        env = {"PET_MAX_RESTARTS": str(max_restarts)}  # the component has no argument for it, and torchrun reads PET_*
        if logs is not None:
            env["RECSYS_LOGS"] = logs
        env |= self._environment()
        # Slurm's srun no longer takes over what sbatch was asked for, and binds all ranks of a node to one core then.
        os.environ["SRUN_CPUS_PER_TASK"] = str(cpu)
        app = dist.torchrun(
            m="recsys",
            image=self.image,
            name=f"/{self.name}",
            h=self.h,
            cpu=cpu,
            gpu=self.gpu,
            j=self.j,
            env={key: value for key, value in env.items() if _PLAIN.fullmatch(value)},
            max_retries=max_retries,
            rdzv_port=self.rdzv_port or random.choice(_PORTS),
            rdzv_conf=f"join_timeout={_JOIN_TIMEOUT_S},timeout={_JOIN_TIMEOUT_S},read_timeout=300",
            mounts=self.mounts,
        )
        (role,) = app.roles
        role.name = self.name.replace("-", "")  # Volcano makes a variable's name of it; Slurm shows it as the job's
        if role.resource.gpu > 0 and processes > role.resource.gpu:
            raise UserError(
                "More processes on a node than GPUs",
                received=f"-j {self.j}, {role.resource.gpu} GPUs",
                allowed="one process for each GPU",
                fix="ask for more with --gpu, or for fewer processes with -j",
            )
        if self.h is None:
            role.resource.memMB = self.memory_mb  # TorchX would ask for 1 GB in place of nothing
        flag, torchrun = role.args
        if nodes > 1:
            assert torchrun.count(_HEAD_OF_TORCHX) == 1, f"TorchX has changed how it names the first node: {torchrun}"
            torchrun = torchrun.replace(_HEAD_OF_TORCHX, _HEAD_OR_END)
        exports = [f"{key}={_quoted(value)}" for key, value in env.items() if not _PLAIN.fullmatch(value)]
        if logs is not None:
            exports.append(f"PET_LOG_DIR={_quoted(logs)}/`uname -n`")
        export = f"export {' '.join(exports)}; " if exports else ""
        role.args = [flag, f"{export}exec {torchrun} {' '.join(map(_quoted, arguments))}"]
        return app

    def _environment(self) -> dict[str, str]:
        """Variables of all nodes; what the user gives comes last."""
        found = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "LOGLEVEL": self.log_level}
        if self.interface is not None:
            found |= {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
        for key in self.env or {}:
            if not re.fullmatch(r"[A-Za-z_]\w*", key):
                raise UserError(
                    "env names a variable that cannot be",
                    received=key,
                    allowed="NAME=VALUE,NAME=VALUE",
                    fix="correct --env",
                )
        return found | (self.env or {})


def _quoted(argument: str) -> str:
    """One word of bash, in which nobody on the way there finds a `$NAME`, `${NAME}`, `$(NAME)` or `$$` of his own."""
    return shlex.quote(argument).replace("$", "$''")


def _nodes_and_processes(j: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", j)
    if match is None:
        raise UserError("-j is no NODESxPROCESSES", received=j, allowed="such as 1x2 or 4x8", fix="say both numbers")
    return int(match[1]), int(match[2])


def _checked_name(name: str | None, recipe: str) -> str:
    if name is None:
        path = Path(recipe)
        plain = re.sub(r"[^a-z0-9]+", "-", f"{path.absolute().parent.name}-{path.stem}".lower()).strip("-")
        name = re.sub(r"^[^a-z]+", "", plain)[:20].strip("-") or "train"
    if not _NAME.fullmatch(name) or name.endswith("-"):
        raise UserError(
            "The name of the job cannot be",
            received=name,
            allowed="small letters, digits and dashes, a letter first, 20 at most",
            fix="correct --name",
        )
    return name
