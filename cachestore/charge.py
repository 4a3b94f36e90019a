"""What a write may cost on disk, so that whoever holds a write credit can pay before writing.

Upper bounds, never estimates: what is charged too much comes back with the janitor's next look at the disk.
"""

from cachestore.block import Block, file_bytes

UNIT_BYTES = 4096
"""How disks give out space."""


def most_disk_bytes(block: Block) -> int:
    """The block's file in whole units, and two for the directory it may need and for what its parent grows by."""
    return -(-file_bytes(block) // UNIT_BYTES) * UNIT_BYTES + 2 * UNIT_BYTES
