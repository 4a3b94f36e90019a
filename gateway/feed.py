"""What the gateway knows of the server: the supervisor's snapshot, kept current by its events. No sockets, no clock."""

from supervisor.protocol import Event, EventKind, ServerStatus, SlotStatus, Snapshot

READY = "ready"
TOPICS = (EventKind.SLOT,)


class Feed:
    """Models by id, in the order the supervisor named them."""

    def __init__(self) -> None:
        self._server: ServerStatus | None = None
        self._models: dict[str, SlotStatus] = {}
        self._seq = -1

    @property
    def host(self) -> str | None:
        return self._server.host if self._server else None

    @property
    def version(self) -> str:
        return self._server.version if self._server else ""

    @property
    def models(self) -> list[SlotStatus]:
        return list(self._models.values())

    def snapshot(self, message: Snapshot) -> None:
        self._server = message.status
        self._models = {slot.id: slot for slot in message.status.models}
        self._seq = message.seq

    def event(self, event: Event) -> None:
        """What the snapshot already held is old news."""
        if event.seq <= self._seq:
            return
        if event.status is not None:
            self._models[event.status.id] = event.status
        elif event.model is not None:
            self._models.pop(event.model, None)

    def find(self, name: str) -> SlotStatus | None:
        """By id, else by alias, else either with a profile, else with an adapter: as the supervisor resolves it."""
        if (slot := self._named(name)) is not None:
            return slot
        base, _, adapter = name.rpartition("+")
        slot = self._model(base)
        return None if slot is None else self._named(f"{slot.id}+{adapter}")

    def _named(self, name: str) -> SlotStatus | None:
        if (slot := self._model(name)) is not None:
            return slot
        model, _, profile = name.rpartition(":")
        slot = self._model(model)
        return slot if slot is not None and profile in slot.profiles else None

    def _model(self, name: str) -> SlotStatus | None:
        return self._models.get(name) or next((slot for slot in self._models.values() if name in slot.aliases), None)
