"""Names that requests may use for a model: its id, its aliases, and either with a profile. Pure.

A name means one thing: an exact id goes before an alias, an alias before `model:profile`, and two meanings are an error.
"""

from collections.abc import Iterable, Mapping

from supervisor.settings import ModelSettings


def clashes(models: Mapping[str, ModelSettings], ids: Iterable[str], templates: Iterable[str] = ()) -> list[str]:
    """Every alias that is another model's name too, as a problem that names both. `ids` are the models there are."""
    owners = {name: name for name in ids}
    owners |= {f"{model}:{template}": f"{model}:{template}" for template in templates for model in list(owners)}
    for model, settings in models.items():
        for profile in settings.profiles or ():
            owners.setdefault(f"{model}:{profile}", f"{model}:{profile}")
    problems: list[str] = []
    for model, settings in models.items():
        for alias in settings.aliases:
            owner = owners.setdefault(alias, model)
            if owner != model:
                problems.append(f"models.{model}.aliases: {alias} would name both {model} and {owner}")
            elif alias == model:
                problems.append(f"models.{model}.aliases: {alias} is the model's own id")
    return problems


def parted(name: str) -> tuple[str, str] | None:
    """`model:profile` in its two parts; the model may hold colons itself."""
    model, colon, profile = name.rpartition(":")
    return (model, profile) if colon and model and profile else None
