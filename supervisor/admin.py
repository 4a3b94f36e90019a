"""What omlxctl and the gateway's admin routes may ask for: one method per verb, notes while it lasts, one reply at its end."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from supervisor import slot_events as slots
from supervisor.admin_operate import Operate
from supervisor.admin_reply import Refused
from supervisor.cache_verbs import CacheVerbs
from supervisor.catalog import CatalogEntry
from supervisor.catalog_edit import EditRefused, remove
from supervisor.importing import PREFIX, Import, ImportOrder
from supervisor.profile_verbs import ProfileVerbs
from supervisor.protocol import Call, Code, EventKind, Note, Reply, SlotStatus, plain
from supervisor.settings_load import SettingsInvalid, load
from supervisor.settings_reload import flags_of, take_over
from supervisor.settings_show import effective

if TYPE_CHECKING:
    from supervisor.shell import Supervisor

log = logging.getLogger("admin")


class Admin:
    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor
        self._removals: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, tuple[bytes, Call]] = {}
        """Calls whose reply depends on the slot machine, by the name the machine knows them under."""
        self._operate = Operate(supervisor, self)
        self._verbs: dict[str, Callable[[bytes, Call], None]] = {
            "ping": self._ping,
            "status": self._status,
            "models": self._models,
            "model": self._model,
            "load": self._load,
            "unload": self._unload,
            "pin": self._pin,
            "unpin": self._pin,
            "reset": self._reset,
            "restart": self._restart,
            "dump": self._operate.dump,
            "remove": self._remove,
            "import": self._import,
            "rescan": self._rescan,
            "logs": self._operate.logs,
            "config": self._config,
            "reload": self._reload,
            "cache_explain": supervisor.explaining.ask,
            "trace": supervisor.tracing.ask,
            "stop": self._stop,
            **ProfileVerbs(supervisor, self.reply, self._read_settings).verbs,
            **CacheVerbs(supervisor.store, self.reply, self.refuse).verbs,
        }

    def call(self, who: bytes, call: Call) -> None:
        verb = self._verbs.get(call.verb)
        try:
            if verb is None:
                raise Refused(Code.BAD_REQUEST, f"there is no verb {call.verb!r}")
            verb(who, call)
        except Refused as e:
            self.refuse(who, call, e.code, str(e))
        except Exception as e:  # whoever asked must not wait for ever
            log.exception("%s failed", call.verb)
            self.refuse(who, call, Code.INTERNAL, f"{call.verb} failed: {type(e).__name__}: {e}")

    def done(self, effect: slots.CallDone) -> None:
        """The machine has finished what a call asked of it."""
        if effect.call not in self._waiting:
            return  # a client has used one id for two calls
        who, call = self._waiting.pop(effect.call)
        resolved = self._supervisor.roster.named(str(call.args.get("model", "")))
        model = resolved.entry.id if resolved else str(call.args.get("model", ""))
        if call.verb == "import":
            if not effect.ok:
                self._supervisor.importer.refused(f"{PREFIX}{call.args.get('name')}", effect.code, effect.message)
        elif not effect.ok:
            self.refuse(who, call, effect.code, effect.message)
        elif call.verb == "restart":
            self._load(who, replace(call, verb="load"))
        elif call.verb == "remove":
            self._remove_files(who, call, model)
        else:
            worker = self._supervisor.fleet.worker(model)
            load_s = worker.ready.load_s if worker and worker.ready else None
            self.reply(who, call, {"model": model, "pid": worker.child.pid if worker else None, "load_s": load_s})

    def progressed(self, status: SlotStatus) -> None:
        """Everybody who waits for that model's load hears how far it is."""
        data: dict[str, object] = {"state": status.state, "stage": status.stage, "done": status.done, "total": status.total}
        for who, call in list(self._waiting.values()):
            if call.verb == "load" and self._names(call, status.id):
                self._supervisor.send(who, Note(id=call.id, data=data))

    # Verbs

    def _ping(self, who: bytes, call: Call) -> None:
        """For whoever waits long for something else and wonders."""
        self.reply(who, call, {})

    def _status(self, who: bytes, call: Call) -> None:
        self.reply(who, call, cast("dict[str, object]", plain(self._supervisor.status())))

    def _models(self, who: bytes, call: Call) -> None:
        catalog = self._supervisor.roster.catalog
        self.reply(
            who,
            call,
            {
                "models": [plain(self._supervisor.slot_status(entry.id)) for entry in catalog.models],
                "skipped": [{"path": s.shown, "reason": s.reason} for s in catalog.skipped],
                "dirs": [str(self._supervisor.paths.models), *self._supervisor.loaded.settings.model.model_dirs],
            },
        )

    def _model(self, who: bytes, call: Call) -> None:
        entry = self._entry(call)
        roster = self._supervisor.roster
        shown = cast("dict[str, object]", plain(self._supervisor.slot_status(entry.id)))
        context = "model settings" if roster.settings.of_model(entry.id).context else "config.json"
        worker = self._supervisor.fleet.worker(entry.id)
        shown["defaults"] = {
            "context": {"value": roster.context(entry), "source": context},
            **{k: {"value": plain(d.value), "source": d.source} for k, d in roster.defaults(entry).items()},
        }
        shown["capabilities"] = plain(worker.ready.capabilities) if worker and worker.ready else None
        self.reply(who, call, shown)

    def _load(self, who: bytes, call: Call) -> None:
        entry = self._entry(call)
        if entry.files.problem is not None:
            raise Refused(Code.MODEL_UNLOADABLE, f"{entry.id} cannot be served: {entry.files.problem}")
        waits = call.args.get("wait") is not False
        key = self._wait(who, call) if waits else None
        self._supervisor.happened(slots.LoadRequested(entry.id, key, bool(call.args.get("pin"))))
        if not waits:
            status = self._supervisor.slot_status(entry.id)
            self.reply(who, call, {"model": entry.id, "pid": status.pid, "state": status.state})

    def _unload(self, who: bytes, call: Call) -> None:
        model = self._entry(call).id
        self._supervisor.happened(slots.UnloadRequested(model, self._wait(who, call), bool(call.args.get("force"))))

    def _restart(self, who: bytes, call: Call) -> None:
        """A model's process finishes its requests first, and what waits is served by the new one."""
        name = str(call.args.get("name") or "")
        if not name:
            self._restart_server(who, call)
            return
        if name in self._supervisor.staff.attendants:
            self._operate.restart_attendant(who, call, name)
            return
        entry = self._entry(replace(call, args={"model": name}))
        self._supervisor.happened(slots.ResetRequested(entry.id, None))
        pinned = self._supervisor.slot_status(entry.id).pinned
        again = replace(call, verb="restart", args={"model": entry.id, "pin": pinned, "name": name})
        self._supervisor.happened(slots.UnloadRequested(entry.id, self._wait(who, again), False))

    def _restart_server(self, who: bytes, call: Call) -> None:
        """In place: same process, same port, and what the command line said still holds."""
        try:
            self._supervisor.restarting.ask()
        except SettingsInvalid as e:
            raise Refused("settings_invalid", "\n".join(e.problems)) from e
        self.reply(who, call, {"pid": os.getpid()})

    def _pin(self, who: bytes, call: Call) -> None:
        model = self._entry(call).id
        self._supervisor.happened(slots.PinRequested(model, self._wait(who, call), call.verb == "pin"))

    def _reset(self, who: bytes, call: Call) -> None:
        self._supervisor.happened(slots.ResetRequested(self._entry(call).id, self._wait(who, call)))

    def _remove(self, who: bytes, call: Call) -> None:
        """Unloads first; the files go when the worker is gone."""
        model = self._entry(call).id
        self._supervisor.happened(slots.UnloadRequested(model, self._wait(who, call), False))

    def _remove_files(self, who: bytes, call: Call, model: str) -> None:
        entry = self._supervisor.roster.catalog.get(model)
        if entry is None:
            self.refuse(who, call, Code.MODEL_NOT_FOUND, f"{model} is removed already")
            return
        task = asyncio.create_task(self._delete(who, call, entry.own_path))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _delete(self, who: bytes, call: Call, path: Path) -> None:
        """Off the loop: unlinking tens of gigabytes takes the disk a while."""
        try:
            await asyncio.to_thread(remove, self._supervisor.paths.models, path)
        except EditRefused as e:
            self.refuse(who, call, Code.NOT_ALLOWED, str(e))
        except OSError as e:
            self.refuse(who, call, Code.INTERNAL, f"{e.filename}: {e.strerror}")
        else:
            self.reply(who, call, self.rescan())

    def _import(self, who: bytes, call: Call) -> None:
        source, name = Path(str(call.args.get("file", ""))), str(call.args.get("name", ""))
        if not source.is_absolute() or not source.is_file():
            raise Refused(Code.BAD_REQUEST, f"{source} is not a file")
        if not name or "/" in name or name.startswith("."):
            raise Refused(Code.BAD_REQUEST, f"{name!r} cannot name a model")
        if self._supervisor.importer.running(name):
            raise Refused(Code.BUSY, f"{name} is being imported already")
        order = ImportOrder(source, self._supervisor.paths.models, name, str(call.args.get("dtype", "auto")))
        self._supervisor.importer.begin(
            order,
            call=self._wait(who, call),
            on_note=lambda data: self.note(who, call, data),
            on_end=lambda job: self._imported(who, call, job),
        )

    def _imported(self, who: bytes, call: Call, job: Import) -> None:
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if waiting[1] is not call}
        if job.result is None or job.error is not None:
            self.refuse(who, call, job.code, job.error or "the import failed")
            return
        self.rescan()
        self.reply(who, call, {**job.result, "model": job.order.name})

    def _rescan(self, who: bytes, call: Call) -> None:
        self.reply(who, call, self.rescan())

    def rescan(self) -> dict[str, object]:
        """Looks through the model directories again."""
        supervisor = self._supervisor
        before = {entry.id for entry in supervisor.roster.catalog.models}
        fresh = supervisor.fresh_roster()
        supervisor.change_roster(fresh)
        after = {entry.id for entry in fresh.catalog.models}
        changes: dict[str, object] = {"added": sorted(after - before), "removed": sorted(before - after)}
        if before != after:
            supervisor.publish(EventKind.CATALOG, changes)
        return changes

    def _config(self, who: bytes, call: Call) -> None:
        self.reply(who, call, effective(self._supervisor.loaded))

    def _reload(self, who: bytes, call: Call) -> None:
        self.reply(who, call, self._read_settings())

    def reload(self) -> None:
        """SIGHUP. What is wrong is logged, and the old settings stay."""
        try:
            result = self._read_settings()
        except Refused as e:
            log.error("the settings are not taken over: %s", e)
        else:
            log.info("settings reloaded: %s", result)

    def _read_settings(self) -> dict[str, object]:
        supervisor, old = self._supervisor, self._supervisor.loaded
        try:
            outcome = take_over(old, load(os.environ, flags_of(old), old.home))
            if problems := supervisor.roster_for(outcome.loaded.settings).clashes():
                raise SettingsInvalid(problems)
        except SettingsInvalid as e:
            raise Refused("settings_invalid", "\n".join(e.problems)) from e
        supervisor.loaded = outcome.loaded
        logging.getLogger().setLevel(outcome.loaded.settings.server.log_level.upper())
        self.rescan()
        supervisor.staff.settings_changed()
        result: dict[str, object] = {"changed": outcome.changed, "restart": outcome.restart}
        supervisor.publish(EventKind.SETTINGS, result)
        return result

    def _stop(self, who: bytes, call: Call) -> None:
        self.reply(who, call, {})
        self._supervisor.leave()

    # Answers

    def _entry(self, call: Call) -> CatalogEntry:
        name = str(call.args.get("model", ""))
        resolved = self._supervisor.roster.named(name)
        if resolved is None:
            known = ", ".join(e.id for e in self._supervisor.roster.catalog.models) or "none"
            raise Refused(Code.MODEL_NOT_FOUND, f"there is no model {name!r}; known: {known}")
        return resolved.entry

    def _names(self, call: Call, model: str) -> bool:
        resolved = self._supervisor.roster.named(str(call.args.get("model", "")))
        return resolved is not None and resolved.entry.id == model

    def _wait(self, who: bytes, call: Call) -> str:
        key = f"{who.decode('utf-8', 'replace')}/{call.id}"
        self._waiting[key] = (who, call)
        return key

    def note(self, who: bytes, call: Call, data: dict[str, object]) -> bool:
        return self._supervisor.send(who, Note(id=call.id, data=data))

    def reply(self, who: bytes, call: Call, result: dict[str, object]) -> None:
        self._supervisor.send(who, Reply(id=call.id, ok=True, result=result))

    def refuse(self, who: bytes, call: Call, code: str, message: str) -> None:
        self._supervisor.send(who, Reply(id=call.id, ok=False, code=code, message=message))
