"""The commands of docs/cluster.md, for the tests that run them."""

import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "cluster.md"
ON_SLURM = (
    *("scripts/slurm/cluster.sh start", "scripts/slurm/cluster.sh env", "scripts/slurm/cluster.sh stop"),
    *("torchx status slurm", "torchx log --streams stdout slurm", "torchx list -s slurm", "torchx cancel slurm"),
    *("sbatch", "squeue", "scancel"),
)
"""What test_cluster.py runs, by how it starts."""
RECIPE = "models/din/movielens-100k.yaml"


def commands() -> list[str]:
    """All of them, in order: what stands indented by four spaces."""
    return [line[4:] for line in GUIDE.read_text(encoding="utf-8").splitlines() if re.match(r" {4}\S", line)]


def words(command: str, **places: str) -> list[str]:
    """A command's words, with other values in the places that are named."""
    for name, value in places.items():
        command = command.replace(name, value)
    return shlex.split(command)


def the(start: str, containing: str = "") -> str:
    """The first command that starts so and contains that."""
    return next(command for command in commands() if command.startswith(start) and containing in command)
