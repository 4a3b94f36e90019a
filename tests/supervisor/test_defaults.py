"""Whose word counts when a request says nothing: the model's settings, then its own files, then the server's settings."""

from supervisor.defaults import Default, defaults_of, longest_answer
from supervisor.settings import ModelSettings, SamplingSettings


def test_settings_of_the_model_go_before_its_files_and_these_before_the_servers() -> None:
    model, files = ModelSettings(temperature=0.1), {"temperature": 0.2, "top_k": 20}
    found = defaults_of(model, files, SamplingSettings(temperature=0.3, top_k=30, top_p=0.5))
    assert found["temperature"] == Default(0.1, "model settings")
    assert found["top_k"] == Default(20, "generation_config.json")
    assert found["top_p"] == Default(0.5, "server settings")


def test_zero_and_an_empty_table_are_values_too() -> None:
    found = defaults_of(ModelSettings(temperature=0.0, chat_template_kwargs={}), {"temperature": 0.7}, SamplingSettings())
    assert found["temperature"] == Default(0.0, "model settings")
    assert found["chat_template_kwargs"] == Default({}, "model settings")


def test_what_nobody_sets_has_no_default() -> None:
    found = defaults_of(ModelSettings(), {}, SamplingSettings())
    assert "max_tokens_limit" not in found and "min_p" not in found
    assert found["temperature"] == Default(1.0, "server settings")


def test_an_answer_is_bounded_by_default_and_never_said_to_be_longer_than_the_context() -> None:
    bounded = defaults_of(ModelSettings(), {}, SamplingSettings())
    assert bounded["max_tokens"] == Default(32_768, "server settings")
    assert (longest_answer(bounded, 131_072), longest_answer(bounded, 4096)) == (32_768, 4096)
    unbounded = defaults_of(ModelSettings(), {}, SamplingSettings(max_tokens=None))
    assert longest_answer(unbounded, 131_072) == 131_072


def test_the_limit_is_not_a_matter_of_the_models_files() -> None:
    found = defaults_of(ModelSettings(max_tokens_limit=50), {"max_tokens": 2048}, SamplingSettings(max_tokens_limit=100))
    assert found["max_tokens_limit"] == Default(50, "model settings")
    assert longest_answer(found, 4096) == 50
