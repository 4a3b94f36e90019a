"""The import process: `python -P -m worker.gguf_import --source FILE --models-dir DIR --name NAME --dtype auto`.

It turns one GGUF into one MLX model directory, all or nothing, and reports on stdout, one JSON object per line: progress
`{stage, done, total}`, at last `{"stage": "done", …}` or `{"error": {code, message}}`. Exit 65: this file cannot be imported;
1: anything else. The rules of each step live in the other gguf modules.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from supervisor.child import settle_in
from worker.gguf import GgufFile, ImportRefused, open_gguf
from worker.gguf_check import greedy_sample, has_gpu
from worker.gguf_config import generation_config, model_config
from worker.gguf_names import architecture, plan_tensors
from worker.gguf_shards import weights_bytes, write_weights
from worker.gguf_staging import Staging
from worker.gguf_tensors import Policy, choose_layout
from worker.gguf_tokenizer import build_tokenizer, named_templates, tokenizer_config

EXIT_REFUSED = 65
EXIT_FAILED = 1
EXIT_TERMINATED = 128 + signal.SIGTERM
SPARE_BYTES = 64 << 20  # left free on the disk, for the small files and everybody else

Stage = Literal["read", "tensors", "tokenizer", "write", "check", "done"]


@dataclass(frozen=True, slots=True)
class Request:
    source: Path
    models_dir: Path
    name: str
    dtype: Literal["auto"] | Policy
    lifeline_fd: int | None


def main() -> None:
    request = _parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _terminate)
    try:
        import_model(request)
    except ImportRefused as refusal:
        sys.exit(_fail(EXIT_REFUSED, refusal.code, refusal.message))
    except OSError as error:
        sys.exit(_fail(EXIT_FAILED, "io_error", f"{error.filename or request.models_dir}: {error.strerror or error}."))
    except Exception as error:  # the process boundary
        traceback.print_exc()
        sys.exit(_fail(EXIT_FAILED, "import_failed", f"{type(error).__name__}: {error}"))


def _terminate(_number: int, _frame: FrameType | None) -> None:
    sys.exit(EXIT_TERMINATED)  # unwinds, so that the hidden directory goes


def import_model(request: Request) -> None:
    with Staging(request.models_dir, request.name) as staging:
        if request.lifeline_fd is not None:
            settle_in(request.lifeline_fd, on_orphaned=staging.discard)
        _say("read", 0, 1)
        file = open_gguf(request.source)
        architecture(file)
        _say("read", 1, 1)
        dtype, size_bytes = _write_model(file, request, staging.path)
        _say("check", 0, 1)
        sample = greedy_sample(staging.path)
        _say("check", 1, 1)
        path = staging.publish()
    _emit({"stage": "done", "done": 1, "total": 1, "path": str(path), "dtype": dtype, "bytes": size_bytes, "sample": sample})


def _write_model(file: GgufFile, request: Request, directory: Path) -> tuple[str, int]:
    """Cheap refusals come first: nothing is converted for a model whose names or tokenizer do not fit."""
    plan = plan_tensors(file)
    on_gpu = has_gpu()
    policy: Policy = request.dtype if request.dtype != "auto" else ("keep" if on_gpu else "float32")
    layout = choose_layout(plan, policy, on_gpu)
    size_bytes = weights_bytes(plan, layout)
    _require_space(directory, size_bytes)
    _say("tokenizer", 0, 1)
    build_tokenizer(file).save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(file))
    _write_templates(directory, file)
    _say("tokenizer", 1, 1)
    write_weights(directory, plan, layout, progress=lambda done: _say("tensors", done, len(plan)))
    _say("write", 0, 1)
    _write_json(directory / "config.json", model_config(file, layout))
    _write_json(directory / "generation_config.json", generation_config(file))
    _say("write", 1, 1)
    return ("keep" if layout.packed_bits else layout.dtype), size_bytes


def _require_space(directory: Path, size_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < size_bytes + SPARE_BYTES:
        raise OSError(0, f"the model needs {size_bytes:,} bytes and {free_bytes:,} are free", str(directory.parent))


def _write_templates(directory: Path, file: GgufFile) -> None:
    """Templates beside the default one have a directory, and then the default has to be a file too."""
    templates = named_templates(file)
    if not templates:
        return
    default = file.text("tokenizer.chat_template")
    if default is not None:
        (directory / "chat_template.jinja").write_text(default, encoding="utf-8")
    home = directory / "additional_chat_templates"
    home.mkdir()
    for name, text in templates.items():
        (home / f"{Path(name).name}.jinja").write_text(text, encoding="utf-8")


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _say(stage: Stage, done: int, total: int) -> None:
    _emit({"stage": stage, "done": done, "total": total})


def _emit(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def _fail(status: int, code: str, message: str) -> int:
    _emit({"error": {"code": code, "message": message}})
    return status


def _parse(arguments: list[str]) -> Request:
    parser = argparse.ArgumentParser(prog="worker.gguf_import", description="Import a GGUF file as an MLX model directory.")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--models-dir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--dtype", choices=["auto", "float32", "float16", "bfloat16", "keep"], default="auto")
    parser.add_argument("--lifeline-fd", type=int)
    parsed = parser.parse_args(arguments)
    return Request(parsed.source, parsed.models_dir, parsed.name, parsed.dtype, parsed.lifeline_fd)


if __name__ == "__main__":
    main()
