"""Where data lies: the cache's folder, and paths as recipes write them."""

import os
import pathlib

from recsys.errors import UserError


def data_home() -> pathlib.Path:
    """Folder of downloaded and prepared data: `RECSYS_DATA`, else ~/.cache/recsys."""
    return _with_home(os.environ.get("RECSYS_DATA") or "~/.cache/recsys", "set RECSYS_DATA to an absolute path")


def expand_path(path: str) -> str:
    """A path with `${RECSYS_DATA}` and `~` written out, absolute.

    Raises:
        UserError: It is the address of a remote file, or begins with a home folder that is not known.
    """
    if "://" in path:
        raise UserError("Data is read from local paths only", received=path, fix="copy it here, or mount its storage")
    if "${RECSYS_DATA}" in path:
        path = path.replace("${RECSYS_DATA}", str(data_home()))
    return str(_with_home(path, "give an absolute path").absolute())


def _with_home(path: str, fix: str) -> pathlib.Path:
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise UserError("The home folder that a path begins with is not known", received=path, fix=fix) from error
