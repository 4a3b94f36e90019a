"""The one number of the ledger that the store decides: what a worker writes before it has paid for anything."""

from pathlib import Path

from cachestore.store import Store
from supervisor.credits import RESERVE_BYTES
from tests.cachestore.cachestore_stand import make_block, make_chain, make_namespace


def test_opening_a_namespace_takes_no_more_than_the_reserve(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    assert Store(root, make_namespace()).put(make_block(make_chain(1)[0]))
    others = [path for path in (root, *root.rglob("*")) if path.suffix != ".safetensors"]
    assert any(path.name == "namespace.json" for path in others)
    assert 0 < sum(path.lstat().st_blocks * 512 for path in others) <= RESERVE_BYTES
