"""A model's chat template: conversation in, prompt text out, equal to what transformers' `apply_chat_template` renders.

Templates are code from strangers: they run in Jinja's immutable sandbox and see plain JSON values only. What a template
refuses (a system role, two user turns in a row) is offered again in a shape it may take before the client gets its error.
"""

import functools
import itertools
from collections.abc import Callable, Mapping

import jinja2

from worker import conversation
from worker.conversation import Messages, UnsupportedPart
from worker.template_sandbox import compile_template

CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_MARK "
PROBE = "a text that no template has"
MAX_RENDERED_CHARS = 64 << 20
"""Four times the text a request may hold. Tokenizing a runaway template's 600 MB took minutes and every other prompt's turn."""
Spelled = tuple[tuple[str, str], ...]
"""Special tokens by name, of which templates make text by `+`: without them some render nothing."""
OURS = frozenset({"messages", "tools", "add_generation_prompt"})

# Whatever a template written for other inputs can run into.
RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateError(Exception):
    """This conversation cannot be made into a prompt for this model; the message is for the client."""


class ChatTemplate:
    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._special_tokens = special_tokens
        self._spelled = tuple(special_tokens.items())

    def render(
        self, messages: Messages, tools: list[dict[str, object]] | None, kwargs: Mapping[str, object], *, continue_final: bool
    ) -> str:
        """The prompt text. With `continue_final` it ends inside the last message instead of opening a new one.

        Raises TemplateError.
        """
        if taken := OURS & kwargs.keys():
            raise TemplateError(f"chat_template_kwargs may not set {', '.join(sorted(taken))}")
        template = self._template(bool(tools))
        try:
            given = conversation.normalised(messages, as_parts=_wants_parts(template, self._spelled))
        except UnsupportedPart as e:
            raise TemplateError(str(e)) from e
        if _misplaces_later_system(template, self._spelled):
            given = conversation.with_later_system_as_user(given)
        variables = {**self._special_tokens, **kwargs, "tools": tools or None}
        finish = _continued if continue_final else _complete
        return _first_that_renders(given, lambda shaped: finish(template, shaped, variables))

    def _template(self, with_tools: bool) -> jinja2.Template:
        if not self._sources:
            raise TemplateError("this model has no chat template: use /v1/completions with a plain text prompt")
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        source = self._sources.get(name)
        if source is None:
            names = ", ".join(sorted(self._sources))
            raise TemplateError(f"this model has no default chat template (it has: {names}): use /v1/completions")
        try:
            return compile_template(source)
        except jinja2.TemplateError as e:
            raise TemplateError(f"this model's chat template is broken: {e}") from e


def _first_that_renders(given: Messages, render: Callable[[Messages], str]) -> str:
    """As given if the template takes it; else in the other shapes; if none is taken, the error for what was given."""
    first_error: Exception | None = None
    tried: list[Messages] = []
    for shape, arguments in itertools.product(SHAPES, ARGUMENTS):
        shaped = arguments(shape(given))
        if shaped in tried:
            continue
        tried.append(shaped)
        try:
            return render(shaped)
        except RENDER_ERRORS as e:
            first_error = first_error or e
    raise TemplateError(f"the model's chat template refused this conversation: {first_error}") from first_error


def _as_given(messages: Messages) -> Messages:
    return messages


SHAPES = (
    _as_given,
    conversation.with_later_system_as_user,
    conversation.alternating,
    conversation.without_system,
)
ARGUMENTS = (_as_given, conversation.with_text_arguments)
"""Of tool calls, in each of the shapes."""


def _complete(template: jinja2.Template, messages: Messages, variables: Mapping[str, object]) -> str:
    return _rendered(template, {**variables, "messages": messages, "add_generation_prompt": True})


def _rendered(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    """Stops a template that runs away while it is still at it. Raises TemplateError for one, and the template's own errors."""
    pieces: list[str] = []
    chars = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        chars += len(piece)
        if chars > MAX_RENDERED_CHARS:
            raise TemplateError(
                f"the model's chat template makes more than {MAX_RENDERED_CHARS} characters of this conversation"
            )
    return _well_formed("".join(pieces))


def _well_formed(text: str) -> str:
    """Halves of surrogate pairs, as an emoji cut in two leaves in the JSON of tool arguments, are no text: U+FFFD for each."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _continued(template: jinja2.Template, messages: Messages, variables: Mapping[str, object]) -> str:
    """Marks the end of the last message, renders, and cuts at the mark."""
    marked, final = _with_mark(messages)
    rendered = _rendered(template, {**variables, "messages": marked, "add_generation_prompt": False})
    mark = CONTINUE_MARK.strip()
    if mark not in rendered or final.strip() not in rendered:
        raise ValueError("it does not render the final message as given, so it cannot be continued")
    at = rendered.rindex(mark)
    kept = rendered[at:].startswith(CONTINUE_MARK)  # else the template trims messages, and the end must be trimmed too
    return rendered[:at] if kept else rendered[:at].rstrip()


def _with_mark(messages: Messages) -> tuple[Messages, str]:
    final = messages[-1] if messages else {}
    content = final.get("content")
    if isinstance(content, str) and content:
        return [*messages[:-1], {**final, "content": content + CONTINUE_MARK}], content
    if isinstance(content, list) and content:
        text = str(content[-1]["text"])  # pyright: ignore[reportUnknownArgumentType]  # normalised() made it
        return [*messages[:-1], {**final, "content": [{"type": "text", "text": text + CONTINUE_MARK}]}], text
    raise ValueError("the final message has no content to continue")


@functools.lru_cache(maxsize=64)
def _wants_parts(template: jinja2.Template, special_tokens: Spelled) -> bool:
    """Whether it shows a message only when its content is a list of parts. Most that take parts take strings as well."""
    as_text: Messages = [{"role": "user", "content": PROBE}]
    as_parts: Messages = [{"role": "user", "content": [{"type": "text", "text": PROBE}]}]
    return not _shows_probe(template, as_text, special_tokens) and _shows_probe(template, as_parts, special_tokens)


@functools.lru_cache(maxsize=64)
def _misplaces_later_system(template: jinja2.Template, special_tokens: Spelled) -> bool:
    """Whether it shows a later system message before the turns that came first, as DeepSeek's does, or not at all.

    Agents send such notes between the turns: each one would change the prompt from its beginning on.
    """
    turns = [("user", "1st"), ("assistant", "a second turn"), ("system", PROBE), ("user", "4th")]
    as_parts = _wants_parts(template, special_tokens)
    talk: Messages = [{"role": r, "content": [{"type": "text", "text": t}] if as_parts else t} for r, t in turns]
    try:
        shown = _complete(template, talk, dict(special_tokens))
    except RENDER_ERRORS:
        return False  # it says so, and is offered other shapes
    return 0 <= shown.find("a second turn") > shown.find(PROBE)


def _shows_probe(template: jinja2.Template, messages: Messages, special_tokens: Spelled) -> bool:
    try:
        return PROBE in _complete(template, messages, dict(special_tokens))
    except RENDER_ERRORS:
        return False
