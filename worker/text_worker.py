"""The text worker's service: counts the tokens of prompts for models that are not loaded.

Keeps the tokenizers of the last few models. Must not import an engine: it starts in a second and stays small.
"""

import asyncio
import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from supervisor.protocol import Beat, Code, Grant, ModelRef, Problem, Ready, Result, Submit, Trim, Turn
from worker.link import Host
from worker.link_gateway import GatewayLink
from worker.model_files import ModelFiles
from worker.prompt import Refused, fitted_prompt
from worker.text import ModelUnreadable, Text
from worker.volatile import Volatile, volatile_of

OPEN_MODELS = 8
"""A tokenizer of 250k entries takes about 60 MB."""
MAX_INFLIGHT = 64

_log = logging.getLogger(__name__)
Stamp = tuple[tuple[str, int, int], ...]


class TextService:
    def __init__(self, settings: Mapping[str, object], host: Host) -> None:
        self._host = host
        self.configure(settings)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._shelf = TextShelf(OPEN_MODELS)
        self._counts: dict[str, tuple[GatewayLink, asyncio.Task[None]]] = {}
        self._served = 0
        self._refusing = False
        self._silent = False

    def start(self) -> None:
        ready = Ready(context=0, weights_bytes=0, kv_bytes_per_token=0, peak_bytes=0, max_inflight=MAX_INFLIGHT, load_s=0.0)
        self._host.loaded(ready)

    def submit(self, gateway: GatewayLink, message: Submit) -> None:
        if self._silent:
            return
        problem = functools.partial(Problem, rid=message.rid, epoch=gateway.epoch)
        if self._refusing:
            gateway.send(problem(code=Code.SHUTTING_DOWN, message="the server is shutting down"))
        elif message.rid in self._counts:
            gateway.send(problem(code=Code.BAD_REQUEST, message=f"request id {message.rid!r} is already in use"))
        elif message.task != "count" or message.model is None:
            gateway.send(problem(code=Code.UNSUPPORTED, message="the text worker only counts the tokens of a named model"))
        else:
            task = asyncio.get_running_loop().create_task(self._count(gateway, message, message.model))
            self._counts[message.rid] = (gateway, task)

    def cancel(self, rid: str) -> None:
        """The answer is not sent; whatever the pool is at runs to its end."""
        if rid in self._counts:
            self._counts.pop(rid)[1].cancel()

    def drop(self, gateway: GatewayLink) -> None:
        for rid in [rid for rid, (asker, _) in self._counts.items() if asker is gateway]:
            self.cancel(rid)

    def configure(self, settings: Mapping[str, object]) -> None:
        self._volatile = volatile_of(settings)

    def beat(self, seq: int) -> Beat:
        return Beat(seq=seq, progress=self._served, running=len(self._counts))

    def grant(self, message: Grant | Turn) -> None:
        """Nothing here depends on one."""

    def trim(self, message: Trim) -> None:
        self._shelf.clear()

    def explain(self, request_id: str) -> list[str]:
        """It has no cache."""
        return []

    def refuse_new(self) -> None:
        self._refusing = True
        for rid, (gateway, task) in self._counts.items():
            task.cancel()
            message = "the server is shutting down"
            gateway.send(Problem(code=Code.SHUTTING_DOWN, message=message, rid=rid, epoch=gateway.epoch))
        self._counts.clear()

    def fall_silent(self) -> None:
        self._silent = True
        for rid in list(self._counts):
            self.cancel(rid)

    def flush(self, deadline_s: float) -> tuple[int, int]:
        return 0, 0

    async def _count(self, gateway: GatewayLink, message: Submit, model: ModelRef) -> None:
        loop, epoch = asyncio.get_running_loop(), gateway.epoch
        try:
            answer = await loop.run_in_executor(self._pool, count, self._shelf, message, model, self._volatile)
            gateway.send(Result(epoch=epoch, rid=message.rid, data=answer))
        except Refused as e:
            gateway.send(Problem(code=e.code, message=e.message, rid=message.rid, epoch=epoch))
        except Exception:  # a task's boundary: one odd model must not take the counting from the others
            _log.exception("counting for %s failed", model.id)
            gateway.send(Problem(code=Code.INTERNAL, message="counting failed", rid=message.rid, epoch=epoch))
        self._counts.pop(message.rid, None)
        self._served += 1


def count(shelf: "TextShelf", submit: Submit, model: ModelRef, volatile: Volatile) -> dict[str, object]:
    """Raises Refused, for a prompt that the model's own worker would refuse as well."""
    try:
        text = shelf.text(Path(model.path))
    except ModelUnreadable as e:
        raise Refused(Code.MODEL_UNLOADABLE, str(e)) from e
    context = min(text.context, model.context or text.context)
    return {"prompt_tokens": len(fitted_prompt(text, submit, context, volatile).ids), "context": context}


class TextShelf:
    """The tokenizers used last. A model whose files changed is opened anew. Any thread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()  # guards _texts
        self._texts: OrderedDict[tuple[Path, Stamp], Text] = OrderedDict()

    def text(self, path: Path) -> Text:
        """Raises ModelUnreadable. Two threads may open the same model at once; one of the two is kept."""
        key = (path, ModelFiles.read(path).stamp)
        with self._lock:
            text = self._texts.pop(key, None)
        text = text or Text.open(path)
        with self._lock:
            self._texts[key] = text
            while len(self._texts) > self._size:
                self._texts.popitem(last=False)
        return text

    def clear(self) -> None:
        with self._lock:
            self._texts.clear()
