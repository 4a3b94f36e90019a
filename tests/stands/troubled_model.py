"""A tiny model whose own code does what a broken device would, once per word in its file `trouble`: nothing, or an error."""

from __future__ import annotations

import json
from pathlib import Path

from tests.stands.models import tiny_model

HANG, FAIL, GPU = "hang", "fail", "gpu"
CODE = """
import time
from pathlib import Path

from mlx_lm.models.llama import Model as Llama
from mlx_lm.models.llama import ModelArgs

TROUBLE = Path(__file__).parent / "trouble"
METAL = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"


class Model(Llama):
    def __call__(self, *args, **kwargs):
        words = TROUBLE.read_text().split() if TROUBLE.exists() else []
        if words:
            TROUBLE.write_text(" ".join(words[1:]))
            stand_still() if words[0] == "hang" else fail(METAL if words[0] == "gpu" else "the device went away")
        return super().__call__(*args, **kwargs)


def stand_still():
    time.sleep(600)


def fail(why):
    raise RuntimeError(why)
"""


def troubled_model(path: Path) -> Path:
    """Loads only with `trust_remote_code`."""
    tiny_model(path)
    config = json.loads((path / "config.json").read_text()) | {"model_file": "troubled.py"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "troubled.py").write_text(CODE)
    return path


def make_trouble(path: Path, *words: str) -> None:
    (path / "trouble").write_text(" ".join(words))
