"""A small file of what is remembered between runs: JSON, written whole or not at all, begun anew where it is damaged.

It can be thrown away, so whatever goes wrong with it is only said.
"""

import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

log = logging.getLogger("state")

T = TypeVar("T")


def read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError, RecursionError) as e:
        log.warning("%s cannot be read and is begun anew: %s", path, e)
    return None


def write(path: Path, value: object) -> None:
    """What cannot be written is only forgotten sooner."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(msgspec.json.encode(value))
        unfinished.replace(path)
    except OSError as e:
        log.warning("%s cannot be written: %s", path, e)
