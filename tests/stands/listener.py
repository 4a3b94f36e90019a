"""Stands in for a worker's line to a gateway: keeps what is said to it."""

from supervisor.protocol import Message


class Listener:
    epoch = "e"

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def send(self, message: Message) -> None:
        self.heard.append(message)
