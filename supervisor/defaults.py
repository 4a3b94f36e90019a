"""What a request gets when it does not say: profile > model settings > generation_config.json > server settings. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

from supervisor.settings import ModelSettings, SamplingSettings

Source = Literal["profile", "model settings", "generation_config.json", "server settings"]

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
) -> dict[str, Default]:
    """The default of every field that has one, with the place it comes from."""
    found: dict[str, Default] = {}
    for name in FIELDS:
        places: tuple[tuple[Source, object], ...] = (
            ("profile", profile.get(name)),
            ("model settings", getattr(model, name, None)),
            ("generation_config.json", generation.get(name)),
            ("server settings", getattr(server, name, None)),
        )
        for source, value in places:
            if value is not None:
                found[name] = Default(value, source)
                break
    if (own := profile.get("chat_template_kwargs")) and model.chat_template_kwargs:
        found["chat_template_kwargs"] = Default({**model.chat_template_kwargs, **cast("Mapping[str, object]", own)}, "profile")
    return found


def longest_answer(defaults: Mapping[str, Default], context: int) -> int:
    """In tokens, of a request that names no length and has hardly a prompt."""
    values = [defaults[name].value for name in ("max_tokens", "max_tokens_limit") if name in defaults]
    return min([context, *(value for value in values if isinstance(value, int))])
