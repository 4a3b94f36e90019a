"""Turns a tokenizer that has no tokenizer.json (SentencePiece, tiktoken, vocab and merges) into one, in a process of its own.

`python -P -m worker.slow_tokenizer DIR` prints the tokenizer.json. transformers does the conversion; it costs seconds and a
few hundred MB that must not stay in a worker.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from tokenizers import Tokenizer


class _Converted(Protocol):
    backend_tokenizer: Tokenizer


def main(directory: Path) -> int:
    from transformers import AutoTokenizer  # seconds

    load = cast("Callable[..., object]", AutoTokenizer.from_pretrained)  # pyright: ignore[reportUnknownMemberType]  # untyped
    loaded = load(directory, local_files_only=True, trust_remote_code=False)
    if not hasattr(loaded, "backend_tokenizer"):
        print(f"{type(loaded).__name__} has no form that runs without Python code", file=sys.stderr)
        return 1
    sys.stdout.write(cast("_Converted", loaded).backend_tokenizer.to_str())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
