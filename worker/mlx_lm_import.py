"""mlx_lm as a worker needs it: without the tokenizers of transformers and the downloads of huggingface_hub.

mlx_lm's package imports both, for functions that a worker never calls: our tokenizers are `worker.text`'s, our models are
directories. That was 0.8 of the 1.0 s of CPU and 38 of the 74 MB that the import takes, in every worker and at every load. So
while mlx_lm is imported their names stand for themselves, and whoever uses one after all gets the real one then.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Generator
from types import ModuleType

LATER = ("transformers", "transformers.tokenization_utils_base", "huggingface_hub")
"""The modules that mlx_lm 0.32.2 names when it is imported."""


@contextlib.contextmanager
def tokenizers_later() -> Generator[None]:
    """For imports of mlx_lm, on whatever thread makes them first; nobody else may import the same libraries meanwhile."""
    standing_in = {name: _stand_in(name) for name in LATER if name.partition(".")[0] not in sys.modules}
    sys.modules.update(standing_in)
    try:
        yield
    finally:
        for name in standing_in:
            del sys.modules[name]


def _stand_in(module_name: str) -> ModuleType:
    module = ModuleType(module_name)

    def named(name: str) -> "_Later":
        if name.startswith("__"):  # what the import machinery and `typing` ask of any module or class
            raise AttributeError(name)
        return _Later(name, (), {"__module__": module_name, "register": _not_registered})

    module.__dict__["__getattr__"] = named
    return module


def _not_registered(*_: object, **__: object) -> None:
    """mlx_lm adds a tokenizer class of its own to transformers' when it is imported."""


class _Later(type):
    """A class or function of a module that is imported when the first use is made of it."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(cls), name)

    def __call__(cls, *args: object, **kwargs: object) -> object:
        return _real(cls)(*args, **kwargs)


def _real(later: type) -> Callable[..., object]:
    return getattr(importlib.import_module(later.__module__), later.__name__)
