"""The one tree of settings: what exists, its default, what it accepts, and when a change takes effect.

The flags of `omlxctl serve`, the `OMLX_*` variables, `omlxctl config show` and docs/settings.md are all generated from it.
Precedence: defaults < `$OMLX_HOME/settings.json` < environment < flags. Names follow oMLX's where they exist. Reads no file and
no environment itself: see settings_load.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

from supervisor.settings_values import (
    Size,
    auto_or,
    choice,
    each,
    one_of,
    place,
    places,
    real,
    size,
    switch,
    table,
    text,
    whole,
)

T = TypeVar("T")

YEAR_S = 366 * 86400.0

Profile = Mapping[str, object]
"""Request-time fields by name, parsed."""

Applies = Literal["live", "load", "start"]
"""A change takes effect on reload, when a model is next loaded, or when the server is next started."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the tree knows about one leaf."""

    parse: Callable[[object], object]
    help: str
    applies: Applies
    flag: str | None
    """Name of the command-line flag without dashes; None = settings file and environment only."""
    env: str | None
    many: bool
    secret: bool


def _leaf(
    default: T,
    help: str,
    parse: Callable[[object], object],
    *,
    applies: Applies = "start",
    flag: str | None = "",
    env: str | None = "",
    many: bool = False,
    secret: bool = False,
) -> T:
    return field(default=default, metadata={"setting": Setting(parse, help, applies, flag, env, many, secret)})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = _leaf("127.0.0.1", "address to listen on", text)
    port: int = _leaf(8000, "port to listen on; 0 takes a free one", whole(0, 65535))
    log_level: str = _leaf(
        "info",
        "how much the processes log (a loaded model's keeps to it until it is loaded again)",
        choice("debug", "info", "warning", "error"),
        applies="live",
    )
    cors_origins: tuple[str, ...] = _leaf(
        (), "browser origins allowed besides those on loopback (* = any)", each(text), applies="live", many=True
    )
    allowed_hosts: tuple[str, ...] = _leaf(
        (), "Host names accepted besides loopback and the bound address (* = any)", each(text), applies="live", many=True
    )
    header_patience_s: float = _leaf(
        5.0, "seconds until a stream's headers go out before its outcome is known", real(0, 600), applies="live", flag=None
    )
    keepalive_s: float = _leaf(
        10.0, "seconds of silence after which a stream gets a keep-alive; 0: never", real(0, 600), applies="live", flag=None
    )
    stay_awake: bool = _leaf(
        True, "keep the machine from falling asleep by itself while requests run or wait", switch, applies="live"
    )
    run_dir: str | None = _leaf(
        None, "directory of the sockets (default: OMLX_HOME/run); paths of ipc sockets must be short", auto_or(place)
    )


@dataclass(frozen=True, slots=True)
class CatalogSettings:
    model_dirs: tuple[str, ...] = _leaf(
        (),
        "directories with models, beside OMLX_HOME/models (flat, org/name or hub-cache layout)",
        each(place),
        applies="live",
        flag="model-dir",
        env="OMLX_MODEL_DIR",
        many=True,
    )
    preload: tuple[str, ...] = _leaf((), "models to load at start", each(text), flag="model", env="OMLX_MODEL", many=True)
    trust_remote_code: bool = _leaf(
        False, "let model directories run their own Python code when loaded", switch, applies="load"
    )
    default: str | None = _leaf(
        None,
        "model, alias or model:profile for requests that name none (default: they are refused)",
        auto_or(text),
        applies="live",
        flag="default-model",
        env="OMLX_DEFAULT_MODEL",
    )
    fallback: bool = _leaf(
        False, "requests that name an unknown model get the default one too", switch, applies="live", flag=None, env=None
    )
    profile_templates: Mapping[str, Profile] | None = _leaf(
        None,
        "profiles that every model has beside its own; models.ID.profiles may name one under a name of its own",
        auto_or(table),
        applies="live",
        flag=None,
        env=None,
    )
    ttl_s: float = _leaf(
        0.0, "seconds of idleness after which a model is unloaded (0: never)", real(0, YEAR_S), applies="live", flag="ttl"
    )


@dataclass(frozen=True, slots=True)
class MemorySettings:
    memory_tier: str = _leaf(
        "balanced",
        "how much memory is left to the system",
        choice("safe", "balanced", "aggressive", "custom"),
    )
    max_model_memory: Size | None = _leaf(None, "most memory for models, e.g. 32GB or 80% of RAM", auto_or(size))
    max_model_weights: Size | None = _leaf(
        None, "most memory for the weights of all loaded models, as part of that", auto_or(size)
    )
    max_process_memory: Size | None = _leaf(
        None, "most memory for the whole process tree: the models and the server's own processes", auto_or(size)
    )
    soft_threshold: float | None = _leaf(
        None,
        "share of RAM, or of max_process_memory, in use from which caches are trimmed (auto: 0.85, 0.9 or 0.925 by tier)",
        auto_or(real(0.01, 1)),
        applies="live",
        flag=None,
    )
    hard_threshold: float | None = _leaf(
        None,
        "share from which nothing more is loaded and idle models go (auto: half way from soft to all)",
        auto_or(real(0.01, 1)),
        applies="live",
        flag=None,
    )
    critical_threshold: float | None = _leaf(
        None,
        "share from which the largest model goes that is not pinned, busy or not (auto: half way from hard to all)",
        auto_or(real(0.01, 1)),
        applies="live",
        flag=None,
    )
    measure_s: float = _leaf(10.0, "seconds between looks at how much memory workers take", real(0.1, 3600), flag=None)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    max_concurrent_requests: int = _leaf(8, "requests that one model decodes at the same time", whole(1, 512), applies="load")
    max_concurrent_total: int | None = _leaf(
        None, "requests that all models together have at the same time, decoding or not (auto: no limit)", auto_or(whole(1))
    )
    max_queue: int = _leaf(
        256,
        "requests that may wait beyond those for one model, and where there is a total for all of them",
        whole(0),
        flag=None,
    )
    max_gap_ms: float = _leaf(
        300.0,
        "milliseconds that a stream should wait between two tokens while a prompt is prefilled; a slow machine may need more",
        real(1, 60_000),
        applies="load",
        flag=None,
    )
    self_check: bool = _leaf(
        True,
        "time a few steps of a model that was just loaded, and say when they are slower than this machine allows, and why",
        switch,
        applies="load",
        flag=None,
    )
    stalled_step_s: float = _leaf(
        60.0,
        "a worker writes the stacks of its threads into its log when one step of the model lasts that long",
        real(0.1, 86400),
        applies="load",
        flag=None,
    )
    kv_loan_s: float = _leaf(
        30.0,
        "seconds after which KV memory that was lent to a model and is not needed any more is given back",
        real(0.1, YEAR_S),
        applies="load",
        flag=None,
        env=None,
    )
    prefill_turns: str = _leaf(
        "auto",
        "auto: models that prefill at the same time take turns on the device, chunk by chunk; off: each goes at once",
        choice("auto", "off"),
        applies="load",
        flag=None,
    )
    prefill_turn_s: float = _leaf(
        10.0, "seconds after which a model that others wait for loses its turn: it must be stuck", real(0.1, 600), flag=None
    )


@dataclass(frozen=True, slots=True)
class CacheSettings:
    enabled: bool = _leaf(True, "keep KV of prompts for reuse (--no-cache turns it off)", switch, applies="load", flag=None)
    hot_cache_only: bool = _leaf(False, "keep KV in RAM only, write nothing to disk", switch, applies="load")
    hot_cache_max_size: Size | None = _leaf(
        None,
        "most RAM for cached KV of one model, as far as there is any free (auto: 1/16 of the memory budget, at most 8 GiB)",
        auto_or(size),
        applies="load",
    )
    ssd_cache_dir: str | None = _leaf(None, "where KV blocks are kept (default: OMLX_HOME/cache)", auto_or(place))
    ssd_cache_max_size: Size | None = _leaf(
        None, "disk for KV blocks of all models (auto: 10% of that disk, at most 100 GiB)", auto_or(size)
    )
    block_tokens: int = _leaf(
        0,
        "tokens per KV block (0: 256 on a GPU, 64 on the CPU); changing it starts the cache anew",
        whole(0, 4096),
        applies="load",
        flag=None,
    )
    volatile_headers: tuple[str, ...] = _leaf(
        ("x-anthropic-billing-header:",),
        "lines beginning so are removed from the head of the system prompt, as agents change them with every request",
        each(text),
        applies="load",
        flag=None,
        env=None,
    )
    volatile_markers: tuple[str, ...] = _leaf(
        ("total_tokens",),
        "elements of these names that fill a line of a system message are removed, as agents change them with every request",
        each(text),
        applies="load",
        flag=None,
        env=None,
    )
    warm_start: bool = _leaf(
        True, "a model that was just loaded reads its most recently used KV back into RAM", switch, applies="load", flag=None
    )
    ssd_dtype: str = _leaf(
        "native",
        "how KV is kept on disk: native (exact) or int8 (half the size of bf16, answers can differ)",
        choice("native", "int8"),
        applies="load",
        flag=None,
    )


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Defaults for every model; a model's own generation_config.json and its settings go before them."""

    max_tokens: int | None = _leaf(
        32_768,
        "longest answer to a request that names no length; less where the context ends first (auto: all that fits the context)",
        auto_or(whole(1)),
        applies="live",
    )
    max_tokens_limit: int | None = _leaf(
        None,
        "longest answer to any request, whatever length it names: it ends there with finish_reason length (auto: no limit)",
        auto_or(whole(1)),
        applies="live",
        flag=None,
    )
    temperature: float = _leaf(1.0, "sampling temperature", real(0, 2), applies="live")
    top_p: float = _leaf(0.95, "nucleus sampling", real(0, 1), applies="live")
    top_k: int = _leaf(0, "sample among this many tokens (0: all)", whole(0), applies="live")


@dataclass(frozen=True, slots=True)
class AuthSettings:
    api_key: str | None = _leaf(
        None, "key that requests must carry (default: none needed)", auto_or(text), applies="live", secret=True
    )


@dataclass(frozen=True, slots=True)
class LoggingSettings:
    log_dir: str | None = _leaf(None, "where log files go (default: OMLX_HOME/logs)", auto_or(place))
    log_retention_days: int = _leaf(7, "days after which old log files are removed", whole(1))


def _timer(default: float, help: str) -> float:
    return _leaf(default, help, real(0.01, 86400), flag=None)


@dataclass(frozen=True, slots=True)
class TimerSettings:
    hello_s: float = _timer(20, "a new process must report within")
    load_stall_s: float = _timer(120, "loading without progress is given up after")
    beat_lost_s: float = _timer(30, "a worker without heartbeat is killed after")
    no_progress_s: float = _timer(180, "a worker with work but without progress is killed after")
    stop_s: float = _timer(10, "a worker asked to stop gets SIGTERM after")
    term_s: float = _timer(3, "SIGTERM is followed by SIGKILL after")
    unload_drain_s: float = _timer(30, "an unload waits for running requests at most")
    fair_wait_s: float = _timer(20, "a busy model drains for a waiting one after")
    min_resident_s: float = _timer(10, "a model that has just been loaded is not evicted for")
    crash_window_s: float = _timer(300, "crashes are counted within")
    probe_after_s: float = _timer(600, "a failed model is tried once more after")
    backoff_first_s: float = _timer(0.25, "first pause after a crash")
    backoff_max_s: float = _timer(60, "longest pause after a crash")
    memory_back_s: float = _timer(10, "the memory of an unloaded model is waited for at most")
    memory_wait_s: float = _timer(30, "a load that other programs leave no memory for is refused after")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of one model: `models.<id>` in settings.json. None = not set here."""

    aliases: tuple[str, ...] = _leaf(
        (), "further names for it in requests", each(text), applies="live", flag=None, env=None, many=True
    )
    profiles: Mapping[str, Profile] | None = _leaf(
        None,
        "named sets of the live sampling settings below, served as ID:NAME by the same worker",
        auto_or(table),
        applies="live",
        flag=None,
        env=None,
    )
    profile: str | None = _leaf(
        None,
        "the profile whose values are the model's defaults (omlxctl apply sets it)",
        auto_or(text),
        applies="live",
        flag=None,
        env=None,
    )
    ttl_s: float | None = _leaf(
        None, "as in model, for this model", auto_or(real(0, YEAR_S)), applies="live", flag=None, env=None
    )
    pinned: bool | None = _leaf(
        None,
        "never unloaded to make room or for idleness, and loaded again after a crash",
        auto_or(switch),
        applies="live",
        flag=None,
        env=None,
    )
    adapters: Mapping[str, str] | None = _leaf(
        None,
        "LoRA adapters by name, each with its directory, served as ID+NAME by workers of their own",
        auto_or(places),
        applies="live",
        flag=None,
        env=None,
    )
    model_type: str | None = _leaf(
        None,
        "the architecture by mlx_lm's name, where config.json names a wrong one or none",
        auto_or(text),
        applies="load",
        flag=None,
        env=None,
    )
    context: int | None = _leaf(
        None, "shorter context than the model's own", auto_or(whole(16)), applies="load", flag=None, env=None
    )
    max_concurrent_requests: int | None = _leaf(
        None, "as in scheduler, for this model", auto_or(whole(1, 512)), applies="load", flag=None, env=None
    )
    trust_remote_code: bool | None = _leaf(
        None, "as in model, for this model", auto_or(switch), applies="load", flag=None, env=None
    )
    cache: str | None = _leaf(
        None,
        "off, ram (nothing on disk) or ssd (nothing in RAM): less than cache allows, for this model",
        auto_or(choice("off", "ram", "ssd")),
        applies="load",
        flag=None,
        env=None,
    )
    hot_cache_max_size: Size | None = _leaf(
        None, "as in cache, for this model", auto_or(size), applies="load", flag=None, env=None
    )
    ssd_dtype: str | None = _leaf(
        None, "as in cache, for this model", auto_or(choice("native", "int8")), applies="load", flag=None, env=None
    )
    draft_model: str | None = _leaf(
        None,
        "smaller model with the same tokens, by name or directory, that proposes tokens; one request at a time is served then",
        auto_or(place),
        applies="load",
        flag=None,
        env=None,
    )
    num_draft_tokens: int | None = _leaf(
        None,
        "tokens that draft_model proposes at a time (auto: 3)",
        auto_or(whole(1, 32)),
        applies="load",
        flag=None,
        env=None,
    )
    kv_bits: int | None = _leaf(
        None,
        "keep KV in this many bits, 2, 4 or 8 (auto: as the model computes it); such a model serves one request at a time",
        auto_or(one_of(2, 4, 8)),
        applies="load",
        flag=None,
        env=None,
    )
    kv_group_size: int | None = _leaf(
        None,
        "numbers that share a scale where kv_bits is set: 32, 64 or 128 (auto: 64)",
        auto_or(one_of(32, 64, 128)),
        applies="load",
        flag=None,
        env=None,
    )
    quantized_kv_start: int | None = _leaf(
        None,
        "where kv_bits is set: tokens up to which KV stays as it is, and is not cached (auto: 0)",
        auto_or(whole(0)),
        applies="load",
        flag=None,
        env=None,
    )
    max_tokens: int | None = _leaf(
        None, "longest answer to a request that names no length", auto_or(whole(1)), applies="live", flag=None, env=None
    )
    max_tokens_limit: int | None = _leaf(
        None, "longest answer to any request", auto_or(whole(1)), applies="live", flag=None, env=None
    )
    temperature: float | None = _leaf(None, "sampling temperature", auto_or(real(0, 2)), applies="live", flag=None, env=None)
    top_p: float | None = _leaf(None, "nucleus sampling", auto_or(real(0, 1)), applies="live", flag=None, env=None)
    top_k: int | None = _leaf(None, "sample among this many tokens", auto_or(whole(0)), applies="live", flag=None, env=None)
    min_p: float | None = _leaf(
        None, "least probability relative to the best token", auto_or(real(0, 1)), applies="live", flag=None, env=None
    )
    repetition_penalty: float | None = _leaf(
        None, "multiplicative penalty for repeated tokens", auto_or(real(0.01, 10)), applies="live", flag=None, env=None
    )
    presence_penalty: float | None = _leaf(
        None, "additive penalty for tokens already used", auto_or(real(-2, 2)), applies="live", flag=None, env=None
    )
    frequency_penalty: float | None = _leaf(
        None, "additive penalty per use of a token", auto_or(real(-2, 2)), applies="live", flag=None, env=None
    )
    chat_template_kwargs: Mapping[str, object] | None = _leaf(
        None, "values passed to the chat template", auto_or(table), applies="live", flag=None, env=None
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole tree, validated. `models` holds what is set per model id."""

    server: ServerSettings = ServerSettings()
    model: CatalogSettings = CatalogSettings()
    memory: MemorySettings = MemorySettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    cache: CacheSettings = CacheSettings()
    sampling: SamplingSettings = SamplingSettings()
    auth: AuthSettings = AuthSettings()
    logging: LoggingSettings = LoggingSettings()
    timers: TimerSettings = TimerSettings()
    models: Mapping[str, ModelSettings] = field(default_factory=dict[str, ModelSettings])

    @property
    def model_types(self) -> dict[str, str]:
        """By model, where the settings know better than config.json."""
        return {model: of_model.model_type for model, of_model in self.models.items() if of_model.model_type is not None}

    def of_model(self, model: str) -> ModelSettings:
        return self.models.get(model, ModelSettings())


SECTIONS: dict[str, type] = {
    "server": ServerSettings,
    "model": CatalogSettings,
    "memory": MemorySettings,
    "scheduler": SchedulerSettings,
    "cache": CacheSettings,
    "sampling": SamplingSettings,
    "auth": AuthSettings,
    "logging": LoggingSettings,
    "timers": TimerSettings,
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting with its place in the tree and the names it goes by."""

    section: str
    key: str
    default: object
    setting: Setting

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def env(self) -> str | None:
        if self.setting.env == "":
            return f"OMLX_{'CACHE_' if self.path == 'cache.enabled' else ''}{self.key.upper()}"
        return self.setting.env

    @property
    def flag(self) -> str | None:
        return self.key.replace("_", "-") if self.setting.flag == "" else self.setting.flag


def leaves_of(section: str, cls: type) -> list[Leaf]:
    return [
        Leaf(section, f.name, cast("object", f.default), cast("Setting", f.metadata["setting"]))
        for f in dataclasses.fields(cls)
    ]


def leaves() -> list[Leaf]:
    """Every setting but those per model, in the order of the documentation."""
    return [leaf for section, cls in SECTIONS.items() for leaf in leaves_of(section, cls)]


def value_of(settings: Settings, path: str) -> object:
    """The value at a key path such as `server.port`."""
    section, key = path.split(".")
    return cast("object", getattr(getattr(settings, section), key))
