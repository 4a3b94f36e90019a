"""A day in the life of the slot machine, from a seed: clients, operators, faults and clocks on one agenda in simulated time.

The books and what has to hold are the world's (slot_world.py); here is only what happens, how often, and how long it takes.
Another kind of event is one more entry in `HAPPENINGS` and a method of that name.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random

from supervisor.pressure import Level
from supervisor.slot_events import Tick, WorkerHello, WorkerProgress
from tests.supervisor.slot_world import BUDGET, GATEWAYS, HASHES, MODELS, TIMERS, Process, World

HOUR_S = 3600.0
BEAT_S = TIMERS.beat_lost_s / 3
STEPS = 5  # of a load
NOTICED_S = 2 * (TIMERS.hello_s + TIMERS.load_stall_s + TIMERS.beat_lost_s + TIMERS.stop_s + TIMERS.term_s)
HAPPENINGS = {  # how many of each in an hour
    "request": 300.0,
    "burst": 6.0,
    "load": 4.0,
    "unload": 4.0,
    "pin": 2.0,
    "reset": 2.0,
    "catalog": 3.0,
    "meter": 40.0,
    "crash": 20.0,
    "complaint": 3.0,
    "hang": 2.0,
    "gateway": 1.0,
    "jump": 0.25,
    "pressure": 6.0,
    "wants": 20.0,
}


class Day:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World()
        self.seen: Counter[str] = Counter()
        self.idle_ticks = 0
        self._jumped_at = 0.0
        self.memory = (Level.NONE, BUDGET)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0
        self._met: set[tuple[str, int]] = set()
        self._going: set[tuple[str, int, bool]] = set()
        self._held: set[str] = set()

    # Time

    def live(self, seconds: float) -> None:
        sizes = [self.random.choice((1, 3, 4, 5, 5, 6, 8)) for _ in MODELS]
        self.world.begin(
            sizes, self.random.choice((None, "a")), self.random.choice((None, 30.0, 600.0)), self.random.choice((None, 2))
        )
        self._after(BEAT_S, self._beat)
        for kind in HAPPENINGS:
            self._plan(kind)
        while self._agenda[0][0] < seconds:
            self._step()
            self._notice()
            self.world.the_books_agree()
            self.world.the_sum_of_charges_stays_within_the_budget()
        happened = sum(self.seen.values())
        assert self.idle_ticks <= happened, f"{self.idle_ticks} ticks for nothing in a day of {happened} events"

    def end(self) -> None:
        """The world turns fair, then stops; whoever ever asked has had one answer, unless he left."""
        world = self.world
        for process in world.processes.values():
            process.silent = process.stuck = False
        world.teardown()
        unanswered = world.asked - world.gone - set(world.answers)
        assert not unanswered and set(world.answers.values()) == {1}

    def _step(self) -> None:
        """Whatever comes next: an entry of the agenda, or the machine's own deadline."""
        world = self.world
        deadline = world.machine.next_deadline()
        if deadline is not None and deadline <= self._agenda[0][0]:
            world.now = deadline
            before = world.effects
            world.do(Tick())
            self.idle_ticks += world.effects == before
        else:
            at, _, then = heapq.heappop(self._agenda)
            world.now = max(world.now, at)  # a jump of the clock leaves entries behind
            then()

    def _after(self, delay_s: float, then: Callable[[], None]) -> None:
        self._entries += 1
        heapq.heappush(self._agenda, (self.world.now + delay_s, self._entries, then))

    def _plan(self, kind: str) -> None:
        def happen() -> None:
            self.seen[kind] += 1
            getattr(self, kind)()
            self._plan(kind)

        self._after(self.random.expovariate(HAPPENINGS[kind] / HOUR_S), happen)

    def _beat(self) -> None:
        self.world.beat()
        self.world.memory_is_read(*self.memory)
        self._after(BEAT_S, self._beat)

    # What follows from what the machine did

    def _notice(self) -> None:
        if self.world.reading_wanted:
            self.world.reading_wanted = False
            late = self.random.random() < 0.1  # mostly the memory of a worker that is gone is back at once
            outside = self.random.choice((1, 4, 9)) if late else 0
            self._after(0.1, lambda: self.world.memory_is_read(*self.memory, outside))
            self.seen["memory late" if late else "memory back"] += 1
        for model, process in self.world.processes.items():
            if (model, process.gen) not in self._met:
                self._met.add((model, process.gen))
                self._come_up(model, process)
            going = (model, process.gen, process.killed)
            if (process.told_to_stop or process.dying) and going not in self._going:
                self._going.add(going)
                self._leave(model, process)
        for lease in [lease for lease in self.world.leases if lease not in self._held]:  # in their order: a seed is one day
            self._held.add(lease)
            self._after(self.random.expovariate(1 / 15.0), lambda lease=lease: self._release(lease))

    def _come_up(self, model: str, process: Process) -> None:
        fate = self.random.random()
        begun = self.random.uniform(0.5, 3)
        if fate < 0.02:
            return  # never says a word
        self._if_alive(begun, model, process, lambda: self._hello(model, process))
        if fate < 0.08:
            code = self.random.choice((1, 65, None))
            self._if_alive(begun + 1, model, process, lambda: self._exit(model, process, code))
            return
        steps = self.random.randrange(STEPS) if fate < 0.1 else STEPS  # the others stall
        pace_s = self.random.uniform(0.2, 20)
        for step in range(1, steps + 1):
            self._if_alive(begun + step * pace_s, model, process, lambda step=step: self._load_step(model, process, step))
        if steps == STEPS:
            extra = self.random.choice((-1, 0, 0, 0, 0, 1))
            self._if_alive(begun + (STEPS + 1) * pace_s, model, process, lambda: self._ready(model, process, extra))

    def _if_alive(self, delay_s: float, model: str, process: Process, then: Callable[[], None]) -> None:
        def check() -> None:
            if self.world.processes.get(model) is process and not process.silent and not process.killed:
                then()

        self._after(delay_s, check)

    def _hello(self, model: str, process: Process) -> None:
        process.phase = "hello"
        self.world.do(WorkerHello(model, process.gen))

    def _load_step(self, model: str, process: Process, step: int) -> None:
        self.world.do(WorkerProgress(model, process.gen, "weights", step, STEPS))

    def _ready(self, model: str, process: Process, extra_bytes: int) -> None:
        if not process.dying:
            self.seen["ready"] += 1
            self.world.get_ready(model, process, extra_bytes)

    def _leave(self, model: str, process: Process) -> None:
        """A few ignore what they are asked, and none ignores SIGKILL."""
        if process.killed:
            self._after(0.05, lambda: self._exit(model, process, None))
        elif self.random.random() < 0.9:
            self._if_alive(self.random.uniform(0.1, 3), model, process, lambda: self._exit(model, process, 0))

    def _exit(self, model: str, process: Process, code: int | None) -> None:
        if self.world.processes.get(model) is process:
            self.world.worker_exits(model, code)

    def _release(self, lease: str) -> None:
        if lease in self.world.leases:
            self.world.release_lease(lease, ok=self.random.random() < 0.95, twice=self.random.random() < 0.05)

    # What happens by itself

    def request(self) -> None:
        model = self.random.choices(MODELS, (8, 4, 2, 1))[0]
        patience_s = self.random.choice((None, None, 5.0, 60.0))
        if patience_s is not None:
            self.seen["deadline"] += 1
        self.world.acquire(model, self.random.choice(GATEWAYS), self.random.choice(HASHES), patience_s)
        if self.random.random() < 0.05:
            self._after(self.random.uniform(0.1, 30), lambda: self.world.abandon(self.random.randrange(100)))

    def burst(self) -> None:
        for _ in range(10):
            self.request()

    def load(self) -> None:
        self.world.load(self.random.choice(MODELS), self.random.random() < 0.2)

    def unload(self) -> None:
        self.world.unload(self.random.choice(MODELS), self.random.random() < 0.3)

    def pin(self) -> None:
        self.world.pin(self.random.choice(MODELS), self.random.random() < 0.3)

    def reset(self) -> None:
        self.world.reset(self.random.choice(MODELS))

    def catalog(self) -> None:
        model = self.random.choice(MODELS)
        size, key = self.random.randint(1, 8), self.random.choice(("", "k1"))
        self.world.catalog_changes(model, size, key, self.random.random() < 0.8)

    def meter(self) -> None:
        model = self.random.choice(MODELS)
        process = self.world.processes.get(model)
        if process is not None:
            self.world.a_meter_is_read(model, process.reserved_bytes + self.random.choice((-1, -1, 0, 0, 0, 1)))

    def crash(self) -> None:
        """Mostly of one at work: an idle worker has little to die of."""
        busy = sorted({model for _, _, model in self.world.leases.values()})
        model = self.random.choice(busy if busy and self.random.random() < 0.7 else MODELS)
        if model in self.world.processes:
            self.world.worker_exits(model, self.random.choice((1, None)))

    def complaint(self) -> None:
        self.world.worker_complains(self.random.choice(MODELS), "oom", self.random.random() < 0.5)

    def hang(self) -> None:
        model = self.random.choice(MODELS)
        process = self.world.processes.get(model)
        if process is None:
            return
        process.silent, process.stuck = self.random.choice(((True, True), (False, True)))
        if process.silent:
            self._must_be_gone(model, process)

    def _must_be_gone(self, model: str, process: Process) -> None:
        since = self.world.now
        self._after(NOTICED_S, lambda: self._is_gone(model, process, since))

    def _is_gone(self, model: str, process: Process, since: float) -> None:
        if self._jumped_at > since:  # every wait began anew then
            self._must_be_gone(model, process)
            return
        assert self.world.processes.get(model) is not process, f"{model} has hung for {NOTICED_S:g} s and nobody noticed"

    def gateway(self) -> None:
        self.world.gateway_dies(self.random.choice(GATEWAYS))

    def jump(self) -> None:
        """The machine slept, or its clock did: nobody said anything for as long as that."""
        self.world.now += self.random.choice((20.0, 300.0, 2 * HOUR_S))
        self._jumped_at = self.world.now
        self.world.do(Tick())

    def pressure(self) -> None:
        """Other programs take memory, and give it back after a while."""
        self.memory = (self.random.choice(list(Level)), self.random.choice((3, 7, BUDGET)))
        self._after(self.random.uniform(5, 120), self._relief)

    def _relief(self) -> None:
        self.memory = (Level.NONE, BUDGET)

    def wants(self) -> None:
        self.world.a_worker_wants_kv(self.random.choice(MODELS), self.random.randint(0, 4))
