"""Which namespaces a store holds, from their namespace.json files: what people are shown, and where a model's blocks are.

Reads only. A namespace whose file is damaged still exists: it has a directory and blocks, and nobody's name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cachestore import tree
from cachestore.index import directories
from cachestore.store import Namespace


@dataclass(frozen=True, slots=True)
class Found:
    path: Path
    described: Namespace | None

    @property
    def model(self) -> str:
        return self.described.model if self.described else f"({self.path.name})"


def namespaces(root: Path) -> list[Found]:
    """Those of this build's format, in the order of their names."""
    return [Found(path, _described(path)) for path in sorted(directories(root / tree.FORMAT_DIR))]


def of_model(root: Path, model: str) -> list[Path]:
    return [found.path for found in namespaces(root) if found.model == model]


def _described(path: Path) -> Namespace | None:
    try:
        fields = cast("object", json.loads((path / tree.NAMESPACE_FILE).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None
    match fields:
        case {"model": str(model), "fingerprint": str(fingerprint), "layout": str(layout), "block_tokens": int(block_tokens)}:
            return Namespace(model, fingerprint, layout, block_tokens)
        case _:
            return None
