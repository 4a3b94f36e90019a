"""The neutral request: what every HTTP dialect is turned into, and what a worker is sent.

Knows nothing of HTTP. A field that is None was not given by the client: the model's default or the engine's neutral one holds.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from supervisor.protocol import ModelRef, Prompt, Reasoning, Sampling, Submit, Task

_canonical = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    model: str
    task: Task
    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    reasoning: Reasoning | None = None
    continue_final: bool = False
    cache_salt: str | None = None
    response_format: dict[str, object] | None = None
    """As `Submit` has it."""
    logprobs: int | None = None
    echo: bool = False
    priority: int = 0
    """Larger goes first."""
    deadline_s: float | None = None
    """From its arrival: without an end by then it is ended."""
    probe: bool = False
    """Nothing is to be generated: how much of the prompt is cached?"""

    @property
    def choices(self) -> int:
        """Answers to this one prompt."""
        return self.sampling.n or 1

    def hash(self) -> str:
        """Identifies the request across retries and restarts, so that a prompt which kills workers can be told apart."""
        digest = hashlib.sha256(self.model.encode())
        digest.update(b"\0")
        digest.update(_canonical.encode(self.prompt))
        return digest.hexdigest()

    def submit(
        self, *, epoch: str, rid: str, lease: str, defaults: Mapping[str, object], deadline_ms: int | None = None
    ) -> Submit:
        """For the model's worker; `deadline_ms` is what is left.

        The request's own fields win over `defaults`, which the supervisor has merged.

        Raises:
            msgspec.ValidationError: a default has the wrong type.
        """
        under = msgspec.convert(dict(defaults), _Defaults)
        return Submit(
            epoch=epoch,
            rid=rid,
            lease=lease,
            task="count" if self.probe else self.task,
            want=["cache"] if self.probe else [],
            priority=self.priority,
            deadline_ms=deadline_ms,
            prompt=self.prompt,
            sampling=_merged(self.sampling, under),
            max_tokens=_longest(self.max_tokens, under),
            stop=list(self.stop),
            template_kwargs=self._template_kwargs(under.chat_template_kwargs),
            reasoning=self.reasoning,
            continue_final=self.continue_final,
            cache_salt=self.cache_salt,
            response_format=self.response_format,
            logprobs=self.logprobs,
            echo=self.echo,
        )

    def count(self, *, epoch: str, rid: str, model: ModelRef) -> Submit:
        """For the text worker, which counts the prompt's tokens without weights."""
        return Submit(
            epoch=epoch,
            rid=rid,
            task="count",
            model=model,
            prompt=self.prompt,
            template_kwargs=self._template_kwargs(None),
            reasoning=self.reasoning,
            continue_final=self.continue_final,
        )

    def _template_kwargs(self, under: Mapping[str, object] | None) -> dict[str, object] | None:
        return ({**(under or {}), **self.template_kwargs} or None) if self.task == "chat" else None


class _Defaults(Sampling, frozen=True, kw_only=True):
    max_tokens: int | None = None
    max_tokens_limit: int | None = None
    """Holds for what the client asks for as well."""
    chat_template_kwargs: dict[str, object] | None = None


def _merged(given: Sampling, under: Sampling) -> Sampling:
    names = Sampling.__struct_fields__
    merged = Sampling(**{name: own if (own := getattr(given, name)) is not None else getattr(under, name) for name in names})
    return msgspec.structs.replace(merged, n=given.n)  # how many answers there are is the client's to say


def _longest(asked: int | None, under: _Defaults) -> int | None:
    wanted = [under.max_tokens if asked is None else asked, under.max_tokens_limit]
    return min((tokens for tokens in wanted if tokens is not None), default=None)
