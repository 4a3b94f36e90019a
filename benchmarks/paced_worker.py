"""A worker without a model, in a process of its own: every stream gets one token at each beat, all of them in one message, as
an engine's step sends them. `python -m benchmarks.paced_worker DATA_SOCKET IDENTITY TOKENS_PER_S`
"""

import asyncio
import itertools
import sys
from pathlib import Path

from supervisor.protocol import Cancel, Piece, Row, Rows, Submit, Usage
from tests.stands.scripted_worker import ScriptedWorker

WORDS = (" the", " house", " of", " many", " stories", ",", " and", " then")
PROMPT_TOKENS = 7


class Beats:
    """Its streams and how far each has come."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[Submit, int]] = {}

    async def begin(self, worker: ScriptedWorker, submit: Submit) -> None:
        worker.accept(submit, PROMPT_TOKENS)
        self._live[submit.rid] = (submit, 0)

    def beat(self, worker: ScriptedWorker) -> None:
        for cancel in worker.all(Cancel):
            self._live.pop(cancel.rid, None)
        worker.received.clear()
        if not self._live:
            return
        epoch = next(iter(self._live.values()))[0].epoch
        rows = [_row(submit, done) for submit, done in self._live.values()]
        self._live = {rid: (submit, done + 1) for rid, (submit, done) in self._live.items() if done + 1 < _wanted(submit)}
        worker.send(Rows(epoch=epoch, rows=rows))


async def serve(data: Path, identity: str, tokens_per_s: float) -> None:
    beats = Beats()
    worker = ScriptedWorker(data, identity, beats.begin)
    await worker.join_until_welcome()
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number in itertools.count(1):
        beats.beat(worker)
        await asyncio.sleep(max(0.0, began + number / tokens_per_s - loop.time()))


def _row(submit: Submit, done: int) -> Row:
    is_last = done + 1 == _wanted(submit)
    return Row(
        rid=submit.rid,
        seq=done,
        tokens=done + 1,
        pieces=[Piece(text=WORDS[done % len(WORDS)])],
        finish="length" if is_last else None,
        usage=Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=done + 1) if is_last else None,
    )


def _wanted(submit: Submit) -> int:
    return submit.max_tokens or 1


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
