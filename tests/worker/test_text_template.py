"""Chat templates render what transformers renders; what a template refuses is offered again in a shape it takes."""

import json
from pathlib import Path

import pytest

from tests.stands import tokenizer_models
from worker.text import TemplateError, Text

Messages = list[dict[str, object]]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What the templates of Llama 3, Qwen 3, Mistral, Gemma and Command R are made of, each construct once.
WITH_TOOLS = """
{{- bos_token }}
{%- set today = date_string if date_string is defined else strftime_now("%Y") %}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '</tools>' }}
    {{- tools | tojson(indent=4) }}
{%- endif %}
{%- set ns = namespace(turns=0, last='') %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' ~ call.function.name ~ ' ' ~ call.function.arguments | tojson ~ '</tool_call>' }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {%- if message.reasoning_content is defined %}
        {{- '<think>' + message.reasoning_content | trim + '</think>' }}
    {%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- message.role ~ ': ' ~ message.content ~ ' (' ~ ns.turns ~ ')' }}
    {% generation %}{{ '.' }}{% endgeneration %}
    {%- if ns.turns > 20 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}
{%- endif %}
    trailing {{ today }}
"""
TRIMS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ALTERNATES = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<{{ m['role'] }}>{{ system if loop.first else '' }}{{ m['content'] | trim }}</>{% endfor %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + ALTERNATES
PARTS_ONLY = (
    "{% for m in messages %}{{ m['role'] }}:{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %};{% endfor %}"
)

TALK: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Is 1 < 2 & "so on"? é 🙂'},
    {"role": "assistant", "content": "Yes.", "reasoning_content": " one is less "},
    {"role": "user", "content": "  And 3?  "},
]
TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "<b>é</b>", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL: Messages = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]


def model(path: Path, template: object) -> Path:
    tokenizer_models.byte_level(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return path


def opened(path: Path, template: object) -> Text:
    return Text.open(model(path, template))


def rendered(text: Text, messages: Messages, **options: object) -> str:
    """The prompt with its special tokens, read back from the ids."""
    return text._tokenizer.decode(text.encode_chat(messages, **options), skip_special_tokens=False)  # pyright: ignore


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS, TRIMS, tokenizer_models.TEMPLATE, {"default": CHATML}])
@pytest.mark.parametrize(
    "options",
    [{}, {"enable_thinking": False, "date_string": "1 May"}, {"tools": TOOLS}, {"continue_final": True}],
    ids=["plain", "kwargs", "tools", "continue"],
)
def test_a_prompt_is_the_one_transformers_builds(tmp_path: Path, template: object, options: dict[str, object]) -> None:
    from transformers import AutoTokenizer

    if isinstance(template, dict):
        template = [{"name": name, "template": source} for name, source in template.items()]
    reference = AutoTokenizer.from_pretrained(model(tmp_path, template))
    kwargs = {key: value for key, value in options.items() if key not in {"tools", "continue_final"}}
    continued = bool(options.get("continue_final"))
    talk: Messages = [*TALK, {"role": "assistant", "content": "Well, "}] if continued else TALK
    expected = reference.apply_chat_template(
        talk, tools=options.get("tools"), add_generation_prompt=not continued, continue_final_message=continued, **kwargs
    )["input_ids"]
    text = Text.open(tmp_path)
    got = text.encode_chat(talk, tools=options.get("tools"), template_kwargs=kwargs, continue_final=continued)  # pyright: ignore
    assert got == expected


def test_a_continued_prompt_ends_where_the_message_ends(tmp_path: Path) -> None:
    text = opened(tmp_path, CHATML)
    talk: Messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is"}]
    assert rendered(text, talk, continue_final=True).endswith("<|im_start|>assistant\nThe answer is")


def test_tool_arguments_reach_the_template_as_an_object_or_as_text_whichever_it_takes(tmp_path: Path) -> None:
    as_object = rendered(opened(tmp_path / "a", WITH_TOOLS), CALL)
    assert '<tool_call>weather {"city": "Köln"}</tool_call>' in as_object
    concatenating = "{% for m in messages %}{% for c in m.tool_calls %}{{ '>' + c.function.arguments }}{% endfor %}{% endfor %}"
    assert rendered(opened(tmp_path / "b", concatenating), CALL) == '>{"city": "Köln"}'


def test_developer_is_system_and_a_missing_content_is_empty(tmp_path: Path) -> None:
    text = opened(tmp_path, CHATML)
    got = rendered(text, [{"role": "developer", "content": "X"}, {"role": "user", "content": None}])
    assert got.startswith("<|im_start|>system\nX<|im_end|>\n<|im_start|>user\n<|im_end|>")


def test_text_parts_become_one_string_unless_the_template_wants_parts(tmp_path: Path) -> None:
    parts: Messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert "user\none\ntwo<|im_end|>" in rendered(opened(tmp_path / "a", CHATML), parts)
    wants_parts = opened(tmp_path / "b", PARTS_ONLY)
    assert rendered(wants_parts, parts) == "user:one\ntwo;"
    assert rendered(wants_parts, [{"role": "user", "content": "plain"}]) == "user:plain;"


def test_a_part_that_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    talk: Messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(TemplateError, match="image_url"):
        opened(tmp_path, CHATML).encode_chat(talk)


def test_half_an_emoji_in_tool_arguments_is_shown_as_a_broken_character(tmp_path: Path) -> None:
    """Inside them it is JSON within JSON, which no parser on the way has looked at."""
    for source, seen in ((r"cut \ud83d", "cut \ufffd"), (r"\ud83d\ude00", "\U0001f600")):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "' + source + '"}'}}
        talk: Messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert f'{{"a": "{seen}"}}' in rendered(opened(tmp_path, WITH_TOOLS), talk)


# ------------------------------------------------------------------ shapes that templates refuse


def test_two_user_turns_in_a_row_are_merged_for_a_template_that_insists_on_alternation(tmp_path: Path) -> None:
    talk: Messages = [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]
    assert rendered(opened(tmp_path, ALTERNATES), talk) == "<user>A\n\nB</>"


def test_a_later_system_message_stays_where_it_is_as_a_user_turn(tmp_path: Path) -> None:
    talk: Messages = [
        {"role": "system", "content": "S1"},
        {"role": "system", "content": "S2"},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"role": "system", "content": "S3"},
        {"role": "user", "content": "C"},
    ]
    assert rendered(opened(tmp_path, ALTERNATES), talk) == "<user>S1\n\nS2\n\nA</><assistant>B</><user>S3\n\nC</>"


NOT_LATER = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
)
HOISTS = (
    "{% for m in messages if m['role'] == 'system' %}{{ m['content'] }};{% endfor %}"
    "{% for m in messages if m['role'] != 'system' %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
)
DROPS = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }};{% endif %}"
    "{% for m in messages if m['role'] != 'system' %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
)


@pytest.mark.parametrize("template", [NOT_LATER, HOISTS, DROPS, ALTERNATES, "{{ bos_token + '' }}" + HOISTS])
def test_a_note_between_turns_changes_nothing_of_what_came_before(tmp_path: Path, template: str) -> None:
    """The cache holds the conversation as it was rendered before the first note came."""
    text = opened(tmp_path, template)
    said: Messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B"},
    ]
    if template != ALTERNATES:
        said.insert(1, {"role": "user", "content": "Agents send two turns in a row."})
    before = rendered(text, said)
    after = rendered(text, [*said, {"role": "system", "content": "Note"}, {"role": "user", "content": "C"}])
    assert after.startswith(before) and "<user>Note" in after and "C</>" in after


@pytest.mark.parametrize("template", [NOT_LATER, NO_SYSTEM])
def test_a_template_that_concatenates_arguments_gets_them_as_text_in_other_shapes_too(tmp_path: Path, template: str) -> None:
    shown = (
        "{% for m in messages %}{% for call in m.tool_calls %}{{ 'called:' + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    got = rendered(opened(tmp_path, template + shown), [*CALL[:2], {"role": "system", "content": "Note"}])
    assert "<user>Note</>" in got and got.endswith('called:{"city": "Köln"}')


def test_a_template_without_a_system_role_gets_the_text_in_the_first_user_turn(tmp_path: Path) -> None:
    talk: Messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "A"}]
    assert rendered(opened(tmp_path, NO_SYSTEM), talk) == "<user>S\n\nA</>"


def test_what_the_template_takes_is_not_reshaped(tmp_path: Path) -> None:
    talk: Messages = [{"role": "user", "content": "A"}, {"role": "system", "content": "S"}, {"role": "user", "content": "B"}]
    got = rendered(opened(tmp_path, CHATML), talk)
    assert got.count("<|im_start|>") == 4 and "<|im_start|>system\nS" in got


def test_what_no_shape_helps_is_the_templates_own_error(tmp_path: Path) -> None:
    text = opened(tmp_path, "{{ raise_exception('Only on Sundays') }}")
    with pytest.raises(TemplateError, match="Only on Sundays"):
        text.encode_chat([{"role": "user", "content": "A"}])
    with pytest.raises(TemplateError, match="continue"):
        opened(tmp_path / "b", CHATML).encode_chat([{"role": "user", "content": ""}], continue_final=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__class__ }}{{ dict.mro() }}",
        "{% set ns = namespace(_x=1) %}",
        "{% for message in messages %}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content + 'x' }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_broken_or_hostile_template_is_an_error_and_not_a_crash(tmp_path: Path, template: str) -> None:
    text = opened(tmp_path, template)
    with pytest.raises(TemplateError):
        text.encode_chat([{"role": "user", "content": "A"}])
    assert text.encode_text("still here")


def test_a_template_that_runs_away_is_stopped_and_refused(tmp_path: Path) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'hello ' * 1000 }}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="more than 67108864 characters"):
        opened(tmp_path / "endless", endless).encode_chat([{"role": "user", "content": "hi"}])
    with pytest.raises(TemplateError, match="refused this conversation"):  # more than any machine has
        opened(tmp_path / "huge", "{{ 'a' * 2 ** 62 }}").encode_chat([{"role": "user", "content": "hi"}])


def test_template_arguments_may_not_replace_the_conversation(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="messages"):
        opened(tmp_path, CHATML).encode_chat(TALK, template_kwargs={"messages": []})


def test_control_tokens_in_the_template_become_their_ids_and_bos_is_there_once(tmp_path: Path) -> None:
    text = Text.open(tokenizer_models.byte_level(tmp_path))
    ids = text.encode_chat([{"role": "user", "content": "A"}])
    assert ids[0] == text.bos_id and ids.count(ids[0]) == 1
    assert text.eos_ids <= set(ids)
