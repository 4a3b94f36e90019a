"""The control socket: who may say what, and to whom it is handed on. Holds no state but the socket."""

import logging
from typing import Protocol

import zmq

from supervisor import ipc
from supervisor.attendants import Attendant
from supervisor.build import build
from supervisor.fleet import Fleet
from supervisor.leases import FromGateway
from supervisor.paths import Paths
from supervisor.protocol import (
    VERSION,
    Abandon,
    Acquire,
    Call,
    Code,
    GatewayBeat,
    Hello,
    Message,
    Problem,
    ProtocolError,
    Release,
    Reply,
    Traced,
    UnknownKind,
    Watch,
    decode,
    encode,
)
from supervisor.staff import Staff

log = logging.getLogger("control")


class ControlShell(Protocol):
    """Who acts on what arrives."""

    fleet: Fleet
    staff: Staff

    def from_gateway(self, gateway: str, message: FromGateway) -> None: ...
    def from_client(self, identity: bytes, message: Call | Watch) -> None: ...
    def other_build(self, other: str) -> bool: ...
    def traced(self, message: Traced) -> None: ...


class Control:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], paths: Paths, shell: ControlShell) -> None:
        self._shell = shell
        self._wire = ipc.bind_router(context, paths.control, self._take)

    def send(self, identity: bytes, message: Message) -> bool:
        """Whether the peer is there to read it."""
        try:
            self._wire.send([identity, *encode(message)])
        except ipc.PeerLost:
            return False
        except ipc.PeerStuck:
            if not _is_client(identity):  # one of those may be following this very log
                log.error("%s does not read its messages", _name(identity))
            return False
        return True

    def close(self) -> None:
        self._wire.close()

    def _take(self, frames: ipc.Frames) -> None:
        identity = frames[0]
        try:
            message, _ = decode(frames[1:])
        except UnknownKind as e:
            self.send(identity, Problem(code=Code.UNKNOWN_KIND, message=str(e)))
            return
        except ProtocolError as e:
            log.error("%s sent something unreadable: %s", _name(identity), e)
            self.send(identity, Problem(code=Code.BAD_REQUEST, message=str(e)))
            return
        shell = self._shell
        attendant = shell.staff.of(identity)
        if shell.fleet.knows(identity):
            shell.fleet.take(identity, message)
        elif attendant is not None:
            self._from_attendant(attendant, message)
        elif isinstance(message, Call | Watch) and _is_client(identity):
            self._from_client(identity, message)
        else:
            log.debug("%s from unknown peer %s is ignored", message.KIND, _name(identity))

    def _from_client(self, identity: bytes, message: Call | Watch) -> None:
        if isinstance(message, Call) and message.v != VERSION:
            text = f"this omlxctl speaks version {message.v} of the protocol, the server {VERSION}: restart omlxd"
            self.send(identity, Reply(id=message.id, ok=False, code=Code.VERSION_MISMATCH, message=text))
        else:
            self._shell.from_client(identity, message)

    def _from_attendant(self, attendant: Attendant, message: Message) -> None:
        """One that has not proved whose child it is has nothing to say but hello."""
        match message:
            case Hello():
                self._greet(attendant, message)
            case _ if not attendant.hello:
                log.error("%s: %s before hello; ignored", attendant.duty.name, message.KIND)
                return
            case Call() | Watch():
                self._shell.from_client(attendant.identity, message)
            case Acquire() | Abandon() | Release() | GatewayBeat():
                self._shell.from_gateway(attendant.identity.decode(), message)
            case Traced():
                self._shell.traced(message)
            case _:
                log.debug("%s: %s", attendant.duty.name, message.KIND)
        attendant.heard()

    def _greet(self, attendant: Attendant, hello: Hello) -> None:
        if hello.nonce != attendant.nonce:
            log.error("a process with a wrong nonce called itself %s; ignored", attendant.duty.name)
        elif (hello.v, hello.build) != (VERSION, build()):
            self._shell.other_build(hello.build)
            attendant.refuse(f"this process is build {hello.build}, the supervisor {build()}: restart omlxd")
        else:
            attendant.greeted()
            self._shell.staff.assign(attendant)


def _is_client(identity: bytes) -> bool:
    return identity.startswith(b"c.")


def _name(identity: bytes) -> str:
    return identity.decode("utf-8", "replace")
