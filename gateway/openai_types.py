"""The OpenAI dialect's request bodies: types and ranges, and their neutral form. Values are taken strictly: "1" is no number.

Which fields exist at all is in `openai_fields`. An error names the field as the client wrote it: `messages[2].content`.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.errors import InvalidRequest
from gateway.openai_formats import (
    Format,
    as_choice,
    as_grammar,
    as_regex,
    as_response_format,
    as_schema,
    as_structured_outputs,
)
from gateway.openai_values import Content, as_content, as_logit_bias, as_prompts, as_stops, as_template_kwargs, travels
from gateway.request import GenerateRequest
from supervisor.protocol import Code, Prompt, Reasoning, Sampling

MAX_STOPS = 20
MAX_CHOICES = 16
"""Each is a row of the batch or waits to be one: twice as many as run at once by default."""
MAX_TOP_LOGPROBS = 20
INT64 = 2**63
MAX_DEADLINE_S = 86_400.0
PRIORITIES = {"interactive": 1, "normal": 0, "batch": -1}


def _as_answer_tokens(value: object) -> object:
    """LM Studio's and llama.cpp's way to say: as many as there is room for."""
    return None if value == -1 else value


AnswerTokens = Annotated[Annotated[int, Field(ge=1, lt=2**31)] | None, BeforeValidator(_as_answer_tokens)]


class _Body(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Generation(_Body):
    model: Annotated[str, Field(min_length=1)] | None = None
    """None: the default model, if the settings name one."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS), BeforeValidator(as_stops)] = []
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    max_tokens: AnswerTokens = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[int, float] | None, PlainValidator(as_logit_bias)] = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    timings: bool | None = None
    response_format: Annotated[Format | None, PlainValidator(as_response_format)] = None
    structured_outputs: Annotated[Format | None, PlainValidator(as_structured_outputs)] = None
    guided_json: Annotated[Format | None, PlainValidator(as_schema)] = None
    guided_regex: Annotated[Format | None, PlainValidator(as_regex)] = None
    guided_choice: Annotated[Format | None, PlainValidator(as_choice)] = None
    guided_grammar: Annotated[Format | None, PlainValidator(as_grammar)] = None
    priority: Literal["interactive", "normal", "batch"] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)] | None = None

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        asked = self._formats()
        if len(asked) > 1:
            raise PydanticCustomError("exclusive", "{names} exclude each other", {"names": " and ".join(asked)})
        return self

    @property
    def format(self) -> Format | None:
        return next(iter(self._formats().values()), None)

    def _formats(self) -> dict[str, Format]:
        ways = {
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
            "guided_grammar": self.guided_grammar,
        }
        return {name: wanted for name, wanted in ways.items() if wanted is not None}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,  # both say "off"
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            n=self.n,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
        )


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Content, PlainValidator(as_content)] = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, object]], BeforeValidator(travels)] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[dict[str, object], BeforeValidator(travels)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls and not self.function_call and self.role not in ("tool", "function"):
            raise PydanticCustomError("missing_content", "a message of role {role} needs content", {"role": self.role})
        return self

    def plain(self) -> dict[str, object]:
        """What the chat template sees; null content is an empty text, since templates concatenate it."""
        message: dict[str, object] = {"role": self.role, "content": self.content if self.content is not None else ""}
        extra = {
            "name": self.name,
            "tool_calls": self.tool_calls,
            "tool_call_id": self.tool_call_id,
            "function_call": self.function_call,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        message.update({key: value for key, value in extra.items() if value})
        return message


class ChatRequest(_Generation):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: AnswerTokens = None
    chat_template_kwargs: Annotated[dict[str, object], PlainValidator(as_template_kwargs)] = {}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "it needs logprobs to be true")
        return value

    @model_validator(mode="after")
    def _one_way_to_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError("exclusive", "continue_final_message and add_generation_prompt exclude each other")
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise PydanticCustomError("exclusive", "add_generation_prompt false needs continue_final_message true")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise PydanticCustomError("exclusive", "continue_final_message needs an assistant message at the end")
        return self

    def neutral(self) -> GenerateRequest:
        return GenerateRequest(
            model=self.model or "",
            task="chat",
            prompt=Prompt(messages=[message.plain() for message in self.messages]),
            sampling=self.sampling(),
            max_tokens=self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens,
            stop=tuple(self.stop),
            template_kwargs=self.chat_template_kwargs,
            reasoning=Reasoning(effort=self.reasoning_effort) if self.reasoning_effort is not None else None,
            continue_final=bool(self.continue_final_message),
            cache_salt=self.cache_salt,
            response_format=self.format,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            priority=PRIORITIES[self.priority or "normal"],
            deadline_s=self.deadline_s,
        )


class CompletionRequest(_Generation):
    prompt: Annotated[list[Prompt], PlainValidator(as_prompts)]
    max_tokens: Annotated[Annotated[int, Field(ge=0, lt=2**31)] | None, BeforeValidator(_as_answer_tokens)] = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("exclusive", "max_tokens 0 needs echo to be true")
        return self

    def neutral(self) -> list[GenerateRequest]:
        """One request per prompt."""
        return [
            GenerateRequest(
                model=self.model or "",
                task="complete",
                prompt=prompt,
                sampling=self.sampling(),
                max_tokens=self.max_tokens,
                stop=tuple(self.stop),
                cache_salt=self.cache_salt,
                response_format=self.format,
                logprobs=self.logprobs,
                echo=bool(self.echo),
                priority=PRIORITIES[self.priority or "normal"],
                deadline_s=self.deadline_s,
            )
            for prompt in self.prompt
        ]


def invalid(error: ValidationError) -> InvalidRequest:
    """The first thing wrong, in OpenAI's words."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if first["type"] == Code.UNSUPPORTED:
        return InvalidRequest(f"Invalid '{param}': {first['msg']}.", param=param, code=Code.UNSUPPORTED)
    if not param:  # about several fields, which the message names
        return InvalidRequest(f"Invalid request: {first['msg']}.", code="invalid_value")
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return InvalidRequest(f"Invalid '{param}': {first['msg']}.", param=param, code=code)
