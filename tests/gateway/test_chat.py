from __future__ import annotations

import json

from tests.gateway.stand import Stand


async def test_a_plain_answer_is_the_stream_put_together(stand: Stand) -> None:
    await stand.start()
    status, body = await stand.chat()
    assert status == 200, body
    assert body["choices"][0]["message"]["content"] == "Hello"
    events = await stand.chat_stream()
    print(events)
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "Hello"
