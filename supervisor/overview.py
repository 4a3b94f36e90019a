"""The whole server as everybody sees it: machine, catalog, processes and meters asked at one moment. Changes nothing."""

import os
import socket
import time
from typing import TYPE_CHECKING, cast

import msgspec

from supervisor.build import build
from supervisor.protocol import ServerStatus, SlotStatus
from supervisor.slot_view import SlotView
from supervisor.status import slot_status

if TYPE_CHECKING:
    from supervisor.shell import Supervisor


class Overview:
    def __init__(self, supervisor: "Supervisor", listener: socket.socket) -> None:
        self._supervisor = supervisor
        self._listener = listener
        self._started = time.time()

    def server(self) -> ServerStatus:
        supervisor = self._supervisor
        host, port = cast("tuple[str, int]", self._listener.getsockname()[:2])
        views = {view.model: view for view in supervisor.machine.view()}
        status = ServerStatus(
            version=build(),
            build=build(),
            pid=os.getpid(),
            started=self._started,
            host=host,
            port=port,
            home=str(supervisor.paths.home),
            charged_bytes=supervisor.machine.budget().charged_bytes,
            reserve_bytes=max(0, supervisor.budget.total_ram_bytes - supervisor.budget_bytes),
            measured_bytes=supervisor.meters.tree_bytes,
            models=[self._model(entry.id, views.get(entry.id)) for entry in supervisor.roster.catalog.models],
            children=supervisor.staff.status(),
            warnings=supervisor.all_warnings(),
            restart_needed=supervisor.restarting.needed,
            budget_bytes=0,
        )
        return msgspec.structs.replace(status, **self.memory())

    def memory(self) -> dict[str, object]:
        """The part of the status that is about memory and changes by itself."""
        supervisor, now = self._supervisor, self._supervisor.machine.budget()
        return {
            "budget_bytes": now.budget_bytes,
            "budget_most_bytes": supervisor.budget_bytes,
            "budget_detail": now.detail,
            "missing_bytes": now.missing_bytes,
            "weights_bytes": now.weights_bytes,
            "weights_limit_bytes": supervisor.machine.policy.weights_limit_bytes,
            "process_limit_bytes": supervisor.budget.tree_limit_bytes,
            "pressure": now.level.name.lower(),
            "pressure_because": now.because,
        }

    def model(self, model: str) -> SlotStatus:
        """Of a model of the catalog."""
        return self._model(model, next((view for view in self._supervisor.machine.view() if view.model == model), None))

    def _model(self, model: str, view: SlotView | None) -> SlotStatus:
        roster = self._supervisor.roster
        entry = roster.catalog.get(model)
        assert entry is not None, "only models of the catalog have a status"
        return slot_status(
            entry,
            view,
            self._supervisor.fleet.worker(model),
            settings=roster.settings.of_model(model),
            profiles=list(roster.profiles(model)),
            ttl_s=roster.ttl_s(model),
            cache=roster.cache_plan(model),
            context=roster.context(entry),
            estimate_bytes=roster.estimate_bytes(entry),
            defaults=roster.defaults(entry),
            dates=self._supervisor.dates,
        )
