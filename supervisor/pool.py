"""What models compete for: places in the waiting line and bytes of the budget; and who must go to make room.

Counts and orders only: which worker lives, and why, is the slot machine's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiter:
    rid: str
    gateway: str
    model: str
    deadline_at: float | None
    request_hash: str
    seq: int  # order of arrival over all models
    since: float
    profile: str | None = None


class Line:
    """Requests without a lease, in order of arrival per model."""

    def __init__(self) -> None:
        self._by_model: dict[str, dict[str, Waiter]] = {}
        self._model_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._model_of)

    def __contains__(self, rid: str) -> bool:
        return rid in self._model_of

    def add(self, waiter: Waiter) -> None:
        self._by_model.setdefault(waiter.model, {})[waiter.rid] = waiter
        self._model_of[waiter.rid] = waiter.model

    def remove(self, rid: str) -> None:
        model = self._model_of.pop(rid, None)
        if model is not None:
            del self._by_model[model][rid]

    def of_model(self, model: str) -> tuple[Waiter, ...]:
        return tuple(self._by_model.get(model, {}).values())

    def of_gateway(self, gateway: str) -> tuple[Waiter, ...]:
        return tuple(waiter for waiter in self._all() if waiter.gateway == gateway)

    def length(self, model: str) -> int:
        return len(self._by_model.get(model, {}))

    def first(self, model: str) -> Waiter | None:
        return next(iter(self._by_model.get(model, {}).values()), None)

    def overdue(self, now: float) -> tuple[Waiter, ...]:
        return tuple(waiter for waiter in self._all() if waiter.deadline_at is not None and waiter.deadline_at <= now)

    def next_deadline(self) -> float | None:
        return min((waiter.deadline_at for waiter in self._all() if waiter.deadline_at is not None), default=None)

    def _all(self) -> Iterable[Waiter]:
        return (waiter for waiters in self._by_model.values() for waiter in waiters.values())


@dataclass(slots=True)
class Account:
    """What one live worker is charged, each byte once."""

    load_bytes: int
    lent_bytes: int = 0  # KV beyond what the load reserved
    hot_bytes: int = 0  # the RAM tier of its prefix cache
    excess_bytes: int = 0  # by which it was once measured above all of that

    @property
    def total_bytes(self) -> int:
        return self.load_bytes + self.lent_bytes + self.hot_bytes + self.excess_bytes


class Ledger:
    """Bytes charged per live worker. A charge is made before a worker is spawned and ends with its exit."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.missing_bytes = 0
        """Of workers that are gone: not seen to be back."""
        self._accounts: dict[str, Account] = {}

    @property
    def charged_bytes(self) -> int:
        return sum(account.total_bytes for account in self._accounts.values())

    @property
    def free_bytes(self) -> int:
        """Negative after a worker was measured above its charge, or after the budget has shrunk."""
        return self.budget_bytes - self.charged_bytes - self.missing_bytes

    def account(self, model: str) -> Account | None:
        return self._accounts.get(model)

    def charge_bytes(self, model: str) -> int:
        account = self._accounts.get(model)
        return account.total_bytes if account else 0

    def hot_bytes(self, model: str) -> int:
        account = self._accounts.get(model)
        return account.hot_bytes if account else 0

    def reserve(self, model: str, size_bytes: int) -> None:
        assert model not in self._accounts and size_bytes <= self.free_bytes
        self._accounts[model] = Account(size_bytes)

    def lend(self, model: str, size_bytes: int) -> None:
        """KV; a negative size is given back."""
        account = self._accounts[model]
        account.lent_bytes = max(0, account.lent_bytes + size_bytes)

    def set_hot(self, model: str, size_bytes: int) -> None:
        self._accounts[model].hot_bytes = size_bytes

    def raise_to(self, model: str, size_bytes: int) -> None:
        """A meter can raise a charge, never lower it."""
        account = self._accounts[model]
        account.excess_bytes += max(0, size_bytes - account.total_bytes)

    def past_peak_bytes(self, model: str, size_bytes: int) -> int:
        """What it is charged for having been larger once than `size_bytes`."""
        account = self._accounts[model]
        return min(account.excess_bytes, max(0, account.total_bytes - size_bytes))

    def forget_peak(self, model: str, size_bytes: int) -> None:
        self._accounts[model].excess_bytes -= self.past_peak_bytes(model, size_bytes)

    def release(self, model: str) -> None:
        del self._accounts[model]


@dataclass(frozen=True, slots=True)
class Victim:
    model: str
    charge_bytes: int


def choose_victims(needed_bytes: int, candidates: Sequence[Victim]) -> tuple[str, ...]:
    """The first candidates whose charges sum to the need, less those the sum does not depend on; none if all are too few."""
    chosen: list[Victim] = []
    surplus = -needed_bytes
    for candidate in candidates:
        if surplus >= 0:
            break
        chosen.append(candidate)
        surplus += candidate.charge_bytes
    if surplus < 0:
        return ()
    spared: set[str] = set()
    for victim in reversed(chosen):
        if victim.charge_bytes <= surplus:
            surplus -= victim.charge_bytes
            spared.add(victim.model)
    return tuple(victim.model for victim in chosen if victim.model not in spared)
