"""Token counts as OpenAI's `usage` object: prompt_tokens includes the cached ones, completion_tokens the reasoning ones."""

from collections.abc import Iterable

from supervisor.protocol import Usage


def usage_body(usages: Iterable[Usage]) -> dict[str, object]:
    """The sum over all choices."""
    prompt = completion = cached = reasoning = 0
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        cached += usage.cached_hot + usage.cached_cold
        reasoning += usage.reasoning_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
