"""The admin verbs about the block store: how it stands, and what the janitor is to do now."""

from collections.abc import Callable

from supervisor.protocol import Call, Code
from supervisor.store_keeper import StoreKeeper

Reply = Callable[[bytes, Call, dict[str, object]], None]
Refuse = Callable[[bytes, Call, str, str], None]


class CacheVerbs:
    def __init__(self, store: StoreKeeper, reply: Reply, refuse: Refuse) -> None:
        self._store = store
        self._reply = reply
        self._refuse = refuse
        self.verbs: dict[str, Callable[[bytes, Call], None]] = {
            "cache_stats": self._stats,
            "cache_gc": self._gc,
            "cache_clear": self._clear,
        }

    def _stats(self, who: bytes, call: Call) -> None:
        self._reply(who, call, self._store.status())

    def _gc(self, who: bytes, call: Call) -> None:
        self._order(who, call, {"do": "pass", "dry_run": call.args.get("dry_run") is True})

    def _clear(self, who: bytes, call: Call) -> None:
        model = call.args.get("model")
        if model is not None and not isinstance(model, str):
            self._refuse(who, call, Code.BAD_REQUEST, "model should be the id of a model")
            return
        self._order(who, call, {"do": "clear", "model": model})

    def _order(self, who: bytes, call: Call, order: dict[str, object]) -> None:
        def answer(report: dict[str, object] | None) -> None:
            if report is None:
                self._refuse(who, call, Code.BUSY, "there is no janitor now: the cache is off, or it is being started again")
            else:
                self._reply(who, call, report)

        self._store.order(order, answer)
