"""Who may still write how much to the block store, so that its cap holds at every moment: Σ credits + bytes on disk ≤ cap.

Pure. What is on disk is known only from the janitor's looks, and each is old when it arrives: a write counts as credit until a
look that began after the worker had reported it settled, and a dead worker's credit until a look that began after its death.
"""

from collections import deque
from dataclasses import dataclass, field

CREDIT_MOST_BYTES = 4 * 2**30
"""Of one worker: some seconds of prefill on a fast machine."""
RESERVE_BYTES = 16 * 4096
"""What a worker may write without credit: the store's marker, its namespace's directories and description."""
STARTS = 32
"""Workers that may start before the next look, each with a reserve, even if all else is granted …"""
STARTS_SHARE = 16
"""… but no more of the cap than this part."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`high_bytes` is what the janitor keeps the store under; what lies between it and the cap is there to be granted."""

    cap_bytes: int
    high_bytes: int
    min_free_bytes: int


@dataclass(frozen=True, slots=True)
class Look:
    """What the janitor saw and left behind. `began` is on the ledger's clock; None for a store that is not there."""

    began: float
    disk_bytes: int | None
    free_bytes: int


@dataclass(slots=True)
class Account:
    """One worker process. `settled_bytes` is the credit spent on writes that are over, `seen_bytes` what of it a look saw."""

    granted_bytes: int = 0
    settled_bytes: int = 0
    seen_bytes: int = 0
    died_at: float | None = None
    reports: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    @property
    def hand_bytes(self) -> int:
        """What the worker may still write, as far as it has reported."""
        return self.granted_bytes - self.settled_bytes

    @property
    def charged_bytes(self) -> int:
        return self.granted_bytes - self.seen_bytes

    def look(self, began: float) -> None:
        while self.reports and self.reports[0][0] <= began:
            self.seen_bytes = self.reports.popleft()[1]


class Credits:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._look: Look | None = None
        self._accounts: dict[str, Account] = {}

    # What happened

    def open(self, worker: str) -> None:
        """A process that may write from now on. `worker` names it for good, beyond its death."""
        self._accounts.setdefault(worker, Account())

    def settled(self, worker: str, total_bytes: int, now: float) -> None:
        """The worker says how much credit its finished writes have taken since its start; it was so before `now`."""
        account = self._accounts[worker]
        if total_bytes > account.settled_bytes:
            account.settled_bytes = min(total_bytes, account.granted_bytes)
            account.reports.append((now, account.settled_bytes))

    def died(self, worker: str, now: float) -> None:
        self._accounts[worker].died_at = now

    def looked(self, look: Look) -> None:
        if self._look is not None and look.began < self._look.began:
            return
        self._look = look
        for worker, account in list(self._accounts.items()):
            if account.died_at is not None and account.died_at <= look.began:
                del self._accounts[worker]
            else:
                account.look(look.began)

    # What follows

    @property
    def disk_bytes(self) -> int | None:
        """As of the last look."""
        return self._look.disk_bytes if self._look else None

    @property
    def available_bytes(self) -> int:
        """What may be granted on top of all that is granted. Nothing before the first look."""
        if self._look is None:
            return 0
        charged_bytes = self._reserved_bytes + sum(account.charged_bytes for account in self._accounts.values())
        if self._look.disk_bytes is None:  # it may come back as full as it was ever left
            return max(0, self.limits.cap_bytes - self.limits.high_bytes - charged_bytes)
        room_bytes = self.limits.cap_bytes - self._look.disk_bytes
        return max(0, min(room_bytes, self._look.free_bytes - self.limits.min_free_bytes) - charged_bytes)

    @property
    def _reserved_bytes(self) -> int:
        """Never granted: a worker that starts cannot be asked to wait until there is room for its reserve."""
        held_bytes = min(STARTS * RESERVE_BYTES, self.limits.cap_bytes // STARTS_SHARE)
        return max(held_bytes, len(self._accounts) * RESERVE_BYTES)

    def account(self, worker: str) -> Account | None:
        return self._accounts.get(worker)

    def top_up(self, worker: str) -> int:
        """Grants that worker its share of what is left, once it has used half of it; returns the bytes to add."""
        account = self._accounts[worker]
        live = self._live()
        # One share more than there are workers: whoever starts next finds something.
        shared_bytes = self.available_bytes + sum(each.hand_bytes for each in live)
        share_bytes = min(CREDIT_MOST_BYTES, shared_bytes // (len(live) + 1))
        if account.died_at is not None or account.hand_bytes > share_bytes // 2:
            return 0
        more_bytes = max(0, min(share_bytes - account.hand_bytes, self.available_bytes))
        account.granted_bytes += more_bytes
        return more_bytes

    @property
    def needs_a_look(self) -> bool:
        """Someone runs short, and a look would find credit that was used up since the last one, or whose holder is dead."""
        live = self._live()
        fair_bytes = min(CREDIT_MOST_BYTES, (self.limits.cap_bytes - self.limits.high_bytes) // (len(live) + 1))
        short = any(account.hand_bytes < fair_bytes // 2 for account in live)
        return short and any(each.died_at is not None or each.reports for each in self._accounts.values())

    def _live(self) -> list[Account]:
        return [account for account in self._accounts.values() if account.died_at is None]
