"""How much of which disk the block store may take, from the settings and the disk's size."""

import shutil
from pathlib import Path

from supervisor.credits import Limits
from supervisor.paths import Paths
from supervisor.settings import Settings

AUTO_SHARE = 0.10
AUTO_MOST_BYTES = 100 * 2**30
HEADROOM_SHARE = 0.10
"""Of the cap, for writers' credits: the janitor keeps the store this far below it."""
HEADROOM_LEAST_BYTES = 512 * 2**20
"""But at least this, or half of the cap: a share of it must hold some blocks, up to 80 MB each, or nothing new ever gets in."""
MIN_FREE_MOST_BYTES = 2 * 2**30
MIN_FREE_SHARE = 0.05
"""Of a small disk: one made for the cache alone may be nearly filled."""


def store_limits(settings: Settings, paths: Paths) -> Limits:
    disk_bytes = _disk_bytes(paths)
    chosen = settings.cache.ssd_cache_max_size
    cap_bytes = chosen.of(disk_bytes) if chosen is not None else min(AUTO_MOST_BYTES, int(disk_bytes * AUTO_SHARE))
    return Limits(
        cap_bytes=cap_bytes,
        high_bytes=cap_bytes - max(int(cap_bytes * HEADROOM_SHARE), min(cap_bytes // 2, HEADROOM_LEAST_BYTES)),
        min_free_bytes=min(MIN_FREE_MOST_BYTES, int(disk_bytes * MIN_FREE_SHARE)),
    )


def _disk_bytes(paths: Paths) -> int:
    place: Path = next((path for path in (paths.cache, *paths.cache.parents) if path.exists()), paths.home)
    return shutil.disk_usage(place).total
