"""How a verb ends: notes while it lasts, one reply or refusal."""

from typing import Protocol

from supervisor.protocol import Call


class Refused(Exception):
    """A verb cannot be carried out; becomes the reply."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Answers(Protocol):
    def note(self, who: bytes, call: Call, data: dict[str, object]) -> bool: ...
    def reply(self, who: bytes, call: Call, result: dict[str, object]) -> None: ...
    def refuse(self, who: bytes, call: Call, code: str, message: str) -> None: ...
