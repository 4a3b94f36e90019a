"""The supervisor's shell: one event loop that owns the slot machine, the control socket and every child process.

Turns messages, exits and clocks into events of the machine, and the machine's effects into messages, processes and signals.
Decides nothing about models itself; what omlxctl may ask for is in admin.py.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import cast

import zmq

from supervisor import budget, duties, hardware, ipc
from supervisor import slot_events as slots
from supervisor.admin import Admin
from supervisor.attendants import Attendant
from supervisor.build import build
from supervisor.catalog import scan
from supervisor.control import Control, FromGateway
from supervisor.feed import Feed
from supervisor.fleet import Fleet
from supervisor.http_port import AddressUnusable, PortTaken, bind
from supervisor.importing import Importer, is_import
from supervisor.instance import AlreadyRunning, InstanceLock
from supervisor.logs import BookHandler, LogBook, remove_old_files
from supervisor.paths import HomeUnusable, Paths, paths_of, prepare
from supervisor.protocol import (
    Abandon,
    Acquire,
    Assign,
    Call,
    ChildStatus,
    Code,
    EventKind,
    GatewayBeat,
    GatewayLost,
    Granted,
    Lost,
    Message,
    Queued,
    Rejected,
    Release,
    ServerStatus,
    SlotStatus,
    Snapshot,
    Stop,
    Watch,
    plain,
)
from supervisor.roster import Roster
from supervisor.settings import Settings
from supervisor.settings_load import Loaded
from supervisor.slot import Machine
from supervisor.status import Clock, slot_status

log = logging.getLogger("omlxd")

TICK_SLACK_S = 0.005
SHUTDOWN_S = 20.0


class Supervisor:
    def __init__(self, loaded: Loaded, paths: Paths, listener: socket.socket, book: LogBook) -> None:
        self.loaded = loaded
        self.paths = paths
        self.warnings = [*loaded.warnings, *filter(None, [hardware.slow_path_warning()])]
        self.control_endpoint = ipc.endpoint(paths.control)
        self.budget_bytes = _budget_bytes(loaded.settings)
        self.roster = read_roster(loaded.settings, paths, self.budget_bytes)
        self.machine = Machine(_timers(loaded.settings), slots.Policy(self.budget_bytes, loaded.settings.scheduler.max_queue))
        self.books = {"omlxd": book}
        self.feed = Feed(self.send)
        self.fleet = Fleet(self)
        self.importer = Importer(self)
        self.admin = Admin(self)
        self._listener = listener
        self._started = time.time()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events: deque[slots.SlotEvent] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._leave = asyncio.Event()
        self._machine_stopped = asyncio.Event()
        self._exit_code = 0
        self.attendants = {
            duty.name: Attendant(
                duty,
                self.book(duty.name),
                on_lost=self._attendant_lost,
                on_change=self._attendant_changed,
                give_up=self._give_up,
            )
            for duty in duties.duties(loaded.settings, paths, listener.fileno())
        }
        self._control = Control(self._context, paths, self)

    # Life

    async def serve(self) -> int:
        """Runs until asked to stop; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave)
        loop.add_signal_handler(signal.SIGHUP, self.admin.reload)
        self.happened(slots.ModelsChanged(self.roster.costs()))
        for attendant in self.attendants.values():
            attendant.start()
        for warning in self.warnings:
            log.warning("%s", warning)
        self._preload()
        try:
            await self._leave.wait()
        finally:
            await self._shut_down()
        return self._exit_code

    def leave(self) -> None:
        self._leave.set()

    async def _shut_down(self) -> None:
        """Streams hear of it first, then the workers go, then the gateway; all within 25 s."""
        log.info("stopping")
        for attendant in self.attendants.values():
            attendant.dismiss()
        gateway = self.attendants["gateway"]
        self.send(gateway.identity, Stop(reason="the server is shutting down", flush_deadline_s=2.0))
        gateway_gone = asyncio.create_task(gateway.gone(within_s=SHUTDOWN_S))
        self.happened(slots.Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._machine_stopped.wait(), SHUTDOWN_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gateway_gone, 2.0)
        await asyncio.gather(*(attendant.leave(grace_s=1.0) for attendant in self.attendants.values()))
        if self._timer is not None:
            self._timer.cancel()
        self._control.close()
        self._context.destroy(linger=0)
        for path in (self.paths.control, self.paths.data):
            path.unlink(missing_ok=True)
        for book in self.books.values():
            book.close()

    def _preload(self) -> None:
        for model in self.loaded.settings.model.preload:
            if self.roster.catalog.get(model) is None:
                log.warning("%s is to be loaded at start, but there is no such model", model)
            else:
                self.happened(slots.LoadRequested(model, None))

    # The machine

    def happened(self, event: slots.SlotEvent) -> None:
        """Feeds the machine; what an effect causes at once waits for its turn."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for effect in self.machine.handle(self._events.popleft(), time.monotonic()):
                    self._carry_out(effect)
        finally:
            self._handling = False
        self._set_timer()
        if self.machine.stopped:
            self._machine_stopped.set()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.machine.next_deadline()
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic()) + TICK_SLACK_S
            self._timer = asyncio.get_running_loop().call_later(delay, self.happened, slots.Tick())

    def _carry_out(self, effect: slots.Effect) -> None:
        match effect:
            case slots.Spawn():
                self._runner(effect.model).spawn(effect.model, effect.gen)
            case slots.AskStop():
                self._runner(effect.model).ask_stop(effect)
            case slots.Terminate():
                self._runner(effect.model).terminate(effect.model, effect.gen)
            case slots.Kill():
                self._runner(effect.model).kill(effect.model, effect.gen)
            case slots.DumpStacks():
                self._runner(effect.model).dump_stacks(effect.model, effect.gen)
            case slots.CallDone():
                self.admin.done(effect)
            case slots.Event():
                self._publish(effect)
            case _:
                self._tell_gateway(effect)

    def _runner(self, model: str) -> Fleet | Importer:
        return self.importer if is_import(model) else self.fleet

    def _tell_gateway(self, effect: slots.Granted | slots.Rejected | slots.QueuedAt | slots.Lost) -> None:
        message: Message
        match effect:
            case slots.Granted():
                entry = self.roster.catalog.get(effect.model)
                defaults = self.roster.defaults(entry) if entry else {}
                message = Granted(
                    rid=effect.rid,
                    lease=effect.lease,
                    worker=self.fleet.identity(effect.model, effect.gen),
                    model=effect.model,
                    defaults={name: default.value for name, default in defaults.items()},
                )
            case slots.Rejected():
                message = Rejected(rid=effect.rid, code=effect.code, message=effect.message, retry_after_s=effect.retry_after_s)
            case slots.QueuedAt():
                message = Queued(rid=effect.rid, position=effect.position, state=effect.state.value)
            case slots.Lost():
                message = Lost(lease=effect.lease, rid=effect.rid, code=effect.code, message=effect.message)
        self.send(effect.gateway.encode(), message)

    # Who asks for what

    def send(self, identity: bytes, message: Message) -> bool:
        return self._control.send(identity, message)

    def from_gateway(self, gateway: str, message: FromGateway) -> None:
        match message:
            case Acquire():
                self._acquire(gateway, message)
            case Abandon():
                self.happened(slots.Abandon(message.rid))
            case Release():
                self.happened(slots.Release(message.lease, message.outcome == "ok"))
            case GatewayBeat():
                pass

    def from_client(self, identity: bytes, message: Call | Watch) -> None:
        if isinstance(message, Call):
            self.admin.call(identity, message)
            return
        missed = self.feed.since(message.since_seq) if message.since_seq is not None else None
        if missed is None:
            self.send(identity, Snapshot(seq=self.feed.seq, status=self.status()))
        else:
            for event in missed:
                self.send(identity, event)
        self.feed.watch(identity, message.topics)

    def assign(self, attendant: Attendant) -> None:
        """Tells an attendant what it is for; a second time when settings changed that take effect at once."""
        self.send(attendant.identity, duties.assignment(attendant.duty, self.loaded.settings, self.paths))

    def _acquire(self, gateway: str, message: Acquire) -> None:
        entry = self.roster.catalog.get(message.model)
        if entry is not None and entry.files.problem is not None:
            text = f"{entry.id} cannot be served: {entry.files.problem}"
            self.send(gateway.encode(), Rejected(rid=message.rid, code=Code.MODEL_UNLOADABLE, message=text))
            return
        deadline = None if message.deadline_ms is None else time.monotonic() + message.deadline_ms / 1000
        self.happened(slots.Acquire(message.rid, gateway, message.model, message.priority, deadline, message.request_hash))

    # What others need to know

    def book(self, name: str) -> LogBook:
        if name not in self.books:
            self.books[name] = LogBook(name, self.paths.logs)
        return self.books[name]

    def assignment(self, model: str, gen: int) -> Assign:
        entry = self.roster.catalog.get(model)
        assert entry is not None, "a worker was spawned for a model that is not in the catalog"
        return self.roster.assignment(entry, gen, ipc.endpoint(self.paths.data))

    def status(self) -> ServerStatus:
        host, port = cast("tuple[str, int]", self._listener.getsockname()[:2])
        return ServerStatus(
            version=build(),
            build=build(),
            pid=os.getpid(),
            started=self._started,
            host=host,
            port=port,
            home=str(self.paths.home),
            budget_bytes=self.budget_bytes,
            charged_bytes=self.machine.budget().charged_bytes,
            models=[self.slot_status(entry.id) for entry in self.roster.catalog.models],
            children=[attendant.status() for attendant in self.attendants.values()],
            warnings=self.warnings,
        )

    def slot_status(self, model: str) -> SlotStatus:
        entry = self.roster.catalog.get(model)
        assert entry is not None, "only models of the catalog have a status"
        return slot_status(
            entry,
            next((view for view in self.machine.view() if view.model == model), None),
            self.fleet.worker(model),
            context=self.roster.context(entry),
            estimate_bytes=self.roster.estimate_bytes(entry),
            defaults=self.roster.defaults(entry),
            clock=Clock(time.monotonic(), time.time()),
        )

    def change_roster(self, roster: Roster) -> None:
        """Another catalog or other settings: the machine and everybody who watches hear of it."""
        before = {entry.id for entry in self.roster.catalog.models}
        self.roster = roster
        self.happened(slots.ModelsChanged(roster.costs()))
        for entry in roster.catalog.models:
            self.feed.publish(EventKind.SLOT, model=entry.id, status=self.slot_status(entry.id))
        for model in sorted(before - {entry.id for entry in roster.catalog.models}):
            self.feed.publish(EventKind.SLOT, model=model)

    def _publish(self, event: slots.Event) -> None:
        if event.model is not None and is_import(event.model):
            return
        if event.kind in ("slot", "progress") and event.model and self.roster.catalog.get(event.model):
            status = self.slot_status(event.model)
            self.feed.publish(EventKind.SLOT, model=event.model, gen=event.gen, data=dict(event.data), status=status)
            self.admin.progressed(status)
        elif event.kind == "fault":
            self.feed.publish(EventKind.LOG, model=event.model, gen=event.gen, data=dict(event.data))

    # Attendants

    def _attendant_lost(self, identity: str) -> None:
        self.feed.forget(identity.encode())
        if identity.startswith("g."):
            self.happened(slots.GatewayLost(identity))
            self.fleet.gateway_lost(identity)
            self.send(self.attendants["text"].identity, GatewayLost(gateway=identity))

    def _attendant_changed(self, status: ChildStatus) -> None:
        self.feed.publish(EventKind.CHILD, data=cast("dict[str, object]", plain(status)))

    def _give_up(self, reason: str) -> None:
        log.critical("%s", reason)
        self._exit_code = 1
        self.leave()


def read_roster(settings: Settings, paths: Paths, budget_bytes: int) -> Roster:
    """Looks through the model directories, ours first."""
    directories = [paths.models, *(Path(d).expanduser().absolute() for d in settings.model.model_dirs)]
    return Roster(scan(directories), settings, paths.cache, budget_bytes)


def _budget_bytes(settings: Settings) -> int:
    total = hardware.total_ram_bytes()
    memory = settings.memory
    limits = [size.of(total) for size in (memory.max_model_memory, memory.max_process_memory) if size is not None]
    cap = budget.metal_cap_bytes(total, hardware.wired_limit_bytes()) if hardware.has_metal() else None
    return budget.budget_bytes(total, budget.Tier(memory.memory_tier), limits, cap)


def _timers(settings: Settings) -> slots.Timers:
    given = settings.timers
    return slots.Timers(**{name: getattr(given, name) for name in given.__dataclass_fields__})


def run(loaded: Loaded) -> int:
    """`omlxctl serve`: everything from the lock to the last child's exit. Returns the exit code; says why when it is not 0."""
    os.umask(0o077)  # sockets, logs and KV blocks are for this user only
    paths = paths_of(loaded.home, loaded.settings)
    try:
        prepare(paths)
        lock = InstanceLock(paths.lock)
    except (HomeUnusable, ipc.PathTooLong, AlreadyRunning) as e:
        return _refuse(str(e))
    try:
        listener = bind(loaded.settings.server.host, loaded.settings.server.port)
    except (PortTaken, AddressUnusable) as e:
        lock.release()
        return _refuse(str(e))
    book = _start_logging(loaded.settings, paths)
    host, port = cast("tuple[str, int]", listener.getsockname()[:2])
    log.info("omlxd %s on http://%s:%d, home %s", build(), host, port, paths.home)
    try:
        return asyncio.run(_serve(loaded, paths, listener, book))
    finally:
        listener.close()
        lock.release()


async def _serve(loaded: Loaded, paths: Paths, listener: socket.socket, book: LogBook) -> int:
    return await Supervisor(loaded, paths, listener, book).serve()


def _refuse(reason: str) -> int:
    sys.stderr.write(f"omlxd: {reason}\n")
    return 1


def _start_logging(settings: Settings, paths: Paths) -> LogBook:
    book = LogBook("omlxd", paths.logs)
    terminal = logging.StreamHandler()
    terminal.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.server.log_level.upper(), handlers=[terminal, BookHandler(book)])
    removed = remove_old_files(paths.logs, settings.logging.log_retention_days)
    if removed:
        log.info("%d log files older than %d days were removed", removed, settings.logging.log_retention_days)
    return book
