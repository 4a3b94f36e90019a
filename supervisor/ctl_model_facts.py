"""What `omlxctl models show` says of one model: its files, its state, how fast it runs. `--json` has all there is."""

from collections.abc import Mapping
from typing import cast

from supervisor import ctl_terminal as terminal
from supervisor.protocol import SlotStatus


def facts_of(slot: SlotStatus, capabilities: Mapping[str, object]) -> dict[str, str]:
    """By name, in the order in which they are shown. `capabilities` are what its worker said when it was ready."""
    return {
        "model": slot.id,
        "path": slot.adapter or slot.path,
        **({"adapter of": f"{slot.base} ({slot.path})"} if slot.base else {}),
        "state": slot.state if slot.usable else f"unusable: {slot.problem}",
        "context": f"{slot.context} tokens",
        "weights": terminal.size(slot.weights_bytes),
        **({"draft model": _draft(slot)} if slot.draft else {}),
        **({"without": f"{' and '.join(slot.shed)}, as it died twice: omlxctl reset {slot.id}"} if slot.shed else {}),
        **({"prefix cache": slot.cache} if slot.cache else {}),
        **({"process": f"pid {slot.pid}, {terminal.size(slot.charged_bytes)} given"} if slot.pid else {}),
        **_speed(capabilities),
        **({"slow": slot.slow} if slot.slow else {}),
        **({"aliases": ", ".join(slot.aliases)} if slot.aliases else {}),
        **({"profiles": ", ".join(f"{slot.id}:{name}" for name in slot.profiles)} if slot.profiles else {}),
        **({"applied": f"{slot.id}:{slot.profile} gives its defaults"} if slot.profile else {}),
        **({"pinned": "yes"} if slot.pinned else {"unloaded after": f"{slot.ttl_s:g} s idle"} if slot.ttl_s else {}),
        **({"last error": slot.last_error} if slot.last_error else {}),
    }


def _draft(slot: SlotStatus) -> str:
    counts = cast("dict[str, int]", (slot.beat or {}).get("draft") or {})
    proposed = counts.get("proposed", 0)
    return f"{slot.draft}, {counts.get('accepted', 0)} of {proposed} tokens accepted" if proposed else str(slot.draft)


def _speed(capabilities: Mapping[str, object]) -> dict[str, str]:
    """By the check at its load, where there was time for one."""
    measured = cast("Mapping[str, float | None]", capabilities.get("self_check") or {})
    token_s, ratio = measured.get("decode_s"), measured.get("decode_ratio")
    if not token_s or not ratio:
        return {}
    beside = f"{ratio:.1f} times what reading its weights takes"
    return {"speed": f"{token_s * 1000:.1f} ms per token when it was loaded, {beside}"}
