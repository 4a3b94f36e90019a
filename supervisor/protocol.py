"""Every message between the processes, one frozen struct each, with one encode/decode pair.

Frames on a socket are `[kind][msgpack map][blob …]`. All packages import this module; it imports none of them. A field that is
None was not given, which is not the same as its default value. Unknown keys are ignored, a missing required key is a
`ProtocolError`, an unknown kind is `UnknownKind` and is answered with `Problem(code="unknown_kind")`.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, Literal, TypeVar, cast

import msgspec

VERSION = 1
"""Raised by every change that an older peer cannot read; peers that differ do not talk."""


class ProtocolError(Exception):
    """The bytes are not a message of this protocol."""


class UnknownKind(ProtocolError):
    """A well-formed frame of a kind this build does not know."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"unknown message kind {kind!r}")
        self.kind = kind


class Code(StrEnum):
    """Every outcome that is not an answer. HTTP statuses and exit codes are derived from these in one place each."""

    MODEL_NOT_FOUND = "model_not_found"
    NOT_ALLOWED = "not_allowed"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    BAD_REQUEST = "bad_request"
    BAD_SCHEMA = "bad_schema"
    TEMPLATE_ERROR = "template_error"
    UNSUPPORTED = "unsupported"
    MODEL_TOO_LARGE = "model_too_large"
    KV_TOO_LARGE = "kv_too_large"
    MODEL_UNLOADABLE = "model_unloadable"
    MODEL_UNLOADED = "model_unloaded"
    POISON = "poison"
    QUEUE_FULL = "queue_full"
    BUSY = "busy"
    MODEL_FAILED = "model_failed"
    WORKER_LOST = "worker_lost"
    OUT_OF_MEMORY = "oom"
    GPU_FAULT = "gpu_fault"
    SHUTTING_DOWN = "shutting_down"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    INTERNAL = "internal"
    UNKNOWN_KIND = "unknown_kind"
    NOT_FOUND = "not_found"
    VERSION_MISMATCH = "version_mismatch"


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of everything that travels; `KIND` is the first frame."""

    KIND: ClassVar[str]


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the values inside messages."""


# ------------------------------------------------------------------ values


class ModelRef(Part, frozen=True, kw_only=True):
    """What the supervisor knows of a model that another process needs to open it."""

    id: str
    path: str
    context: int
    kind: str = "text"
    adapter: str | None = None
    """Directory of the LoRA adapter that makes it another model."""


class CacheGrant(Part, frozen=True, kw_only=True):
    """Where a worker may keep KV blocks and how much: `dir` None means RAM only, both limits 0 mean no cache."""

    dir: str | None = None
    block: int = 0
    """Tokens per block; 0 = the worker's default for its device."""
    hot_bytes: int = 0
    write_credit: int | None = None
    """Bytes the worker may still write; None = not limited."""
    dtype: str = "native"
    """How blocks are kept on disk: "native" or "int8"."""


class Grants(Part, frozen=True, kw_only=True):
    kv_bytes: int = 0
    hot_bytes: int | None = None
    """Of the hot cache's most; None = all of it."""


class Sampling(Part, frozen=True, kw_only=True):
    """Sampling parameters; None = not given. Units as in the OpenAI API."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None


class Prompt(Part, frozen=True, kw_only=True):
    """Exactly one of the three is set."""

    messages: list[dict[str, object]] | None = None
    """Chat messages in OpenAI's shape; the worker applies the template."""
    text: str | None = None
    ids: list[list[int]] | None = None


class Reasoning(Part, frozen=True, kw_only=True):
    effort: str | None = None
    budget: int | None = None


class Usage(Part, frozen=True, kw_only=True):
    """Token counts; prompt_tokens includes both cached ones."""

    prompt_tokens: int
    completion_tokens: int
    cached_hot: int = 0
    cached_cold: int = 0
    reasoning_tokens: int = 0


class Timings(Part, frozen=True, kw_only=True):
    """Seconds spent per stage of one request, as the worker saw them: one after the other, from submit on."""

    prepare_s: float = 0.0
    """Template, tokens and grammar."""
    queued_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    """From submit to the first token."""
    decode_s: float = 0.0
    draft_proposed: int | None = None
    """Tokens that a draft model proposed for this answer; None where there is none."""
    draft_accepted: int | None = None
    parks: int = 0
    """How often it was put aside; how long that was is in the stage it was in."""


FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


class Piece(Part, frozen=True, kw_only=True):
    """One increment of output: visible text, reasoning, or part of a tool call."""

    text: str = ""
    kind: Literal["text", "reasoning", "tool_call"] = "text"
    index: int = 0
    """Which tool call, counted from 0."""
    name: str | None = None
    """Travels once, with the call's first piece."""


class Row(Part, frozen=True, kw_only=True):
    """What one engine step did for one choice of one request."""

    rid: str
    seq: int
    """Counts from 0 per (rid, choice): a gap means lost rows."""
    tokens: int
    """Completion tokens so far, cumulative."""
    choice: int = 0
    pieces: list[Piece] = []
    logprobs: list[dict[str, object]] | None = None
    """One entry per token of this row: id, token, bytes, logprob and `top`, the same of the most likely ones."""
    finish: FinishReason | None = None
    stop_string: str | None = None
    usage: Usage | None = None
    """Set in the row that carries `finish`."""
    timings: Timings | None = None
    """Set there too, and in the row of the first token."""


class SlotStatus(Part, frozen=True, kw_only=True):
    """One model as seen from outside: catalog entry and slot state together."""

    id: str
    path: str
    state: str
    kind: str = "text"
    base: str | None = None
    """Of a LoRA adapter: the model it is for, whose files are at `path`."""
    adapter: str | None = None
    """Of a LoRA adapter: where it is."""
    draft: str | None = None
    """The model that proposes tokens to it."""
    shed: list[str] = []
    """Settings of optional features that it is started without, as it died with them; until it is reset."""
    context: int = 0
    weights_bytes: int = 0
    estimate_bytes: int = 0
    charged_bytes: int = 0
    created: float = 0.0
    measured_bytes: int = 0
    """What a meter says the worker's process takes now; 0 = not measured."""
    kv_granted_bytes: int = 0
    hot_granted_bytes: int = 0
    """What its worker may use for KV and for its hot cache; what it does use is in `beat`."""
    aliases: list[str] = []
    profiles: list[str] = []
    """Served as `id:profile` by the same worker."""
    profile: str | None = None
    """The one whose values are the model's defaults."""
    pinned: bool = False
    ttl_s: float | None = None
    gen: int = 0
    pid: int | None = None
    leases: int = 0
    waiting: int = 0
    max_inflight: int = 0
    stage: str | None = None
    done: int = 0
    total: int = 0
    since: float = 0.0
    last_used: float | None = None
    restarts: int = 0
    last_error: str | None = None
    max_tokens: int | None = None
    """The longest answer to a request that names no length; never more than `context`."""
    usable: bool = True
    problem: str | None = None
    """Why a directory that looks like a model cannot be served."""
    cache: str = ""
    """What of the prefix cache it has, or why none; for people."""
    slow: str | None = None
    """Why it is slower than this machine could be, by the check at its load; None while nothing is known of that kind."""
    beat: dict[str, object] | None = None
    """The worker's last heartbeat, for status and metrics."""


class ChildStatus(Part, frozen=True, kw_only=True):
    """The gateway, the text worker, the janitor."""

    name: str
    state: str
    pid: int | None = None
    restarts: int = 0
    since: float = 0.0


class ServerStatus(Part, frozen=True, kw_only=True):
    version: str
    build: str
    pid: int
    started: float
    host: str
    port: int
    home: str
    budget_bytes: int
    """As it is now: other programs that grow make it smaller."""
    charged_bytes: int
    budget_most_bytes: int = 0
    """As it was decided at the start."""
    budget_detail: str = ""
    """How it came about, and why it is smaller now; for people."""
    missing_bytes: int = 0
    """Of workers that are gone, and not seen to be back."""
    weights_bytes: int = 0
    """Of all live workers, part of what is charged."""
    weights_limit_bytes: int | None = None
    process_limit_bytes: int | None = None
    pressure: str = "none"
    """none, soft (caches are trimmed), hard (nothing is loaded, idle models go) or critical (the largest model goes)."""
    pressure_because: str = ""
    reserve_bytes: int = 0
    """Memory that no model gets: what the tier leaves to the system, and what limits of the user's or of Metal's take away."""
    measured_bytes: int = 0
    """All processes of the server together, as metered."""
    models: list[SlotStatus] = []
    children: list[ChildStatus] = []
    warnings: list[str] = []
    restart_needed: str = ""
    """Why the server is about to start again in place; nothing is loaded until then."""


# ------------------------------------------------------------------ control.sock: workers, gateways → supervisor


class Hello(Message, frozen=True, kw_only=True):
    """First message of a child. `nonce` is the one it was started with: it proves whose child it is."""

    KIND = "hello"
    v: int
    build: str
    nonce: str
    pid: int
    rank: int = 0


class Assign(Message, frozen=True, kw_only=True):
    """s→w: what to load. The text worker gets one with `model` None."""

    KIND = "assign"
    kind: str
    gen: int
    data_endpoints: list[str]
    model: ModelRef | None = None
    max_batch: int = 8
    grants: Grants = Grants()
    cache: CacheGrant = CacheGrant()
    settings: dict[str, object] = {}
    """Model settings a worker honours (load-time ones and defaults), validated by the supervisor."""


class LoadProgress(Message, frozen=True, kw_only=True):
    """w→s: also proof that loading has not stalled."""

    KIND = "load_progress"
    stage: Literal["import", "tokenizer", "weights", "joining", "warm"]
    done: int = 0
    total: int = 0


class Ready(Message, frozen=True, kw_only=True):
    """w→s: sent only after a gateway's `welcome`, so that a grant is always routable."""

    KIND = "ready"
    context: int
    weights_bytes: int
    kv_bytes_per_token: int
    peak_bytes: int
    max_inflight: int
    load_s: float
    cache_namespace: str | None = None
    cache_layout: str | None = None
    capabilities: dict[str, object] = {}
    defaults: dict[str, object] = {}
    """Sampling defaults found in the model's generation_config.json."""


class Beat(Message, frozen=True, kw_only=True):
    """w→s at 1 Hz. `progress` counts prefill + decode + restored tokens + load bytes: it proves the engine, not the process."""

    KIND = "beat"
    seq: int
    progress: int
    busy_s: float = 0.0
    running: int = 0
    waiting: int = 0
    parked: int = 0
    """Of those that wait: begun, and put aside so that there is memory or room."""
    parks: int = 0
    resumes: int = 0
    mx_active_bytes: int = 0
    mx_cache_bytes: int = 0
    mx_peak_bytes: int = 0
    kv_bytes: int = 0
    hot_bytes: int = 0
    store_written_bytes: int = 0
    cache: dict[str, int] = {}
    draft: dict[str, int] = {}
    """Tokens that a draft model proposed, and how many of them were accepted; empty where there is none."""
    cache_trouble: str | None = None
    """Why the store on disk is not in use; None while all is well."""
    lease_tokens: dict[str, int] = {}
    turns_passed_on: int = 0
    """How often it gave the prefill turn to a neighbour that waited for it."""


class Want(Message, frozen=True, kw_only=True):
    """w→s: more memory, please; answered by `Grant`."""

    KIND = "want"
    kv_bytes: int
    hot_bytes: int


class Grant(Message, frozen=True, kw_only=True):
    KIND = "grant"
    kv_bytes: int | None = None
    more_soon: bool | None = None
    """Less KV than it asked for, but memory is being freed for it: nothing need be put aside yet."""
    hot_bytes: int | None = None
    neighbours_busy: int | None = None
    """Other workers that have requests now: from the first one on `Activity` is of interest."""
    neighbours_decoding: int | None = None
    blas_threads: int | None = None
    write_credit: int | None = None


class Activity(Message, frozen=True, kw_only=True):
    """w→s: whether anything decodes there now. When that changes, and when a first neighbour gets busy."""

    KIND = "activity"
    decoding: bool


class AskTurn(Message, frozen=True, kw_only=True):
    """w→s: there is something to prefill and the turn is elsewhere. Answered by `Turn`, sooner or later."""

    KIND = "ask_turn"
    priority: int = 0


class GiveTurn(Message, frozen=True, kw_only=True):
    """w→s: the chunk is done, the next one may prefill."""

    KIND = "give_turn"
    turn: int


TurnState = Literal["yours", "wanted", "lost"]


class Turn(Message, frozen=True, kw_only=True):
    """s→w: the worker may prefill; or finish its chunk, because another one waits; or it has lost the turn, having kept it."""

    KIND = "turn"
    turn: int
    """Never used twice: what is said of an older one is void."""
    state: TurnState


class Fault(Message, frozen=True, kw_only=True):
    """w→s: something went wrong; `fatal` means the worker is about to exit."""

    KIND = "fault"
    code: str
    message: str
    fatal: bool = False


class Bye(Message, frozen=True, kw_only=True):
    KIND = "bye"
    flushed: int = 0
    dropped: int = 0


class Trim(Message, frozen=True, kw_only=True):
    """s→w: give memory back: soft, of the RAM tier; hard, all of that, then KV of running answers, which are put aside, but for
    the last one; critical, all KV. Nothing takes its place for a while.
    """

    KIND = "trim"
    level: Literal["soft", "hard", "critical"]
    target_bytes: int = 0
    """As much as that. 0: for hard, what is cached and one answer's KV."""


class Explain(Message, frozen=True, kw_only=True):
    """s→w: what was cached of that request's prompt, and why not more? Answered by `Explained`."""

    KIND = "explain"
    rid: str
    """The x-request-id that the client got; ids of prompts begin with it."""


class Explained(Message, frozen=True, kw_only=True):
    """w→s: `lines` are for people, none if the request is not remembered. They show a little of the prompt."""

    KIND = "explained"
    rid: str
    lines: list[str] = []


class Trace(Message, frozen=True, kw_only=True):
    """s→g: where did the time of that request go? Answered by `Traced`."""

    KIND = "trace"
    call: str
    rid: str


class Traced(Message, frozen=True, kw_only=True):
    """g→s: all requests of that name, which is the client's to choose or the x-request-id; none that is remembered."""

    KIND = "traced"
    call: str
    requests: list[dict[str, object]] = []


class Stop(Message, frozen=True, kw_only=True):
    """s→w, s→g: finish within `flush_deadline_s` and exit."""

    KIND = "stop"
    reason: str
    flush_deadline_s: float


class GatewayLost(Message, frozen=True, kw_only=True):
    """s→w: that gateway is gone; cancel what it asked for."""

    KIND = "gateway_lost"
    gateway: str


class Acquire(Message, frozen=True, kw_only=True):
    """g→s: a lease on the model of that name, loading it if need be."""

    KIND = "acquire"
    rid: str
    model: str
    priority: int = 0
    deadline_ms: int | None = None
    request_hash: str = ""


class Abandon(Message, frozen=True, kw_only=True):
    """g→s: the client left before the grant."""

    KIND = "abandon"
    rid: str


OK = "ok"


class Release(Message, frozen=True, kw_only=True):
    KIND = "release"
    lease: str
    outcome: str
    """`OK` for an answer that came to its end, which clears its request of having killed a worker; else a `Code`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class GatewayBeat(Message, frozen=True, kw_only=True):
    """Every second, and at once when a first request came, a last one went, or `models` changed."""

    KIND = "gateway_beat"
    inflight: int
    """Requests of clients that are not over: also those that have no lease yet, or only have to be read."""
    models: list[str] = []
    """What they are for: a client may still read what its model has finished."""


class Queued(Message, frozen=True, kw_only=True):
    KIND = "queued"
    rid: str
    position: int
    state: str
    stage: str | None = None
    done: int = 0
    total: int = 0


class Granted(Message, frozen=True, kw_only=True):
    """`worker` is the identity on data.sock; `defaults` are what to merge under the request's own fields."""

    KIND = "granted"
    rid: str
    lease: str
    worker: str
    model: str
    profile: str | None = None
    defaults: dict[str, object] = {}


class Rejected(Message, frozen=True, kw_only=True):
    KIND = "rejected"
    rid: str
    code: str
    message: str
    retry_after_s: float | None = None


class Lost(Message, frozen=True, kw_only=True):
    """s→g: the lease is void. The request got no last row and will get none."""

    KIND = "lost"
    lease: str
    rid: str
    code: str
    message: str


class Watch(Message, frozen=True, kw_only=True):
    """any→s: a snapshot, then events, over the same socket. `topics` empty = all."""

    KIND = "watch"
    topics: list[str] = []
    since_seq: int | None = None


class Snapshot(Message, frozen=True, kw_only=True):
    KIND = "snapshot"
    seq: int
    status: ServerStatus


class EventKind(StrEnum):
    SLOT = "slot"
    """A slot changed; `data` is empty, `status` in the event carries the whole new SlotStatus."""
    CATALOG = "catalog"
    CHILD = "child"
    SETTINGS = "settings"
    LOG = "log"
    SERVER = "server"


class Event(Message, frozen=True, kw_only=True):
    KIND = "event"
    seq: int
    ts: float
    kind: str
    model: str | None = None
    gen: int = 0
    data: dict[str, object] = {}
    status: SlotStatus | None = None
    """Set for kind `slot`; None there means the model left the catalog."""


class Call(Message, frozen=True, kw_only=True, omit_defaults=False):
    """ctl→s, g→s: one admin verb; answered by any number of `Note` and one `Reply`.

    Defaults travel: a `v` that was left out would be read as the reader's own version.
    """

    KIND = "call"
    id: str
    verb: str
    args: dict[str, object] = {}
    v: int = VERSION
    build: str = ""


class Note(Message, frozen=True, kw_only=True):
    KIND = "note"
    id: str
    data: dict[str, object]


class Reply(Message, frozen=True, kw_only=True):
    KIND = "reply"
    id: str
    ok: bool
    result: dict[str, object] = {}
    code: str | None = None
    message: str | None = None


# ------------------------------------------------------------------ data.sock: gateway ↔ workers


class Join(Message, frozen=True, kw_only=True):
    """w→g on every connect, repeated until `Welcome`."""

    KIND = "join"
    v: int
    build: str
    worker: str
    model: str
    nonce: str


class Welcome(Message, frozen=True, kw_only=True):
    """g→w. `epoch` is new per gateway life; a worker that sees a new one drops the old one's requests."""

    KIND = "welcome"
    epoch: str


Task = Literal["chat", "complete", "score", "count", "embed", "rerank", "transcribe", "speak", "image"]


class Submit(Message, frozen=True, kw_only=True):
    KIND = "submit"
    epoch: str
    rid: str
    task: Task
    prompt: Prompt
    lease: str = ""
    model: ModelRef | None = None
    """Only for the text worker, which serves any model's tokenizer."""
    priority: int = 0
    deadline_ms: int | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    response_format: dict[str, object] | None = None
    """`type` json_object, json_schema, regex, choice or grammar, and under `schema`, `regex`, … what the answer must match."""
    reasoning: Reasoning | None = None
    template_kwargs: dict[str, object] | None = None
    continue_final: bool = False
    sampling: Sampling = Sampling()
    logprobs: int | None = None
    """How many of the most likely tokens to report beside each token; 0 reports that one alone."""
    echo: bool = False
    stop: list[str] = []
    max_tokens: int | None = None
    cache_salt: str | None = None
    want: list[str] = []
    blobs: list[dict[str, object]] = []


class Accepted(Message, frozen=True, kw_only=True):
    """w→g: template, tokenizing, context and admission are done, prefill is not: the HTTP status can be decided."""

    KIND = "accepted"
    epoch: str
    rid: str
    prompt_tokens: int
    max_tokens: int
    cached_hot: int = 0
    cached_cold: int = 0
    position: int = 0


class Cancel(Message, frozen=True, kw_only=True):
    KIND = "cancel"
    epoch: str
    rid: str


class Rows(Message, frozen=True, kw_only=True):
    """w→g: everything one engine step produced, all sequences in one message."""

    KIND = "rows"
    epoch: str
    rows: list[Row]


class Result(Message, frozen=True, kw_only=True):
    """w→g: the answer of a task that does not stream (count, embed, …)."""

    KIND = "result"
    epoch: str
    rid: str
    data: dict[str, object] = {}
    shape: list[int] = []
    dtype: str | None = None
    usage: Usage | None = None


class Problem(Message, frozen=True, kw_only=True):
    """Both sockets: the request with that rid failed for good, or (rid "") the peer was not understood."""

    KIND = "error"
    code: str
    message: str
    rid: str = ""
    epoch: str = ""
    retryable: bool = False


KINDS: dict[str, type[Message]] = {
    kind.KIND: kind
    for kind in (
        *(Hello, Assign, LoadProgress, Ready, Beat, Want, Grant, Fault, Bye, Trim, Explain, Explained, Stop, GatewayLost),
        *(Trace, Traced, Activity, AskTurn, GiveTurn, Turn),
        *(Acquire, Abandon, Release, GatewayBeat, Queued, Granted, Rejected, Lost),
        *(Watch, Snapshot, Event, Call, Note, Reply),
        *(Join, Welcome, Submit, Accepted, Cancel, Rows, Result, Problem),
    )
}

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()}

M = TypeVar("M", bound=Message)


def encode(message: Message, blobs: Sequence[bytes] = ()) -> list[bytes]:
    """The frames of `message`, without any routing prefix."""
    return [type(message).KIND.encode(), _encoder.encode(message), *blobs]


def decode(frames: Sequence[bytes]) -> tuple[Message, list[bytes]]:
    """The message and its blobs.

    Raises:
        UnknownKind: the first frame names a kind that is not in `KINDS`.
        ProtocolError: the frames are too few, not msgpack, lack a required key, hold a wrong type or are nested
            without end.
    """
    if len(frames) < 2:
        raise ProtocolError(f"{len(frames)} frames, at least 2 expected")
    kind = bytes(frames[0]).decode("utf-8", "replace")
    decoder = _decoders.get(kind)
    if decoder is None:
        raise UnknownKind(kind)
    try:
        return decoder.decode(frames[1]), [bytes(blob) for blob in frames[2:]]
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as e:
        raise ProtocolError(f"{kind}: {e}") from e


def plain(value: object) -> object:
    """The JSON form of a value, for `--json` and status answers. Unlike on the wire, fields at their default are there."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in cast("dict[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in cast("Sequence[object]", value)]
    return value
