from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.gateway.stand import Stand


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    async with AsyncExitStack() as stack:
        yield Stand(stack)
