"""The worker processes: carries out what the slot machine decided about them and tells it what they say.

Knows identities, nonces and messages; decides nothing about when a worker lives or dies.
"""

import logging
import secrets
import signal
import sys
from dataclasses import dataclass
from typing import Literal, Protocol

from supervisor import slot_events as slots
from supervisor import slot_oom
from supervisor.build import build
from supervisor.census import Census
from supervisor.logs import LogBook
from supervisor.neighbours import Neighbourhood
from supervisor.pressure import Level
from supervisor.process import Child, Exit
from supervisor.protocol import (
    VERSION,
    Activity,
    AskTurn,
    Assign,
    Beat,
    Bye,
    Code,
    Explained,
    Fault,
    GatewayLost,
    GiveTurn,
    Grant,
    Hello,
    LoadProgress,
    Message,
    Problem,
    Ready,
    Stop,
    Trim,
    Want,
)
from supervisor.settings_load import Loaded

log = logging.getLogger("fleet")

TAIL_LINES = 30
SEARCHED_LINES = 120
TRIM_LEVELS: dict[Level, Literal["soft", "hard", "critical"]] = {
    Level.SOFT: "soft",
    Level.HARD: "hard",
    Level.CRITICAL: "critical",
}


@dataclass(slots=True)
class WorkerProcess:
    """One incarnation and what it said last."""

    model: str
    gen: int
    identity: bytes
    nonce: str
    child: Child
    ready: Ready | None = None
    beat: Beat | None = None
    greeted: bool = False
    stopping: bool = False


class FleetShell(Protocol):
    """What the fleet needs of the supervisor around it."""

    control_endpoint: str
    loaded: Loaded
    census: Census
    neighbourhood: Neighbourhood

    def happened(self, event: slots.SlotEvent) -> None: ...
    def send(self, identity: bytes, message: Message) -> bool: ...
    def assignment(self, model: str, gen: int) -> Assign | None: ...
    def killed_for_memory_lately(self) -> bool: ...
    def book(self, name: str) -> LogBook: ...
    def other_build(self, other: str, model: str | None = None, gen: int = 0) -> bool: ...
    def explained(self, worker: bytes, message: Explained) -> None: ...


class Fleet:
    def __init__(self, shell: FleetShell) -> None:
        self._shell = shell
        self._numbers: dict[str, int] = {}
        self._by_model: dict[str, WorkerProcess] = {}
        self._by_identity: dict[bytes, WorkerProcess] = {}

    def worker(self, model: str) -> WorkerProcess | None:
        return self._by_model.get(model)

    def workers(self) -> list[WorkerProcess]:
        return list(self._by_model.values())

    def ready(self) -> list[bytes]:
        """Identities of the workers that serve."""
        return [worker.identity for worker in self._by_model.values() if worker.ready is not None]

    def identity(self, model: str, gen: int) -> str:
        """Slots are numbered: a model id may hold bytes that do not fit a socket identity."""
        number = self._numbers.setdefault(model, len(self._numbers))
        return f"w.{number}.{gen}.0"

    # Effects

    def spawn(self, model: str, gen: int) -> None:
        identity, nonce = self.identity(model, gen), secrets.token_hex(16)
        try:
            child = Child(
                self._shell.book(model),
                self._shell.census,
                lambda how: self._exited(model, gen, how),
                command=lambda lifeline: [
                    *(sys.executable, "-P", "-m", "worker", "--control", self._shell.control_endpoint),
                    *("--identity", identity, "--nonce", nonce, "--lifeline-fd", str(lifeline)),
                    *("--log-level", self._shell.loaded.settings.server.log_level),
                ],
            )
        except OSError as e:
            log.error("%s: no process could be started: %s", model, e)
            self._shell.happened(slots.WorkerExited(model, gen, 71, None, f"no process could be started: {e}"))
            return
        log.info("%s: worker %d started (generation %d)", model, child.pid, gen)
        worker = WorkerProcess(model, gen, identity.encode(), nonce, child)
        self._by_model[model] = self._by_identity[worker.identity] = worker

    def ask_stop(self, effect: slots.AskStop) -> None:
        if worker := self._current(effect.model, effect.gen):
            worker.stopping = True
            log.info("%s: worker %d is asked to stop: %s", worker.model, worker.child.pid, effect.reason)
            self._shell.send(worker.identity, Stop(reason=effect.reason, flush_deadline_s=effect.flush_deadline_s))

    def terminate(self, model: str, gen: int) -> None:
        if worker := self._current(model, gen):
            log.info("%s: SIGTERM to worker %d", model, worker.child.pid)
            worker.child.signal(signal.SIGTERM)

    def kill(self, model: str, gen: int) -> None:
        if worker := self._current(model, gen):
            log.warning("%s: SIGKILL to worker %d", model, worker.child.pid)
            worker.child.kill()

    def dump_stacks(self, model: str, gen: int) -> None:
        if worker := self._current(model, gen):
            worker.child.signal(signal.SIGUSR1)

    def trim(self, effect: slots.TrimWorker) -> None:
        if worker := self._current(effect.model, effect.gen):
            self._shell.send(worker.identity, Trim(level=TRIM_LEVELS[effect.level], target_bytes=effect.target_bytes))

    def grant(self, effect: slots.GrantMemory) -> None:
        """To one that has not said hello its assignment says it."""
        worker = self._current(effect.model, effect.gen)
        if worker is not None and worker.greeted:
            more_soon = effect.more_soon or None
            self._shell.send(worker.identity, Grant(kv_bytes=effect.kv_bytes, hot_bytes=effect.hot_bytes, more_soon=more_soon))

    def dump_all_stacks(self) -> list[str]:
        """Models whose workers were told to write their stacks into their logs; one that has not said hello would die of it."""
        asked = [worker for worker in self._by_model.values() if worker.greeted]
        for worker in asked:
            worker.child.signal(signal.SIGUSR1)
        return [worker.model for worker in asked]

    def gateway_lost(self, gateway: str) -> None:
        for worker in self._by_model.values():
            self._shell.send(worker.identity, GatewayLost(gateway=gateway))

    # Messages

    def knows(self, identity: bytes) -> bool:
        return identity in self._by_identity

    def take(self, identity: bytes, message: Message) -> None:
        """A peer that has not proved whose child it is has nothing to say but hello."""
        worker = self._by_identity[identity]
        model, gen = worker.model, worker.gen
        match message:
            case Hello():
                self._hello(worker, message)
            case _ if not worker.greeted:
                log.error("%s: %s before hello; ignored", model, message.KIND)
            case LoadProgress():
                event = slots.WorkerProgress(model, gen, message.stage, message.done, message.total)
                self._shell.happened(event)
            case Ready():
                worker.ready = message
                log.info("%s: ready after %.1f s", model, message.load_s)
                if because := message.capabilities.get("slow_because"):
                    log.warning("%s is slow: %s", model, because)
                measured = message.weights_bytes
                self._shell.neighbourhood.join(identity)
                self._shell.happened(slots.WorkerReady(model, gen, measured, message.max_inflight))
            case Beat():
                worker.beat = message
                queued = message.running + message.waiting
                self._shell.happened(slots.WorkerBeat(model, gen, message.progress, queued, message.hot_bytes))
            case Activity() | AskTurn() | GiveTurn():
                self._shell.neighbourhood.take(identity, message)
            case Want():
                self._shell.happened(slots.WorkerWants(model, gen, message.kv_bytes))
            case Fault():
                log.error("%s: %s: %s", model, message.code, message.message)
                event = slots.WorkerFault(model, gen, message.code, message.message, message.fatal)
                self._shell.happened(event)
            case Explained():
                self._shell.explained(identity, message)
            case Bye():
                if message.dropped:
                    log.warning("%s: %d KV blocks were dropped at exit", model, message.dropped)
            case _:
                problem = Problem(code=Code.UNKNOWN_KIND, message=f"{message.KIND} is not for the supervisor")
                self._shell.send(identity, problem)

    def _hello(self, worker: WorkerProcess, hello: Hello) -> None:
        if hello.nonce != worker.nonce:
            log.error("%s: a process with a wrong nonce said hello; ignored", worker.model)
            return
        if (hello.v, hello.build) != (VERSION, build()):
            if self._shell.other_build(hello.build, worker.model, worker.gen):
                return
            message = f"this worker is build {hello.build}, the supervisor {build()}: restart omlxd"
            self._shell.happened(slots.WorkerFault(worker.model, worker.gen, Code.VERSION_MISMATCH, message, True))
            worker.child.kill()
            return
        if not worker.greeted:
            worker.greeted = True
            self._shell.happened(slots.WorkerHello(worker.model, worker.gen))
        # None: the model left the catalog meanwhile, and the machine is about to stop this worker.
        if (assignment := self._shell.assignment(worker.model, worker.gen)) is not None:
            self._shell.send(worker.identity, assignment)

    def _exited(self, model: str, gen: int, how: Exit) -> None:
        worker = self._current(model, gen)
        if worker is None:
            return
        del self._by_model[model]
        del self._by_identity[worker.identity]
        self._shell.neighbourhood.leave(worker.identity)
        log.log(logging.INFO if worker.stopping else logging.ERROR, "%s: worker %d ended: %s", model, worker.child.pid, how)
        lines = self._shell.book(model).tail(SEARCHED_LINES)
        # Stacks follow what a process that aborts says of its reason, and take more lines than are shown.
        why = [line for line in lines[:-TAIL_LINES] if any(word in line for word in slot_oom.WORDS)]
        tail = "\n".join([*why[-1:], *lines[-TAIL_LINES:]])
        killed = how.signal == signal.SIGKILL and self._shell.killed_for_memory_lately()
        self._shell.happened(slots.WorkerExited(model, gen, how.code, how.signal, tail, oom_killed=killed))

    def _current(self, model: str, gen: int) -> WorkerProcess | None:
        worker = self._by_model.get(model)
        return worker if worker is not None and worker.gen == gen else None
