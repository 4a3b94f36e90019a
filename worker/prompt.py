"""From a submitted request to token ids that fit the model, or the refusal its sender gets.

Pure but for the tokenizer it is given; runs in the pool, in the text worker as well as where the model is.
"""

from dataclasses import dataclass

from supervisor.protocol import Code, Reasoning, Submit
from worker.text import TemplateError, Text, TooLong
from worker.volatile import Volatile, without_volatile

NOTHING = Volatile()


class Refused(Exception):
    """The request can never be served as it is."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    ids: tuple[int, ...]
    max_tokens: int
    """The longest answer that still fits the context."""


def fitted_prompt(text: Text, submit: Submit, context: int, volatile: Volatile = NOTHING) -> FittedPrompt:
    """Raises Refused: template error, ids out of range, or a prompt that leaves no room for an answer."""
    try:
        ids = prompt_ids(text, submit, volatile, context)
    except TooLong as e:
        raise Refused(Code.CONTEXT_LENGTH_EXCEEDED, overflow_message(context, e.tokens, at_least=True)) from e
    if not ids:
        raise Refused(Code.BAD_REQUEST, "the prompt is empty: there is no token to start from")
    if len(ids) >= context:
        raise Refused(Code.CONTEXT_LENGTH_EXCEEDED, overflow_message(context, len(ids)))
    room = context - len(ids)
    return FittedPrompt(tuple(ids), room if submit.max_tokens is None else min(room, submit.max_tokens))


def overflow_message(context: int, prompt_tokens: int, *, at_least: bool = False) -> str:
    """Agents match this wording to decide that they must compact their conversation: it is part of the API."""
    return (
        f"This model's maximum context length is {context} tokens. However, your messages resulted in "
        f"{prompt_tokens} tokens{' or more' if at_least else ''}. Please reduce the length of the messages."
    )


def prompt_ids(text: Text, submit: Submit, volatile: Volatile = NOTHING, most_tokens: int | None = None) -> list[int]:
    """Raises Refused, and TooLong where there are clearly more than `most_tokens`."""
    prompt = submit.prompt
    if prompt.messages is not None:
        kwargs = {**reasoning_kwargs(submit.reasoning), **(submit.template_kwargs or {})}
        try:
            messages = without_volatile(prompt.messages, volatile)
            return text.encode_chat(
                messages,
                tools=submit.tools,
                template_kwargs=kwargs,
                continue_final=submit.continue_final,
                most_tokens=most_tokens,
            )
        except TemplateError as e:
            raise Refused(Code.TEMPLATE_ERROR, str(e)) from e
    if prompt.text is not None:
        return text.encode_text(prompt.text, most_tokens=most_tokens)
    if prompt.ids is not None and len(prompt.ids) == 1:
        return _checked_ids(prompt.ids[0], text.vocab_size)
    raise Refused(Code.BAD_REQUEST, "a request to a worker carries exactly one prompt: messages, a text, or one list of ids")


def _checked_ids(ids: list[int], vocab_size: int) -> list[int]:
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise Refused(Code.BAD_REQUEST, f"token id {wrong} is not in this model's vocabulary (0 to {vocab_size - 1})")
    return ids


def reasoning_kwargs(reasoning: Reasoning | None) -> dict[str, object]:
    """Effort as templates know it; a request's own template arguments win over it."""
    if reasoning is None or reasoning.effort is None:
        return {}
    if reasoning.effort == "none":
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": reasoning.effort}


def refuse_unsupported(submit: Submit) -> None:
    """What would change the answer and is not built must not be ignored. Raises Refused."""
    asked = {
        "echo in a chat": submit.echo and submit.task == "chat",
        "tool_choice": submit.tool_choice not in (None, "auto", "none"),
        "reasoning.budget": submit.reasoning is not None and submit.reasoning.budget is not None,
        "want": bool(submit.want),
        "blobs": bool(submit.blobs),
    }
    names = [name for name, is_asked in asked.items() if is_asked]
    if submit.task not in {"chat", "complete"}:
        names.append(f"task {submit.task}")
    if names:
        raise Refused(Code.UNSUPPORTED, f"not supported by this model's worker: {', '.join(names)}")
