"""The machine in a random world: workers that obey, crash or hang, gateways that come and go, a catalog that changes.

The world keeps its own books of processes, leases and waiters and compares them with the machine's after every event.
When a run ends the world turns fair (workers obey, holders release), and then everyone who waits must be answered. Every rule
is also a plain method, which slot_day.py calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from supervisor.pressure import Level
from supervisor.slot import Machine
from supervisor.slot_events import (
    Abandon,
    Acquire,
    AskStop,
    CallDone,
    ClientsServed,
    Effect,
    GatewayLost,
    Granted,
    GrantMemory,
    Kill,
    LoadRequested,
    Lost,
    MemoryRead,
    ModelCost,
    ModelsChanged,
    PinRequested,
    QueuedAt,
    ReadMemory,
    Rejected,
    Release,
    ResetRequested,
    Shutdown,
    SlotEvent,
    SlotState,
    Spawn,
    Terminate,
    Tick,
    TrimWorker,
    UnloadRequested,
    WorkerBeat,
    WorkerExited,
    WorkerFault,
    WorkerHello,
    WorkerMeasured,
    WorkerProgress,
    WorkerReady,
    WorkerWants,
)
from supervisor.slot_rules import Policy, Timers

BUDGET = 10
TIMERS = Timers()
MODELS = ("a", "b", "c", "d")
HOT_BYTES = {"a": 0, "b": 2, "c": 5, "d": 1}
GATEWAYS = ("g.1", "g.2")
HASHES = ("", "h1", "h2", "h3")
GENTLE = ("evicted", "stale", "removed", "fair")  # reasons that never cost a running request
LIVE = (SlotState.SPAWNING, SlotState.LOADING, SlotState.READY, SlotState.DRAINING, SlotState.STOPPING)


@dataclass
class Process:
    gen: int
    reserved_bytes: int
    phase: str = "spawned"  # then hello, ready
    told_to_stop: bool = False
    dying: bool = False  # it has announced its own end
    killed: bool = False
    counter: int = 0
    silent: bool = False  # the whole process hangs
    stuck: bool = False  # only its engine does
    hot_bytes: int = 0  # granted for its hot cache, which fills it by its next beat
    kv_bytes: int = 0  # granted


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(TIMERS, Policy(BUDGET, max_queue=2, noise_bytes=0))
        self.max_total: int | None = None
        self.now = 0.0
        self.costs: dict[str, ModelCost] = {}
        self.processes: dict[str, Process] = {}
        self.waiting: dict[str, tuple[str, str]] = {}  # rid -> gateway, model
        self.deadlines: dict[str, float] = {}  # rid -> when its sender no longer wants it
        self.leases: dict[str, tuple[str, str, str]] = {}  # lease -> rid, gateway, model
        self.served: dict[str, frozenset[str]] = {}  # gateway -> models whose clients it has in its hands
        self.gone: set[str] = set()  # rids whose requester no longer expects an answer
        self.asked: set[str] = set()
        self.answers: Counter[str] = Counter()
        self.effects = 0
        self.calls: set[str] = set()
        self.serial = 0
        self.reading_wanted = False
        self.liars = False  # a worker measured above its charge
        self.shut_at: float | None = None
        self.broken = False  # a check has failed: the fair end would only hide which

    # The books

    def do(self, event: SlotEvent) -> None:
        self.broken = True
        self.check(event)
        self.broken = False

    def check(self, event: SlotEvent) -> None:
        effects = self.machine.handle(event, self.now)
        self.effects += len(effects)
        before = dict(self.leases)
        for effect in effects:
            self.apply(event, effect)
        lost_models = {before[effect.lease][2] for effect in effects if isinstance(effect, Lost)}
        killed = {effect.model for effect in effects if isinstance(effect, Kill)}
        for effect in effects:
            if isinstance(effect, Lost) and effect.code not in ("shutting_down", "model_unloaded"):
                dead = before[effect.lease][2] in killed or isinstance(event, WorkerExited | WorkerFault)
                dead = dead or (isinstance(event, MemoryRead) and event.level is Level.CRITICAL)
                assert dead, "only a death loses a lease"
            if isinstance(effect, AskStop) and effect.reason in GENTLE:
                assert effect.model not in lost_models, f"{effect.reason} cost a running request"
            if isinstance(effect, AskStop) and effect.reason.startswith("idle for"):
                assert not any(effect.model in models for models in self.served.values()), "a client still reads"
                assert not any(model == effect.model for _, model in self.waiting.values()), "a client waits"
        deadline = self.machine.next_deadline()
        assert deadline is None or deadline > self.now, "a deadline in the past would spin the shell"
        for due in (self.deadlines[rid] for rid in self.waiting if rid in self.deadlines):
            assert due > self.now, "a request waits beyond its deadline"
            assert deadline is not None and deadline <= due, "nobody would look when the request's deadline has come"

    def apply(self, event: SlotEvent, effect: Effect) -> None:
        match effect:
            case Spawn():
                assert effect.model not in self.processes, "two live processes for one slot"
                assert all(
                    process.phase == "ready" or process.told_to_stop or process.dying for process in self.processes.values()
                ), "two loads at once"
                view = next(view for view in self.machine.view() if view.model == effect.model)
                hot_bytes = view.hot_granted_bytes
                self.processes[effect.model] = Process(effect.gen, view.charged_bytes - hot_bytes, hot_bytes=hot_bytes)
                budget = self.machine.budget()
                assert budget.charged_bytes <= budget.budget_bytes, "a load started over the budget"
                assert budget.level < Level.HARD, "a load started while memory is short"
                assert self.shut_at is None
            case AskStop() | Terminate() | Kill():
                process = self.processes[effect.model]
                assert process.gen == effect.gen
                process.told_to_stop = True
                process.killed = process.killed or isinstance(effect, Kill)
            case TrimWorker():
                assert self.processes[effect.model].gen == effect.gen
            case GrantMemory():
                self.memory_is_granted(effect)
            case ReadMemory():
                self.reading_wanted = True
            case Granted():
                self.answer(effect.rid)
                process = self.processes[effect.model]
                assert process.gen == effect.gen and process.phase == "ready" and not process.told_to_stop
                assert effect.lease not in self.leases
                self.leases[effect.lease] = (effect.rid, effect.gateway, effect.model)
            case Rejected():
                self.answer(effect.rid)
            case QueuedAt():
                assert effect.position >= 1
            case Lost():
                assert self.leases.pop(effect.lease)[0] == effect.rid
                if effect.code == "shutting_down":
                    assert isinstance(event, Shutdown)
            case CallDone():
                self.calls.remove(effect.call)
            case _:
                pass

    def memory_is_granted(self, effect: GrantMemory) -> None:
        process, budget = self.processes[effect.model], self.machine.budget()
        assert process.gen == effect.gen
        hot_bytes = process.hot_bytes if effect.hot_bytes is None else effect.hot_bytes
        kv_bytes = process.kv_bytes if effect.kv_bytes is None else effect.kv_bytes
        if hot_bytes > process.hot_bytes or kv_bytes > process.kv_bytes:
            assert budget.charged_bytes <= budget.budget_bytes, "more was granted than there is"
            assert budget.level < (Level.SOFT if hot_bytes > process.hot_bytes else Level.HARD), "granted while memory is short"
        process.hot_bytes, process.kv_bytes = hot_bytes, kv_bytes

    def answer(self, rid: str) -> None:
        self.answers[rid] += 1
        assert self.answers[rid] == 1 and rid not in self.gone
        self.waiting.pop(rid, None)

    def forget_gateway(self, gateway: str) -> None:
        for rid in [rid for rid, (owner, _) in self.waiting.items() if owner == gateway]:
            del self.waiting[rid]
            self.gone.add(rid)
        self.leases = {lease: held for lease, held in self.leases.items() if held[1] != gateway}
        self.served.pop(gateway, None)

    def next(self, kind: str) -> str:
        self.serial += 1
        return f"{kind}{self.serial}"

    def pick(self, names: Iterable[str], number: int) -> str | None:
        return sorted(names)[number % len(names)] if (names := list(names)) else None

    # What happens

    @initialize(
        sizes=st.lists(st.sampled_from((1, 3, 4, 5, 5, 6, 8, 11)), min_size=4, max_size=4),
        pinned=st.sampled_from((None, None, "a")),
        ttl_s=st.sampled_from((None, None, 3.0, 30.0)),
        max_total=st.sampled_from((None, 1, 3)),
    )
    def begin(self, sizes: list[int], pinned: str | None, ttl_s: float | None, max_total: int | None) -> None:
        self.max_total = max_total
        self.machine = Machine(TIMERS, Policy(BUDGET, max_queue=2, noise_bytes=0, max_total=max_total))
        self.costs = {
            model: ModelCost(model, size, model == pinned, ttl_s, hot_bytes=HOT_BYTES[model])
            for model, size in zip(MODELS, sizes, strict=True)
        }
        self.do(ModelsChanged(tuple(self.costs.values())))

    @rule(model=st.sampled_from(MODELS), gateway=st.sampled_from(GATEWAYS), count=st.integers(1, 3))
    def requests_arrive(self, model: str, gateway: str, count: int) -> None:
        for _ in range(count):
            self.acquire(model, gateway, "", None)

    @rule(
        model=st.sampled_from(MODELS),
        gateway=st.sampled_from(GATEWAYS),
        request_hash=st.sampled_from(HASHES),
        patience_s=st.sampled_from((None, None, None, 0.0, 15.0, 90.0)),
    )
    def acquire(self, model: str, gateway: str, request_hash: str, patience_s: float | None) -> None:
        rid = self.next("r")
        self.asked.add(rid)
        self.waiting[rid] = (gateway, model)
        deadline_at = None if patience_s is None else self.now + patience_s
        if deadline_at is not None:
            self.deadlines[rid] = deadline_at
        self.do(Acquire(rid, gateway, model, 0, deadline_at, request_hash))

    @rule(number=st.integers(0, 99))
    def abandon(self, number: int) -> None:
        rid = self.pick({**self.waiting, **{held[0]: None for held in self.leases.values()}}, number)
        if rid is not None:
            self.waiting.pop(rid, None)
            self.gone.add(rid)
            self.leases = {lease: held for lease, held in self.leases.items() if held[0] != rid}
            self.do(Abandon(rid))

    @rule(number=st.integers(0, 99), ok=st.booleans(), twice=st.booleans())
    def release(self, number: int, ok: bool, twice: bool) -> None:
        lease = self.pick(self.leases, number)
        if lease is not None:
            self.release_lease(lease, ok, twice)

    def release_lease(self, lease: str, ok: bool, twice: bool) -> None:
        del self.leases[lease]
        for _ in range(1 + twice):
            self.do(Release(lease, ok))

    @rule(gateway=st.sampled_from(GATEWAYS), models=st.frozensets(st.sampled_from((*MODELS, "unknown"))))
    def clients_are_served(self, gateway: str, models: frozenset[str]) -> None:
        self.served[gateway] = models
        self.do(ClientsServed(gateway, models))

    @rule(gateway=st.sampled_from(GATEWAYS))
    def gateway_dies(self, gateway: str) -> None:
        self.forget_gateway(gateway)
        self.do(GatewayLost(gateway))

    @rule(model=st.sampled_from(MODELS), done=st.integers(0, 5))
    def worker_gets_further(self, model: str, done: int) -> None:
        process = self.processes.get(model)
        if process is None or process.killed:
            return
        if process.phase == "spawned":
            process.phase = "hello"
            self.do(WorkerHello(model, process.gen))
        elif process.phase == "hello" and done:
            self.do(WorkerProgress(model, process.gen, "weights", done, 5))
        elif process.phase == "hello":
            self.get_ready(model, process, 0)

    @rule()
    def workers_obey(self) -> None:
        for model, process in list(self.processes.items()):
            self.obey(model, process)

    def obey(self, model: str, process: Process) -> None:
        if process.told_to_stop or process.dying:
            self.worker_exits(model, 0)
            return
        if process.phase == "spawned":
            process.phase = "hello"
            self.do(WorkerHello(model, process.gen))
        if process.phase == "hello":
            self.get_ready(model, process, 0)

    @rule(seconds=st.sampled_from((5, 12, 25, 60)))
    def time_passes_in_an_obedient_world(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.workers_obey()
            self.beat()
            self.do(Tick())

    @rule(model=st.sampled_from(MODELS), extra_bytes=st.sampled_from((-2, 0, 0, 0, 1, 12)))
    def worker_is_ready(self, model: str, extra_bytes: int) -> None:
        process = self.processes.get(model)
        if process is not None and process.phase == "hello" and not process.killed:
            self.get_ready(model, process, extra_bytes)

    def get_ready(self, model: str, process: Process, extra_bytes: int) -> None:
        self.liars = self.liars or extra_bytes > 0
        process.phase = "ready"
        self.do(WorkerReady(model, process.gen, process.reserved_bytes + extra_bytes, max_inflight=2))

    @rule(model=st.sampled_from(MODELS), code=st.sampled_from((0, 1, 65, None)))
    def worker_exits(self, model: str, code: int | None) -> None:
        process = self.processes.pop(model, None)
        if process is not None:
            self.do(WorkerExited(model, process.gen, code, None if code is not None else 9, "last words"))

    @rule(model=st.sampled_from(MODELS), code=st.sampled_from(("oom", "gpu_fault")), fatal=st.booleans())
    def worker_complains(self, model: str, code: str, fatal: bool) -> None:
        process = self.processes.get(model)
        if process is not None:
            process.dying = process.dying or fatal
            self.do(WorkerFault(model, process.gen, code, "", fatal))

    @rule(model=st.sampled_from(MODELS), back=st.integers(1, 3))
    def an_earlier_worker_speaks(self, model: str, back: int) -> None:
        process = self.processes.get(model)
        gen = process.gen - back if process is not None else 0
        before = self.machine.view()
        self.do(WorkerExited(model, gen, 1, None, ""))
        self.do(WorkerReady(model, gen, 99, 99))
        assert self.machine.view() == before

    @rule(seconds=st.sampled_from((0.1, 1.0, 5.0, 20.0)))
    def time_passes_with_healthy_workers(self, seconds: float) -> None:
        for _ in range(int(seconds) or 1):
            self.now += min(seconds, 1.0)
            self.beat()
            self.do(Tick())

    @rule(seconds=st.sampled_from((1.0, 10.0, 40.0, 200.0, 700.0)))
    def time_passes_in_silence(self, seconds: float) -> None:
        until = self.now + seconds
        while (deadline := self.machine.next_deadline()) is not None and deadline <= until:
            self.now = deadline
            self.do(Tick())
        self.now = until
        self.do(Tick())

    @rule(seconds=st.sampled_from((100, 200)))
    def engines_hang(self, seconds: int) -> None:
        for _ in range(seconds // 20):
            self.now += 20
            self.beat(moving=False)
            self.do(Tick())

    @rule(model=st.sampled_from(MODELS), pin=st.booleans())
    def load(self, model: str, pin: bool) -> None:
        self.do(LoadRequested(model, self.call(), pin))

    @rule(model=st.sampled_from(MODELS), force=st.booleans())
    def unload(self, model: str, force: bool) -> None:
        self.do(UnloadRequested(model, self.call(), force))

    @rule(model=st.sampled_from(MODELS), pinned=st.booleans())
    def pin(self, model: str, pinned: bool) -> None:
        self.do(PinRequested(model, self.call(), pinned))

    @rule(model=st.sampled_from(MODELS), size=st.integers(0, 12))
    def a_meter_is_read(self, model: str, size: int) -> None:
        process = self.processes.get(model)
        if process is not None:
            before, hot_bytes = self.charge_of(model)
            self.liars = self.liars or size > before
            self.do(WorkerMeasured(model, process.gen, size))
            assert self.processes[model] is process, "a reading ends nobody"
            charged, hot_left_bytes = self.charge_of(model)
            raised = max(before, size)
            assert raised - (hot_bytes - hot_left_bytes) <= charged <= raised, "a meter raises a charge and never lowers it"

    def charge_of(self, model: str) -> tuple[int, int]:
        """Of a live worker, and how much its hot cache has been granted."""
        view = next(view for view in self.machine.view() if view.model == model)
        return view.charged_bytes, view.hot_granted_bytes

    @rule(
        level=st.sampled_from((*Level, Level.NONE)),
        budget=st.sampled_from((3, 7, BUDGET, BUDGET)),
        outside=st.sampled_from((0, 0, 0, 1, 4, 9)),
    )
    def memory_is_read(self, level: Level, budget: int, outside: int = 0) -> None:
        """What a worker held that is gone is back at once, late or never: `outside` is held by others or by nobody."""
        held = {model: process.reserved_bytes for model, process in self.processes.items()}
        self.reading_wanted = False
        self.do(MemoryRead(level, "", budget, "", 1 if level else 0, outside, held))

    @rule(model=st.sampled_from(MODELS), kv_bytes=st.integers(0, 6))
    def a_worker_wants_kv(self, model: str, kv_bytes: int) -> None:
        process = self.processes.get(model)
        if process is not None and process.phase == "ready" and not process.killed:
            self.do(WorkerWants(model, process.gen, kv_bytes))

    @rule(model=st.sampled_from(MODELS))
    def reset(self, model: str) -> None:
        self.do(ResetRequested(model, self.call()))

    def call(self) -> str:
        call = self.next("c")
        self.calls.add(call)
        return call

    @rule(
        model=st.sampled_from(MODELS),
        size=st.integers(1, 11),
        key=st.sampled_from(("", "k1")),
        listed=st.sampled_from((True, True, True, False)),
    )
    def catalog_changes(self, model: str, size: int, key: str, listed: bool) -> None:
        self.costs.pop(model, None)
        if listed:
            self.costs[model] = ModelCost(model, size, load_key=key, hot_bytes=HOT_BYTES[model])
        self.do(ModelsChanged(tuple(self.costs.values())))

    def beat(self, *, moving: bool = True) -> None:
        for model, process in list(self.processes.items()):
            if process.phase != "spawned" and not process.killed and not process.silent:
                process.counter += moving and not process.stuck
                leases = sum(held[2] == model for held in self.leases.values())
                self.do(WorkerBeat(model, process.gen, process.counter, leases, process.hot_bytes))

    # What holds

    @invariant()
    def the_books_agree(self) -> None:
        views = {view.model: view for view in self.machine.view()}
        assert {model for model, view in views.items() if view.state in LIVE} == set(self.processes)
        for model, view in views.items():
            assert view.leases == sum(held[2] == model for held in self.leases.values())
            assert view.waiting == sum(wanted == model for _, wanted in self.waiting.values())
            assert (view.charged_bytes > 0) == (model in self.processes)
            assert not view.leases or view.state in (SlotState.READY, SlotState.DRAINING)
            assert not view.waiting or view.state not in (SlotState.IDLE, SlotState.FAILED)
        assert len(self.waiting) == sum(view.waiting for view in views.values())
        if self.max_total is not None:
            assert len(self.leases) <= self.max_total and len(self.leases) + len(self.waiting) <= self.max_total + 2
        assert sum(view.state in (SlotState.SPAWNING, SlotState.LOADING) for view in views.values()) <= 1

    @invariant()
    def the_sum_of_charges_stays_within_the_budget(self) -> None:
        charged = self.machine.budget().charged_bytes
        self.liars = self.liars and charged > BUDGET  # once repaid it has to hold again
        assert charged == sum(view.charged_bytes for view in self.machine.view())
        assert sum(process.reserved_bytes for process in self.processes.values()) <= BUDGET
        assert charged <= BUDGET or self.liars

    # The fair end

    def teardown(self) -> None:
        if self.broken:
            return
        self.memory_is_read(Level.NONE, BUDGET)
        self.be_fair(lambda: not self.waiting and not self.calls)
        assert not self.waiting, f"stranded: {self.waiting}\n{self.machine.view()}"
        assert not self.calls
        self.shut_at = self.now
        self.do(Shutdown())
        assert not self.leases and not self.waiting
        while not self.machine.stopped and self.now < self.shut_at + 20:
            self.now += 1
            self.do(Tick())
            for model in [model for model, process in self.processes.items() if process.killed]:
                self.worker_exits(model, None)
        assert self.machine.stopped and not self.processes

    def be_fair(self, done) -> None:
        for _ in range(700):
            if done():
                return
            for model, process in list(self.processes.items()):
                self.obey(model, process)
            for lease in list(self.leases):
                if self.leases.pop(lease, None) is not None:
                    self.do(Release(lease, True))
            self.now += 1
            self.beat()
            self.do(Tick())
