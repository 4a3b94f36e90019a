"""Which request fields the OpenAI dialect honours, takes without effect, and refuses: three lists per endpoint.

docs/openai-fields.md shows the same lists; a test compares. A field in none of them is ignored, counted and named in the
response header `x-omlxd-ignored`, so that nothing is ignored in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors import InvalidRequest
from supervisor.protocol import Code


@dataclass(frozen=True, slots=True)
class Fields:
    honoured: frozenset[str]
    harmless: frozenset[str]
    """Clients send them; they change nothing about an answer given here."""
    unsupported: Mapping[str, tuple[object, ...]]
    """They would change the answer: refused by name, unless set to one of these values, which ask for what happens anyway."""

    def ignored(self, body: Mapping[str, object]) -> list[str]:
        """The names nobody knows; raises `InvalidRequest` for a field that cannot be honoured."""
        unknown: list[str] = []
        for name, value in body.items():
            if name in self.unsupported:
                if value not in self.unsupported[name]:
                    raise InvalidRequest(f"{name!r} is not supported by this server.", param=name, code=Code.UNSUPPORTED)
            elif name not in self.honoured and name not in self.harmless:
                unknown.append(name)
        return unknown


_SAMPLING = frozenset(
    {
        *("model", "stream", "stream_options", "stop", "seed", "max_tokens", "logit_bias", "cache_salt", "timings"),
        *("temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("n", "logprobs", "min_tokens", "ignore_eos", "xtc_probability", "xtc_threshold"),
        *("priority", "deadline_s"),
        *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)
_HARMLESS = frozenset(
    {
        *("store", "metadata", "user", "safety_identifier", "service_tier", "verbosity", "client_metadata", "include"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "obfuscation", "moderation"),
        *("context_management", "diagnostics", "speed", "inference_geo"),
    }
)

CHAT = Fields(
    honoured=_SAMPLING
    | {"messages", "max_completion_tokens", "chat_template_kwargs", "reasoning_effort"}
    | {"continue_final_message", "add_generation_prompt", "top_logprobs"},
    harmless=_HARMLESS | {"parallel_tool_calls"},
    unsupported={
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "audio": (None,),
        "modalities": (None, [], ["text"]),
        "prediction": (None,),
        "web_search_options": (None,),
        "thinking_budget": (None,),
    },
)

COMPLETIONS = Fields(
    honoured=_SAMPLING | {"prompt", "echo"},
    harmless=_HARMLESS,
    unsupported={
        "suffix": (None, ""),
        "best_of": (None, 1),
    },
)
