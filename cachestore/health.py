"""Whether the store's directory can be used, and when to look again.

A state machine over (observation, now): no files, no clock. A cache that cannot be used is never an error for a request; it is
a state that `status` shows, warned of once and looked at again.
"""

import errno
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Trouble(StrEnum):
    MISSING = "missing"
    NOT_OURS = "not_ours"
    UNREADABLE = "unreadable"
    READ_ONLY = "read_only"
    FULL = "full"
    IO_ERROR = "io_error"


_NOTHING_TO_READ = frozenset({Trouble.MISSING, Trouble.NOT_OURS, Trouble.UNREADABLE})
_WRITE_TROUBLE = {
    errno.ENOSPC: Trouble.FULL,
    errno.EDQUOT: Trouble.FULL,
    errno.EROFS: Trouble.READ_ONLY,
    errno.EACCES: Trouble.READ_ONLY,
    errno.EPERM: Trouble.READ_ONLY,
    errno.ENOENT: Trouble.MISSING,
}
# No descriptor, no memory, or something odd where this one block should go.
_NOT_ITS_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOTDIR, errno.EISDIR})


@dataclass(frozen=True, slots=True)
class Health:
    """No trouble: all works. A store that cannot be written may still be read."""

    trouble: Trouble | None = None
    detail: str = ""

    @property
    def can_read(self) -> bool:
        return self.trouble not in _NOTHING_TO_READ

    @property
    def can_write(self) -> bool:
        return self.trouble is None


def of_write_error(error: OSError) -> Health | None:
    """What a failed write says about the directory; None when it says nothing."""
    if error.errno in _NOT_ITS_FAULT:
        return None
    return Health(_WRITE_TROUBLE.get(error.errno or 0, Trouble.IO_ERROR), str(error))


class Vigil:
    """What was last observed. A failed write cannot be re-checked by looking: after each pause one write is let through."""

    def __init__(self, recheck_s: float) -> None:
        self.recheck_s: Final = recheck_s
        self.health = Health(Trouble.MISSING, "not looked at yet")
        self._look_at = float("-inf")
        self._seen_in_write = False
        self._trial = False

    def look_due(self, now: float) -> bool:
        """True once per pause: the caller then looks and calls `looked`."""
        if now < self._look_at:
            return False
        self._look_at = now + self.recheck_s
        return True

    def looked(self, health: Health) -> bool:
        """True when the state changed."""
        if health.trouble is None and self._seen_in_write and self.health.can_read:
            self._trial = True
            return False
        return self._become(health, seen_in_write=False)

    def may_write(self) -> bool:
        if self.health.can_write:
            return True
        trial, self._trial = self._trial, False
        return trial

    def wrote(self, health: Health, now: float) -> bool:
        """The outcome of a write. True when the state changed."""
        if not health.can_write:
            self._look_at = now + self.recheck_s
        return self._become(health, seen_in_write=not health.can_write)

    def _become(self, health: Health, *, seen_in_write: bool) -> bool:
        self._seen_in_write, self._trial = seen_in_write, False
        changed = health.trouble != self.health.trouble
        self.health = health
        return changed
