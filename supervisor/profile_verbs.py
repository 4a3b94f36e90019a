"""The admin verb `apply`: makes a profile the defaults of its model, for good and at once; its worker never hears of it."""

from collections.abc import Callable, Mapping
from typing import Protocol

from supervisor.admin_reply import Refused
from supervisor.protocol import Call, Code, plain
from supervisor.roster import Roster
from supervisor.settings_edit import set_value
from supervisor.settings_load import Loaded, SettingsInvalid
from supervisor.settings_lock import NotWritten

NONE = ""
"""In place of a profile's name: the model's own defaults again."""
LOCK_WAIT_S = 1.0
"""The loop waits with it, and an omlxctl that was stopped in the middle of a change must not stop the server."""


class ProfileShell(Protocol):
    loaded: Loaded
    roster: Roster


class ProfileVerbs:
    def __init__(
        self,
        shell: ProfileShell,
        reply: Callable[[bytes, Call, dict[str, object]], None],
        read_settings: Callable[[], Mapping[str, object]],
    ) -> None:
        """`read_settings` takes over what settings.json says now; raises `Refused`."""
        self._shell = shell
        self._reply = reply
        self._read_settings = read_settings
        self.verbs: dict[str, Callable[[bytes, Call], None]] = {"apply": self._apply}

    def _apply(self, who: bytes, call: Call) -> None:
        """`model` may be `model:profile`; `profile` goes before what that says."""
        name = str(call.args.get("model", ""))
        resolved = self._shell.roster.named(name)
        if resolved is None:
            raise Refused(Code.MODEL_NOT_FOUND, f"there is no model or profile {name!r}; see: omlxctl models")
        model, profile = resolved.entry.id, call.args.get("profile", resolved.profile)
        if not isinstance(profile, str):
            raise Refused(Code.BAD_REQUEST, f"which profile is to be applied to {model}? {self._choice(model)}")
        if profile != NONE and profile not in self._shell.roster.profiles(model):
            raise Refused("not_found", f"{model} has no profile {profile!r}; {self._choice(model)}")
        try:
            set_value(self._shell.loaded.home, f"models.{model}.profile", profile or None, wait_s=LOCK_WAIT_S)
        except SettingsInvalid as e:
            raise Refused("settings_invalid", "\n".join(e.problems)) from e
        except (NotWritten, OSError) as e:
            raise Refused(Code.INTERNAL, str(e)) from e
        self._read_settings()
        roster = self._shell.roster
        entry = roster.catalog.get(model)
        defaults = roster.defaults(entry) if entry is not None else {}
        shown = {key: {"value": plain(d.value), "source": d.source} for key, d in defaults.items()}
        self._reply(who, call, {"model": model, "profile": profile or None, "defaults": shown})

    def _choice(self, model: str) -> str:
        has = self._shell.roster.profiles(model)
        return f"it has {', '.join(has)}" if has else "it has none; models.ID.profiles in settings.json are its own"
