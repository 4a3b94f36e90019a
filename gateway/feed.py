"""What the gateway knows of the server: the supervisor's snapshot, kept current by its events. No sockets, no clock."""

import msgspec

from supervisor.protocol import ChildStatus, Event, EventKind, ServerStatus, SlotStatus, Snapshot

READY = "ready"
TOPICS = (EventKind.SLOT, EventKind.CHILD, EventKind.SERVER)


class Feed:
    """Models by id, in the order the supervisor named them."""

    def __init__(self) -> None:
        self._server: ServerStatus | None = None
        self._models: dict[str, SlotStatus] = {}
        self._children: dict[str, ChildStatus] = {}
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
        self._children = {child.name: child for child in message.status.children}
        self._seq = message.seq

    def event(self, event: Event) -> None:
        """What the snapshot already held is old news."""
        if event.seq <= self._seq:
            return
        if event.kind == EventKind.CHILD:
            child = msgspec.convert(event.data, ChildStatus)
            self._children[child.name] = child
        elif event.kind == EventKind.SERVER and self._server is not None:
            known = {name: value for name, value in event.data.items() if name in ServerStatus.__struct_fields__}
            self._server = msgspec.convert({**msgspec.to_builtins(self._server), **known}, ServerStatus)
        elif event.status is not None:
            self._models[event.status.id] = event.status
        elif event.kind == EventKind.SLOT and event.model is not None:
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

    def status(self) -> ServerStatus | None:
        """The snapshot with the models and processes as they are now; None before there is one."""
        if self._server is None:
            return None
        charged_bytes = sum(slot.charged_bytes for slot in self._models.values())
        children = list(self._children.values())
        return msgspec.structs.replace(self._server, models=self.models, children=children, charged_bytes=charged_bytes)
