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
import time
from collections import deque
from dataclasses import replace

import zmq

from supervisor import handover, hardware, ipc, policy
from supervisor import slot_events as slots
from supervisor.admin import Admin
from supervisor.breadcrumb import Breadcrumb
from supervisor.catalog import GET_ONE_IN
from supervisor.census import Census
from supervisor.control import Control
from supervisor.dates import Dates
from supervisor.explaining import Explaining
from supervisor.feed import Feed
from supervisor.fleet import Fleet
from supervisor.importing import Importer, is_import
from supervisor.known_needs import KnownNeeds
from supervisor.known_sheds import KnownSheds
from supervisor.leases import FromGateway, Leases
from supervisor.leftovers import remove_leftovers
from supervisor.logs import LogBook, remove_old_files
from supervisor.memory_watch import MemoryWatch
from supervisor.meters import Meters
from supervisor.neighbours import Neighbourhood
from supervisor.overview import Overview
from supervisor.paths import Paths
from supervisor.protocol import (
    Assign,
    Call,
    EventKind,
    Explained,
    GatewayLost,
    Message,
    ServerStatus,
    SlotStatus,
    Snapshot,
    Traced,
    Watch,
)
from supervisor.restarting import End, Restarting
from supervisor.roster import Roster, read_roster
from supervisor.settings import Settings
from supervisor.settings_load import Loaded, SettingsInvalid
from supervisor.slot import Machine
from supervisor.staff import Staff
from supervisor.status import peak_warning, shed_warning
from supervisor.stay_awake import StayAwake
from supervisor.store_keeper import StoreKeeper
from supervisor.tracing import Tracing

log = logging.getLogger("omlxd")

TICK_SLACK_S = 0.005
SHUTDOWN_S = 20.0
GATEWAY_GOES_S = 2.0
DAY_S = 86400.0
PEAK_SHARE = 0.1
"""Of the budget: a model that is charged so much for a peak that has passed may keep others from being loaded."""
PRELOAD = "preload/"
"""Begins the names of the loads that the server asks for itself; those of clients begin with their identity."""


class Supervisor:
    def __init__(
        self, loaded: Loaded, paths: Paths, listener: socket.socket, book: LogBook, tried_build: str | None = None
    ) -> None:
        """Binds the control socket; `tried_build` is what this server was started again for.

        Raises `ipc.BindFailed`, or `SettingsInvalid` for names that mean two models.
        """
        self.loaded = loaded
        self.paths = paths
        self.warnings = [*loaded.warnings, *filter(None, [hardware.slow_path_warning()])]
        self.control_endpoint = ipc.endpoint(paths.control)
        self.budget = policy.budget_sum(loaded.settings)
        self.budget_bytes = self.budget.total_bytes
        self.known_needs = KnownNeeds(paths.state / "models.json")
        self.known_sheds = KnownSheds(paths.state / "shed.json")
        self.roster = self.fresh_roster()
        if problems := self.roster.clashes():
            raise SettingsInvalid(problems)
        self.dates = Dates(time.monotonic(), time.time())
        self.restarting = Restarting(self, tried_build)
        self.machine = Machine(policy.timers(loaded.settings), policy.policy(loaded.settings, self.budget))
        self.census = Census(paths.children)
        self.breadcrumb = Breadcrumb(paths.breadcrumb)
        self.books = {"omlxd": book}
        self.awake = StayAwake(self)
        self.feed = Feed(self.send)
        self.neighbourhood = Neighbourhood(self, loaded.settings.scheduler.prefill_turn_s)
        self.fleet = Fleet(self)
        self.explaining = Explaining(self)
        self.tracing = Tracing(self)
        self.store = StoreKeeper(self)
        self.importer = Importer(self)
        self.meters = Meters(self)
        self.memory = MemoryWatch(self)
        self.leases = Leases(self)
        self.admin = Admin(self)
        self.overview = Overview(self, listener)
        self.staff = Staff(self, listener.fileno())
        self._events: deque[slots.SlotEvent] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._leave = asyncio.Event()
        self._machine_stopped = asyncio.Event()
        self._exit_code = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = Control(self._context, paths, self)

    # Life

    async def serve(self) -> End:
        """Runs until asked to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up, os.isatty(2))
        handover.heed_signals()
        background = [
            asyncio.create_task(work) for work in (self._chores(), self.store.keep(), self.meters.keep(), self.memory.keep())
        ]
        self.happened(self._models_changed())
        self.staff.start()
        for warning in self.warnings:
            log.warning("%s", warning)
        known = len(self.roster.catalog.models)
        log.info("models: %s", f"{known} known" if known else f"none yet; get one in with: {GET_ONE_IN}")
        self._preload()
        try:
            await self._leave.wait()
        finally:
            for task in background:
                task.cancel()
            await self._shut_down()
        if self.restarting.again is not None:
            await handover.hold_signals()
        return End(self._exit_code, self.restarting.again)

    def _hung_up(self, had_terminal: bool) -> None:
        """SIGHUP asks a server to read its settings again, and tells one in a terminal that this was closed."""
        if had_terminal and not os.isatty(2):
            log.info("the terminal is gone")
            self.leave()
        elif not self._leave.is_set():
            self.admin.reload()

    def leave(self) -> None:
        """Whoever asks for the end, be it during a restart, gets it."""
        self.restarting.again = None
        self._leave.set()

    def give_up(self, reason: str) -> None:
        log.critical("%s", reason)
        self._exit_code = 1
        self.leave()

    async def _shut_down(self) -> None:
        """Streams hear of it first, then the workers go, then the gateway; all within 25 s."""
        log.info("stopping")
        self.publish(EventKind.SERVER, {"state": "stopping"})
        self.awake.let_go()
        self.staff.dismiss()
        self.happened(slots.Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._machine_stopped.wait(), SHUTDOWN_S)
        await self.staff.leave(GATEWAY_GOES_S)
        if self._timer is not None:
            self._timer.cancel()
        self.neighbourhood.close()
        self._control.close()
        self._context.destroy(linger=0)
        self.breadcrumb.close()
        for path in (self.paths.control, self.paths.data):
            path.unlink(missing_ok=True)
        for book in self.books.values():
            book.close()

    async def _chores(self) -> None:
        """What a crash may have left behind, and log files nobody wants any more."""
        for path in await asyncio.to_thread(remove_leftovers, self.paths.models):
            log.info("%s was left behind unfinished and is removed", path)
        while True:
            days = self.loaded.settings.logging.log_retention_days
            if removed := await asyncio.to_thread(remove_old_files, self.paths.logs, days):
                log.info("%d log files older than %d days were removed", removed, days)
            await asyncio.sleep(DAY_S)

    def _preload(self) -> None:
        for model in self.loaded.settings.model.preload:
            resolved = self.roster.named(model)
            if resolved is None:
                log.warning("%s is to be loaded at start, but there is no such model", model)
                continue
            entry = resolved.entry
            if entry.files.problem is not None:
                log.error("%s is to be loaded at start, but it cannot be served: %s", model, entry.files.problem)
            else:
                self.happened(slots.LoadRequested(entry.id, PRELOAD + entry.id))

    # The machine

    def _models_changed(self) -> slots.ModelsChanged:
        """The catalog as it is, with what was learnt of its models in earlier lives."""
        return slots.ModelsChanged(self.known_sheds.added_to(self.known_needs.added_to(self.roster.costs())))

    def happened(self, event: slots.SlotEvent) -> None:
        """Feeds the machine; what an effect causes at once waits for its turn."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                now = time.monotonic()
                self.dates.note(now, time.time())
                for effect in self.machine.handle(self._events.popleft(), now):
                    self._carry_out(effect)
            at_work = list(self.machine.at_work())
            self.neighbourhood.work(self.fleet.identity(*worker).encode() for worker in at_work)
            self.breadcrumb.at(model for model, _ in at_work)
        finally:
            self._handling = False
            self._set_timer()
        if self.machine.stopped:
            self._machine_stopped.set()
        self.awake.demand(0 if self._leave.is_set() else max(self.machine.demand, self.leases.in_hand))
        self.restarting.look()

    @property
    def quiet(self) -> bool:
        """Nobody would miss anything if the server started again now; one that is about to end does not."""
        return self.machine.quiet and not self.leases.in_hand and not self._leave.is_set()

    def other_build(self, other: str, model: str | None = None, gen: int = 0) -> bool:
        return self.restarting.other_build(other, model, gen)

    def next_deadline_in_s(self) -> float | None:
        deadline = self.machine.next_deadline()
        return None if deadline is None else deadline - time.monotonic()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.machine.next_deadline()
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic()) + TICK_SLACK_S
            self._timer = asyncio.get_running_loop().call_later(delay, self.happened, slots.Tick())

    def _carry_out(self, effect: slots.Effect) -> None:
        try:
            self._do(effect)
        except Exception:  # the machine has moved on already: the other effects must not be lost with this one
            log.exception("%s could not be carried out", effect)

    def _do(self, effect: slots.Effect) -> None:
        match effect:
            case slots.Spawn():
                self._runner(effect.model).spawn(effect.model, effect.gen)
            case slots.AskStop():
                self._runner(effect.model).ask_stop(effect)
            case slots.Terminate():
                self._runner(effect.model).terminate(effect.model, effect.gen)
            case slots.Kill():
                self._runner(effect.model).kill(effect.model, effect.gen)
            case slots.TrimWorker():
                self.fleet.trim(effect)
            case slots.GrantMemory():
                self.fleet.grant(effect)
            case slots.ReadMemory():
                self.memory.look_soon()
            case slots.Remember():
                self.known_needs.note(effect)
            case slots.RememberShed():
                self.known_sheds.note(effect)
            case slots.DumpStacks():
                self._runner(effect.model).dump_stacks(effect.model, effect.gen)
            case slots.CallDone() if effect.call.startswith(PRELOAD):
                if not effect.ok:
                    log.error("loading at start: %s", effect.message)
            case slots.CallDone():
                self.admin.done(effect)
            case slots.Event():
                self._publish_slot(effect)
            case _:
                self.leases.tell(effect)

    def _runner(self, model: str) -> Fleet | Importer:
        return self.importer if is_import(model) else self.fleet

    # Who says what

    def send(self, identity: bytes, message: Message) -> bool:
        return self._control.send(identity, message)

    def from_gateway(self, gateway: str, message: FromGateway) -> None:
        self.leases.take(gateway, message)

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

    def explained(self, worker: bytes, message: Explained) -> None:
        self.explaining.take(worker, message)

    def traced(self, message: Traced) -> None:
        self.tracing.take(message)

    def attendant_lost(self, identity: str) -> None:
        self.feed.forget(identity.encode())
        if identity.startswith("g."):
            self.leases.gateway_lost(identity)
            self.fleet.gateway_lost(identity)
            self.send(self.staff.identity("text"), GatewayLost(gateway=identity))
        elif identity.startswith("j."):
            self.store.janitor_lost()

    def janitor_said(self, data: bytes) -> None:
        self.store.janitor_said(data)

    # What others need to know

    def book(self, name: str) -> LogBook:
        if name not in self.books:
            self.books[name] = LogBook(name, self.paths.logs)
        return self.books[name]

    def fresh_roster(self) -> Roster:
        return self.roster_for(self.loaded.settings)

    def roster_for(self, settings: Settings) -> Roster:
        return read_roster(settings, self.paths, self.budget_bytes)

    def assignment(self, model: str, gen: int) -> Assign | None:
        entry = self.roster.catalog.get(model)
        if entry is None:
            return None
        view = next((view for view in self.machine.view() if view.model == model), None)
        hot_bytes = view.hot_granted_bytes if view is not None else 0
        roster = self.roster.without_features(model) if view is not None and view.shed else self.roster
        entry = roster.catalog.get(model) or entry
        assign = roster.assignment(entry, gen, ipc.endpoint(self.paths.data), hot_bytes)
        return self.store.with_credit(assign, self.fleet.worker(model))

    def killed_for_memory_lately(self) -> bool:
        return self.memory.killed_lately()

    def memory_now(self) -> dict[str, object]:
        return self.overview.memory()

    def status(self) -> ServerStatus:
        return self.overview.server()

    def all_warnings(self) -> list[str]:
        """Those of the start and those of the moment."""
        views = self.machine.view()
        shed = [shed_warning(view) for view in views if view.shed]
        peaks = [peak_warning(view) for view in views if view.past_peak_bytes > PEAK_SHARE * self.budget_bytes]
        return [
            *self.restarting.warnings(),
            *self.warnings,
            *self.roster.clashes(),
            *self.roster.unknown(),
            *self.store.warnings(),
            *shed,
            *peaks,
        ]

    def slot_status(self, model: str) -> SlotStatus:
        return self.overview.model(model)

    def publish_status(self, model: str) -> None:
        """Something about a model's process changed that is no transition of its slot."""
        if self.roster.catalog.get(model):
            self.feed.publish(EventKind.SLOT, model=model, status=self.slot_status(model))

    def change_roster(self, roster: Roster) -> None:
        """Another catalog or other settings: the machine and everybody who watches hear of it."""
        before = {entry.id for entry in self.roster.catalog.models}
        self.roster = replace(roster, extra_costs=self.importer.costs())
        self.happened(self._models_changed())
        for status in self.status().models:
            self.feed.publish(EventKind.SLOT, model=status.id, status=status)
        for model in sorted(before - {entry.id for entry in roster.catalog.models}):
            self.feed.publish(EventKind.SLOT, model=model)

    def publish(self, kind: EventKind, data: dict[str, object]) -> None:
        self.feed.publish(kind, data=data)

    def _publish_slot(self, event: slots.Event) -> None:
        if event.kind == "gap":
            log.warning(
                "nothing could be heeded for %.1f s (sleep, or this process was stopped); all waits begin anew",
                event.data["seconds"],
            )
            return
        if event.model is not None and is_import(event.model):
            return
        if event.kind == "shed":
            log.warning("%s", event.data["message"])
            self.feed.publish(EventKind.LOG, model=event.model, gen=event.gen, data=dict(event.data))
        elif event.kind in ("slot", "progress") and event.model and self.roster.catalog.get(event.model):
            status = self.slot_status(event.model)
            self.feed.publish(EventKind.SLOT, model=event.model, gen=event.gen, data=dict(event.data), status=status)
            self.admin.progressed(status)
        elif event.kind == "memory":
            self.memory.said(event.data)
        elif event.kind == "fault":
            self.feed.publish(EventKind.LOG, model=event.model, gen=event.gen, data=dict(event.data))
