"""Writes docs/settings.md from the tree of settings: `python -m supervisor.settings_docs > docs/settings.md`."""

from collections.abc import Iterator
from typing import cast

from supervisor.settings import SECTIONS, Leaf, ModelSettings, leaves_of

HEAD = """\
# Settings

Generated from `supervisor/settings.py` by `python -m supervisor.settings_docs`; do not edit.

A value comes from the first of these places that has one: a flag of `omlxctl serve`, a variable `OMLX_…`, `settings.json` in
`$OMLX_HOME` (default `~/.omlxd`), the default. `omlxctl config show` prints every value with the place it came from.

- `settings.json` holds one object per section: `{"server": {"port": 8080}}`. An unknown key is an error, and all errors are
  listed at once.
- Sizes are written `32GB`, `512MB` (powers of 1024) or as a share such as `80%`; `auto` stands for the default.
- Lists are arrays in the file, separated by commas in a variable, and given by repeating the flag.
- An unknown `OMLX_…` variable is reported and ignored. `OMLX_HOME` itself can only be a variable or `--home`.
- *Applies*: `live` on `omlxctl reload`, `load` when a model is next loaded, `start` when the server is next started.
- `omlxctl config import ~/.omlx/settings.json` takes over what has the same meaning in oMLX, and says what has not.
"""

MODELS = """\
## models

Settings of one model, under its id: `{"models": {"my-model": {"temperature": 0.2}}}`. They go before the model's own
`generation_config.json`, which goes before `sampling`; a request's own fields go before all. `omlxctl models show M` prints the
outcome. `omlxctl config set models.my-model.temperature 0.2` writes one, once the whole file is valid with it.

- A request may name a model by its id, an alias, or either with a profile: `my-model:careful`. A name that would mean two
  models is an error. A profile's own values go before the model's; it can hold `temperature`, `top_p`, `top_k`, `min_p`,
  `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `max_tokens`, `max_tokens_limit` and `chat_template_kwargs`:
  `{"models": {"my-model": {"aliases": ["gpt-4o"], "profiles": {"careful": {"temperature": 0}}}}}`.
- `model.profile_templates` holds profiles that every model has: `{"exact": {"temperature": 0}}` there serves `my-model:exact`.
  A model's own profile of that name goes before it; `{"profiles": {"mine": "exact"}}` gives it another name for one model.
- `omlxctl apply my-model careful`, or `POST /v1/models/my-model/apply` with `{"profile": "careful"}`, writes `profile`: from
  the next request on `my-model` has those defaults, by the worker that is there. `omlxctl apply my-model --none` takes it back.
- `adapters` names LoRA adapters for the model: `{"adapters": {"style": "~/adapters/style"}}` is served as `my-model+style`.
  [model-options.md](model-options.md) says what they share with their base.
- `ttl_s` counts from the last byte that a client of the model was sent. `pinned` models have none; `omlxctl pin` and `unpin`
  go before this setting until the server ends.
"""


def document() -> str:
    parts = [HEAD]
    for section, cls in SECTIONS.items():
        parts.append("\n".join([f"## {section}", "", *_table(leaves_of(section, cls)), ""]))
    parts.append("\n".join([MODELS, *_table(leaves_of("models.ID", ModelSettings)), ""]))
    return "\n".join(parts)


def _table(rows: list[Leaf]) -> Iterator[str]:
    yield "| key | default | flag | variable | applies | meaning |"
    yield "|---|---|---|---|---|---|"
    for leaf in rows:
        names = (f"`--{leaf.flag}`" if leaf.flag else "", f"`{leaf.env}`" if leaf.env else "")
        flag, env = ("`--no-cache`", names[1]) if leaf.path == "cache.enabled" else names
        meaning = leaf.setting.help + ("; repeatable" if leaf.setting.many else "")
        yield f"| `{leaf.path}` | {_default(leaf)} | {flag} | {env} | {leaf.setting.applies} | {meaning} |"


def _default(leaf: Leaf) -> str:
    match leaf.default:
        case None:
            return "" if leaf.section.startswith("models.") else "auto"
        case ():
            return "none"
        case tuple():
            return ", ".join(f"`{item}`" for item in cast("tuple[object, ...]", leaf.default))
        case bool():
            return str(leaf.default).lower()
        case float():
            return f"{leaf.default:g}"
        case _:
            return str(leaf.default)


if __name__ == "__main__":
    print(document(), end="")
