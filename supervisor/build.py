"""Which build this process is: peers of different builds do not work together; an upgrade may happen under a running server."""

import importlib.metadata
from functools import cache


@cache
def build() -> str:
    return importlib.metadata.version("omlxd")
