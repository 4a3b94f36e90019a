"""What goes into an engine and what comes out of it: plain values, shared by the engine thread and the process shell.

Must not know MLX: the shell imports this long before the engine does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from supervisor.protocol import Activity, AskTurn, CacheGrant, GiveTurn, Grants, ModelRef, Row, Sampling

LoadStage = Literal["import", "tokenizer", "weights", "joining", "warm"]


class Matcher(Protocol):
    """llguidance's LLMatcher as an engine uses it: how far an answer has come in its grammar. Never raises for bad tokens."""

    def deep_copy(self) -> "Matcher": ...

    def consume_token(self, sampled_token: int) -> bool: ...

    def is_stopped(self) -> bool:
        """Nothing but an end token may follow."""
        ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...

    def compute_logit_bias(self) -> bytes:
        """One byte per token: 0 where it must not come next."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One request, tokenized. `prompt` plus `max_tokens` fits the context: the shell has seen to it."""

    rid: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...] = ()
    cache_salt: str = ""
    lease: str = ""
    submitted_at: float = 0.0
    """time.monotonic()"""
    priority: int = 0
    """Larger goes first; equal ones in order of arrival."""
    logprobs: int | None = None
    """How many of the most likely tokens to report beside each token; 0 reports that one alone."""
    echo: str | None = None
    """The prompt's text, to be said before the answer; with `logprobs`, each of the prompt's tokens is scored too."""
    matcher: Matcher | None = None
    """The grammar that the answer must follow, at its start; to be copied, not used."""
    prepared_at: float | None = None
    """When its prompt was all tokens; None = it came as such."""

    @property
    def scores_prompt(self) -> bool:
        return self.echo is not None and self.logprobs is not None


@dataclass(frozen=True, slots=True)
class LoadSpec:
    ref: ModelRef
    max_batch: int = 8
    grants: Grants = field(default_factory=Grants)
    cache: CacheGrant = field(default_factory=CacheGrant)
    settings: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Loaded:
    context: int
    weights_bytes: int
    kv_bytes_per_token: int
    peak_bytes: int
    load_s: float
    cache_namespace: str | None
    cache_layout: str | None
    capabilities: dict[str, object]


@dataclass(frozen=True, slots=True)
class EngineBeat:
    """One moment of an engine. `progress` only grows, and grows whenever work gets done."""

    progress: int = 0
    busy_s: float = 0.0
    """How long the present step or load stage has been running."""
    running: int = 0
    waiting: int = 0
    parked: int = 0
    """Of those that wait, how many had begun."""
    parks: int = 0
    """So often an answer was put aside, and went on later."""
    resumes: int = 0
    mx_active_bytes: int = 0
    mx_cache_bytes: int = 0
    mx_peak_bytes: int = 0
    kv_bytes: int = 0
    hot_bytes: int = 0
    store_written_bytes: int = 0
    cache: Mapping[str, int] = field(default_factory=dict[str, int])
    draft: Mapping[str, int] = field(default_factory=dict[str, int])
    cache_trouble: str | None = None
    lease_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    turns_passed_on: int = 0


class Sink(Protocol):
    """Who listens to an engine. Every method is called on the engine thread and must not block."""

    def progress(self, stage: LoadStage, done: int, total: int) -> None: ...

    def loaded(self, info: Loaded) -> None: ...

    def failed(self, code: str, message: str, exit_code: int) -> None:
        """The engine is over: the model could not be loaded, or it keeps failing. The process exits with `exit_code`."""
        ...

    def accepted(self, rid: str, cached_hot: int, cached_cold: int, position: int) -> None: ...

    def rows(self, rows: list[Row]) -> None: ...

    def want(self, kv_bytes: int) -> None:
        """All its requests together need so much KV; a `Grant` may follow."""
        ...

    def tell(self, message: Activity | AskTurn | GiveTurn) -> None:
        """What its neighbours on the same device wait for."""
        ...

    def error(self, rid: str, code: str, message: str) -> None:
        """That request is over; no row follows."""
        ...


class TextStream(Protocol):
    """`worker.text.TextStream` as a sequence uses it."""

    stopped_by: str | None

    def push(self, token: int) -> str: ...

    def close(self) -> str: ...


class Text(Protocol):
    """`worker.text.Text` as an engine uses it."""

    @property
    def context(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def stream(self, prompt_ids: Sequence[int], stops: Sequence[str]) -> TextStream: ...
