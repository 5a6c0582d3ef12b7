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


def require_writable(path: pathlib.Path, data: pathlib.Path) -> None:
    """Find out before the work whether its result can be stored, and that it does not land in the data."""
    try:
        whole, is_folder = path.absolute().parent.resolve() / path.name, path.is_dir()
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written", received=str(error), fix="name another file") from error
    if data.resolve() in (whole, whole.parent):
        raise UserError(
            f"{str(path)!r} is part of the data that is read",
            received=str(data),
            allowed="a file outside of it",
            fix="name another file",
        )
    if not path.name or is_folder or not os.access(whole.parent, os.W_OK | os.X_OK):
        reason = "no right to write in" if whole.parent.is_dir() else "no such folder:"
        raise UserError(
            f"{str(path)!r} cannot be written",
            received="a folder" if is_folder else f"{reason} {whole.parent}",
            allowed="a file in a folder that exists and may be written to",
            fix="make the folder, or name another file",
        )
