"""Looks at the machine's memory every second, and sooner when the slot machine asks; pressure.py judges what it sees.

Also keeps the evidence for who was killed for memory. What pressure does to models is decided by the slot machine.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from supervisor import machine_memory, policy
from supervisor import slot_events as slots
from supervisor.budget import BudgetSum, Tier, gib
from supervisor.meters import Meters, differs
from supervisor.pressure import ACTIVE_SHARES, Gauge, Level, Limits, Reading
from supervisor.protocol import EventKind
from supervisor.settings_load import Loaded

log = logging.getLogger("memory")

LOOK_EVERY_S = 1.0
SOON_S = 0.1
KILLED_LATELY_S = 10.0


class WatchShell(Protocol):
    """What the watch needs of the supervisor around it."""

    loaded: Loaded
    meters: Meters
    budget: BudgetSum

    def happened(self, event: slots.SlotEvent) -> None: ...
    def publish(self, kind: EventKind, data: dict[str, object]) -> None: ...
    def memory_now(self) -> dict[str, object]: ...


class MemoryWatch:
    def __init__(self, shell: WatchShell) -> None:
        self._shell = shell
        self._gauge = Gauge(
            Limits(shell.budget.total_bytes, shell.budget.tree_limit_bytes), policy.thresholds(shell.loaded.settings)
        )
        self._wanted = asyncio.Event()
        self._level = Level.NONE
        self._kills: deque[tuple[float, int]] = deque()
        self._told: dict[str, object] = {}

    async def keep(self) -> None:
        while True:
            looked_at = time.monotonic()
            try:
                self._look(looked_at)
            except Exception:  # without readings the budget stays what it is: no reason for the server to end
                log.exception("the machine's memory could not be read")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), LOOK_EVERY_S)
            # Where looks take long and each asks for the next, others have their turn all the same.
            await asyncio.sleep(max(0.0, looked_at + SOON_S - time.monotonic()))
            self._wanted.clear()

    def look_soon(self) -> None:
        self._wanted.set()

    def killed_lately(self) -> bool:
        """Whether a process that has just been killed may have been killed for memory.

        Where the system counts such deaths there is a new one, elsewhere memory is short.
        """
        kills = machine_memory.paging().oom_kills
        if kills is None:
            return self._level >= Level.HARD
        return any(before < kills for _, before in self._kills)

    def _look(self, now: float) -> None:
        paging = machine_memory.paging()
        if paging.oom_kills is not None:
            self._kills.append((now, paging.oom_kills))
        while self._kills and now - self._kills[0][0] > KILLED_LATELY_S:
            self._kills.popleft()
        settings = self._shell.loaded.settings
        self._gauge.marks = policy.thresholds(settings)
        tree = self._shell.meters.tree_now()
        reading = Reading(
            total_bytes=self._shell.budget.total_ram_bytes,
            available_bytes=machine_memory.available_bytes(ACTIVE_SHARES[Tier(settings.memory.memory_tier)]),
            tree_bytes=tree.tree_bytes,
            own_bytes=tree.own_bytes,
            private_bytes=tree.private_bytes,
            swapped_out_bytes=paging.swapped_out_bytes,
            swap_used_bytes=paging.swap_used_bytes,
            kernel=machine_memory.kernel_level(),
        )
        verdict = self._gauge.read(reading, now)
        self._level = verdict.level
        self._shell.happened(
            slots.MemoryRead(
                verdict.level,
                verdict.because,
                verdict.budget_bytes,
                verdict.budget_because,
                verdict.over_bytes,
                verdict.outside_bytes,
                tree.workers,
            )
        )
        self._tell()

    def said(self, data: Mapping[str, object]) -> None:
        """What the slot machine has to say about memory, for the log; the figures follow by themselves."""
        if "pressure" in data:
            level = logging.INFO if data["pressure"] == "none" else logging.WARNING
            log.log(level, "memory pressure: %s%s", data["pressure"], f" ({data['reason']})" if data["reason"] else "")
        elif isinstance(missing_bytes := data.get("missing_bytes"), int):
            log.warning(
                "%s of what %s held is not back %g s after the exit; the next load does without it",
                gib(missing_bytes),
                " and ".join(map(str, data["of"])) if isinstance(data["of"], list) else data["of"],  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
                data["after_s"],
            )
        self._shell.publish(EventKind.SERVER, {"memory": dict(data), **self._shell.memory_now()})

    def _tell(self) -> None:
        """What reads like before to a hundredth is no news."""
        now = self._shell.memory_now()
        if any(
            _is_news(now[key], self._told.get(key, 0)) for key in ("budget_bytes", "missing_bytes", "weights_bytes", "pressure")
        ):
            self._told = now
            self._shell.publish(EventKind.SERVER, now)


def _is_news(value: object, told: object) -> bool:
    return differs(value, told) if isinstance(value, int) and isinstance(told, int) else value != told
