"""What one HTTP request's answers cost together, as the `timings` of an answer and as the end of a log line. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.trace import Step, Trace

SHOWN = tuple(Step)
DIGITS = 6
"""Microseconds: more would be noise."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Of several answers each step took as long as for the slowest; tokens are summed up."""

    spent: Mapping[Step, float]
    total_s: float
    first_token_s: float | None
    """From the request's arrival to the first token of any answer."""
    prompt_tokens: int
    completion_tokens: int
    cached_hot: int
    cached_cold: int
    parks: int
    draft: tuple[int, int] | None
    """Tokens that a draft model proposed and how many were accepted; None without one."""
    decoded_tokens: int
    """Of the completion, without the first of each answer, which is the prefill's work."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return _rate(self.prompt_tokens - self.cached_hot - self.cached_cold, self.spent.get(Step.PREFILL, 0.0))

    @property
    def decode_tokens_per_s(self) -> float | None:
        return _rate(self.decoded_tokens, self.spent.get(Step.DECODE, 0.0))

    def body(self) -> dict[str, object]:
        steps = {f"{step}_s": round(self.spent.get(step, 0.0), DIGITS) for step in SHOWN}
        return {
            **steps,
            "first_token_s": _rounded(self.first_token_s),
            "total_s": round(self.total_s, DIGITS),
            "prefill_tokens_per_s": _rounded(self.prefill_tokens_per_s),
            "decode_tokens_per_s": _rounded(self.decode_tokens_per_s),
            "cached_ram_tokens": self.cached_hot,
            "cached_ssd_tokens": self.cached_cold,
            "parks": self.parks,
            **({} if self.draft is None else {"draft_proposed": self.draft[0], "draft_accepted": self.draft[1]}),
        }

    def line(self) -> str:
        """`prompt=7 ram=0 ssd=0 answer=30 queued=0.000 … total=1.234`; steps that were never entered are left out."""
        parts = [
            *(f"prompt={self.prompt_tokens}", f"ram={self.cached_hot}", f"ssd={self.cached_cold}"),
            f"answer={self.completion_tokens}",
            *(f"{step}={self.spent[step]:.3f}" for step in SHOWN if step in self.spent),
        ]
        parts += [] if self.first_token_s is None else [f"first={self.first_token_s:.3f}"]
        rates = {"prefill_tps": self.prefill_tokens_per_s, "decode_tps": self.decode_tokens_per_s}
        parts += [f"parks={self.parks}"] if self.parks else []
        parts += [] if self.draft is None else [f"draft={self.draft[1]}/{self.draft[0]}"]
        parts += [f"{name}={rate:.4g}" for name, rate in rates.items() if rate is not None]
        return " ".join([*(parts if self.spent else []), f"total={self.total_s:.3f}"])


def summary_of(answers: Sequence[Trace], received_at: float, now: float) -> Summary:
    spent: dict[Step, float] = {}
    for trace in answers:
        for step, took_s in trace.spent(now).items():
            spent[step] = max(took_s, spent.get(step, 0.0))
    firsts = [trace.first_token_at for trace in answers if trace.first_token_at is not None]
    ends = [now if trace.over_at is None else trace.over_at for trace in answers]
    return Summary(
        spent=spent,
        total_s=max([*ends, received_at] if answers else [now]) - received_at,
        first_token_s=min(firsts) - received_at if firsts else None,
        prompt_tokens=sum(trace.usage.prompt_tokens for trace in answers),
        completion_tokens=sum(trace.completion_tokens for trace in answers),
        cached_hot=sum(trace.usage.cached_hot for trace in answers),
        cached_cold=sum(trace.usage.cached_cold for trace in answers),
        parks=sum(trace.parks for trace in answers),
        draft=_summed([trace.draft for trace in answers if trace.draft is not None]),
        decoded_tokens=sum(trace.decoded_tokens for trace in answers),
    )


def _summed(drafts: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    return (sum(proposed for proposed, _ in drafts), sum(accepted for _, accepted in drafts)) if drafts else None


def _rate(tokens: int, took_s: float) -> float | None:
    return tokens / took_s if tokens > 0 and took_s > 0 else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
