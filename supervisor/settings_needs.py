"""Settings of a model that mean nothing without another one. Pure, and imports little: every command checks the settings."""

from supervisor.settings import ModelSettings


def contradictions(model: str, own: ModelSettings, base: ModelSettings) -> list[str]:
    """Settings that need another one to mean anything. `base` is what an adapter takes over."""
    needed = {"kv_group_size": "kv_bits", "quantized_kv_start": "kv_bits", "num_draft_tokens": "draft_model"}
    return [
        f"models.{model}.{name}: it means nothing without models.{model}.{other}"
        for name, other in needed.items()
        if getattr(own, name) is not None and getattr(own, other) is None and getattr(base, other) is None
    ]
