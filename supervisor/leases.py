"""What gateways ask of the slot machine and what it answers them: messages in, events; effects in, messages."""

import time
from typing import Protocol

from supervisor import slot_events as slots
from supervisor.fleet import Fleet
from supervisor.protocol import (
    OK,
    Abandon,
    Acquire,
    Code,
    GatewayBeat,
    Granted,
    Lost,
    Message,
    Queued,
    Rejected,
    Release,
)
from supervisor.roster import Roster

FromGateway = Acquire | Abandon | Release | GatewayBeat
ToGateway = slots.Granted | slots.Rejected | slots.QueuedAt | slots.Lost


class LeaseShell(Protocol):
    roster: Roster
    fleet: Fleet

    def happened(self, event: slots.SlotEvent) -> None: ...
    def send(self, identity: bytes, message: Message) -> bool: ...


class Leases:
    def __init__(self, shell: LeaseShell) -> None:
        self._shell = shell
        self._beats: dict[str, GatewayBeat] = {}
        """The last one of every gateway that lives."""

    @property
    def in_hand(self) -> int:
        """Requests of clients that gateways have not done with, whether they hold a lease or not."""
        return sum(beat.inflight for beat in self._beats.values())

    def gateway_lost(self, gateway: str) -> None:
        self._beats.pop(gateway, None)
        self._shell.happened(slots.GatewayLost(gateway))

    def take(self, gateway: str, message: FromGateway) -> None:
        match message:
            case Acquire():
                self._acquire(gateway, message)
            case Abandon():
                self._shell.happened(slots.Abandon(message.rid))
            case Release():
                self._shell.happened(slots.Release(message.lease, message.outcome == OK))
            case GatewayBeat():
                self._heard(gateway, message)

    def tell(self, effect: ToGateway) -> None:
        message: Message
        match effect:
            case slots.Granted():
                message = self._granted(effect)
            case slots.Rejected():
                message = Rejected(rid=effect.rid, code=effect.code, message=effect.message, retry_after_s=effect.retry_after_s)
            case slots.QueuedAt():
                message = Queued(rid=effect.rid, position=effect.position, state=effect.state.value)
            case slots.Lost():
                message = Lost(lease=effect.lease, rid=effect.rid, code=effect.code, message=effect.message)
        self._shell.send(effect.gateway.encode(), message)

    def _heard(self, gateway: str, beat: GatewayBeat) -> None:
        """Most say nothing but that it lives."""
        before, self._beats[gateway] = self._beats.get(gateway), beat
        if before is None or (bool(before.inflight), before.models) != (bool(beat.inflight), beat.models):
            self._shell.happened(slots.ClientsServed(gateway, frozenset(beat.models)))

    def _acquire(self, gateway: str, message: Acquire) -> None:
        """Only models of the catalog get as far as the machine, which also knows imports as slots."""
        resolved = self._shell.roster.resolve(message.model)
        if resolved is None:
            self._reject(gateway, message.rid, Code.MODEL_NOT_FOUND, f"there is no model {message.model}")
            return
        entry = resolved.entry
        if entry.files.problem is not None:
            text = f"{entry.id} cannot be served: {entry.files.problem}"
            self._reject(gateway, message.rid, Code.MODEL_UNLOADABLE, text)
        else:
            deadline = None if message.deadline_ms is None else time.monotonic() + message.deadline_ms / 1000
            profile = resolved.profile
            event = slots.Acquire(message.rid, gateway, entry.id, message.priority, deadline, message.request_hash, profile)
            self._shell.happened(event)

    def _reject(self, gateway: str, rid: str, code: Code, message: str) -> None:
        self._shell.send(gateway.encode(), Rejected(rid=rid, code=code, message=message))

    def _granted(self, effect: slots.Granted) -> Granted:
        roster = self._shell.roster
        entry = roster.catalog.get(effect.model)
        defaults = roster.defaults(entry, effect.profile) if entry else {}
        return Granted(
            rid=effect.rid,
            lease=effect.lease,
            worker=self._shell.fleet.identity(effect.model, effect.gen),
            model=effect.model,
            profile=effect.profile,
            defaults={name: default.value for name, default in defaults.items()},
        )
