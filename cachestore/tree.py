"""The directory tree of a store: `<root>/v1/<fp16>-<layout16>/<hh>/<key>.safetensors`, and the marker that makes a root ours.

Owns names, modes and the atomic publish. Worker and janitor both build on it, so that what one writes the other recognises.
Directories are 0700 and files 0600: KV is readable conversation.
"""

import contextlib
import itertools
import os
import re
import secrets
import threading
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from cachestore.block import Buffer
from cachestore.keys import KV_FORMAT

MARKER = ".omlxd-cache"
FORMAT_DIR = f"v{KV_FORMAT}"
NAMESPACE_FILE = "namespace.json"
BAD_SUFFIX = ".bad"

_MARKER_TEXT = b"omlxd keeps its prefix cache here and deletes old blocks. Without this file it leaves the directory alone.\n"
_TEMPORARY_SUFFIX = ".tmp"
_BLOCK_NAME = re.compile(r"[0-9a-f]{64}s?\.safetensors(?P<bad>\.bad)?")
_SYSTEM_LITTER = frozenset({".DS_Store"})
_serial = itertools.count()
_process_token = secrets.token_hex(4)  # two containers may share a directory and a pid


class NotOurs(Exception):
    """The directory holds something else and no marker: nothing may be written or deleted there."""


class Kind(StrEnum):
    BLOCK = "block"
    TEMPORARY = "temporary"
    BAD = "bad"
    OTHER = "other"


def kind_of(name: str) -> Kind:
    if name.endswith(_TEMPORARY_SUFFIX):
        return Kind.TEMPORARY
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return Kind.OTHER
    return Kind.BAD if match["bad"] else Kind.BLOCK


def format_number(name: str) -> int | None:
    """1 for "v1"; None for what is no format directory."""
    return int(name[1:]) if re.fullmatch(r"v[0-9]{1,6}", name) else None


def namespace_dir(root: Path, fingerprint: str, layout: str) -> Path:
    return root / FORMAT_DIR / f"{fingerprint[:16]}-{layout[:16]}"


def block_path(namespace: Path, key: str) -> Path:
    return namespace / key[:2] / f"{key}.safetensors"


def is_marked(root: Path) -> bool:
    return (root / MARKER).is_file()


def claim(root: Path) -> None:
    """Makes `root` ours: creates it, or marks it when it is empty. NotOurs when it holds something else, or OSError.

    Its parent must exist: with the disk unplugged, /Volumes/Disk/cache must not come to be on the boot disk.
    """
    make_dir(root)
    if (root / MARKER).is_file():
        return
    names = {entry.name for entry in root.iterdir()}
    if MARKER in names:
        return  # claimed by another process since the line before
    if not names <= _SYSTEM_LITTER:
        raise NotOurs(f"{root} is not empty and has no {MARKER} file")
    with contextlib.suppress(FileExistsError), _create(root / MARKER) as file:
        file.write(_MARKER_TEXT)


def make_dir(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)


def publish(path: Path, buffers: Sequence[Buffer]) -> None:
    """The whole file under its name, or nothing: a kill at any moment leaves at most a temporary, which the janitor removes.

    No fsync: a file torn by a power cut fails its checksum and is a miss.
    """
    unique = f"{os.getpid()}-{threading.get_ident()}-{next(_serial)}-{_process_token}"
    temporary = path.with_name(f"{path.stem}.{unique}{_TEMPORARY_SUFFIX}")
    try:
        with _create(temporary) as file:
            for buffer in buffers:
                file.write(buffer)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _create(path: Path):
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
