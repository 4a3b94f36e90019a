"""Whether a newcomer should wait for what another is computing at this moment: the same beginning need not be computed twice.

Pure: prompts and chains in, a verdict out.
"""

from worker.chain import Chain
from worker.sequence import Sequence


def waits_for(newcomer: Sequence, other: Sequence, *, has_state: bool) -> bool:
    """`other` is being restored or prefilled. Layers with state can be restored only where its prompt ends."""
    if newcomer.chain is None or other.chain is None or newcomer.chain.root != other.chain.root:
        return False
    if newcomer.job.prompt == other.job.prompt:  # its tail, too, is kept when it is done
        return True
    shared = shared_blocks(newcomer, other)
    if has_state:
        return shared > 0
    return shared > other.chain.captured


def shared_blocks(a: Sequence, b: Sequence) -> int:
    """Blocks of the two prompts' common beginning, up to the last token of each."""
    if a.chain is None or b.chain is None:
        return 0
    return _common(_keys(a.chain, a), _keys(b.chain, b))


def _keys(chain: Chain, sequence: Sequence) -> list[str]:
    prompt = sequence.job.prompt
    return chain.keys(chain.grow(prompt, len(prompt) - 1))


def _common(a: list[str], b: list[str]) -> int:
    """Each key covers all before it, so they agree up to some index and nowhere after it."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
