"""Folders of checkpoints, on this machine's disks or behind an address such as `s3://bucket/run` (fsspec).

Nothing here renames: object stores cannot. What must appear whole is made visible by a marker file written last.
"""

import os
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from recsys.errors import UserError


class Place:
    """A folder, which need not be there yet.

    Attributes:
        url: Its address, as it was given.
    """

    def __init__(self, url: "str | os.PathLike[str] | Place") -> None:
        """Args: a path, or an address with a protocol that fsspec knows.

        Raises:
            UserError: fsspec does not know the protocol, or a package for it is missing.
        """
        self.url: str = url.url if isinstance(url, Place) else os.fspath(url)
        try:
            self._fs, self._path = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"The storage {self.url!r} cannot be used",
                received=" ".join(str(error).split()),
                fix="install the package for its protocol (s3://: s3fs, hdfs://: pyarrow and Hadoop), or correct it",
            ) from error

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "Place":
        return Place(f"{self.url.rstrip('/')}/{name}")

    def beside(self, name: str) -> "Place":
        """Another folder in the same one."""
        return Place(self.url.rstrip("/").removesuffix(self.name) + name)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self._path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def local_path(self) -> Path | None:
        """The folder where it lies on a file system of this machine; None elsewhere."""
        return Path(self._path) if self.is_local else None

    @property
    def is_local(self) -> bool:
        """Whether it lies on a file system of this machine."""
        return "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))

    def is_there(self, name: str) -> bool:
        """Whether the folder has a file of that name."""
        return bool(self._fs.isfile(self._join(name)))

    def write_text(self, name: str, text: str) -> None:
        """Write a whole file of the folder."""
        self._fs.makedirs(self._path, exist_ok=True)
        with self._fs.open(self._join(name), "wb") as file:
            file.write(text.encode())

    def read_text(self, name: str) -> str:
        """Read a file of the folder.

        Raises:
            OSError: It is not there, or cannot be read.
        """
        with self._fs.open(self._join(name), "rb") as file:
            return bytes(file.read()).decode()

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of the files right inside."""
        found = self._listed("file")
        return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"]) for entry in found}

    def folders(self) -> "list[Place]":
        """Folders right inside, sorted by name; none where this one is not there."""
        names = {entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in self._listed("directory")}
        return [self / name for name in sorted(names)]

    def make(self) -> None:
        """Make the folder and those above it."""
        self._fs.makedirs(self._path, exist_ok=True)

    def remove(self) -> None:
        """Remove it with everything inside; nothing happens where it is not there."""
        if self._fs.exists(self._path):
            self._fs.rm(self._path, recursive=True)

    def remove_file(self, name: str) -> None:
        """Remove a file of the folder, if it is there."""
        if self.is_there(name):
            self._fs.rm_file(self._join(name))

    def writer(self) -> Any:
        """What `torch.distributed.checkpoint` writes with."""
        return dcp.FileSystemWriter(self._path) if self.is_local else FsspecWriter(self.url)

    def reader(self) -> Any:
        """What it reads with."""
        return dcp.FileSystemReader(self._path) if self.is_local else FsspecReader(self.url)

    def _listed(self, kind: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._path):
            return []
        return [entry for entry in self._fs.ls(self._path, detail=True) if entry["type"] == kind]

    def _join(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"
