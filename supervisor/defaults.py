"""What a request gets when it does not say. Pure.

profile > profile that was applied to the model > model settings > generation_config.json > server settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

from supervisor.settings import ModelSettings, SamplingSettings

Source = Literal["profile", "applied profile", "model settings", "generation_config.json", "server settings"]

FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "max_tokens_limit", "chat_template_kwargs"),
)


@dataclass(frozen=True, slots=True)
class Default:
    value: object
    source: Source


NO_PROFILE: Mapping[str, object] = MappingProxyType({})


def defaults_of(
    model: ModelSettings,
    generation: Mapping[str, object],
    server: SamplingSettings,
    profile: Mapping[str, object] = NO_PROFILE,
    applied: Mapping[str, object] = NO_PROFILE,
) -> dict[str, Default]:
    """The default of every field that has one, with the place it comes from."""
    found: dict[str, Default] = {}
    for name in FIELDS:
        places: tuple[tuple[Source, object], ...] = (
            ("profile", profile.get(name)),
            ("applied profile", applied.get(name)),
            ("model settings", getattr(model, name, None)),
            ("generation_config.json", generation.get(name)),
            ("server settings", getattr(server, name, None)),
        )
        for source, value in places:
            if value is not None:
                found[name] = Default(value, source)
                break
    if (kwargs := found.get("chat_template_kwargs")) is not None and kwargs.source in ("profile", "applied profile"):
        tables = (model.chat_template_kwargs, applied.get("chat_template_kwargs"), profile.get("chat_template_kwargs"))
        whole = {key: value for table in tables if table for key, value in cast("Mapping[str, object]", table).items()}
        found["chat_template_kwargs"] = Default(whole, kwargs.source)
    return found


def longest_answer(defaults: Mapping[str, Default], context: int) -> int:
    """In tokens, of a request that names no length and has hardly a prompt."""
    values = [defaults[name].value for name in ("max_tokens", "max_tokens_limit") if name in defaults]
    return min([context, *(value for value in values if isinstance(value, int))])
