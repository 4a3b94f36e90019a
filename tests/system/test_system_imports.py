"""What a process imports is what every start of it costs: a worker at every load."""

import re
from pathlib import Path

from tests.stands.server import Server, home_with
from tests.stands.tiny_adapter import tiny_adapter

NEVER_USED = {"transformers", "huggingface_hub", "torch"}
IMPORTED = re.compile(r"import time: .*\| +([\w.]+)$", re.MULTILINE)


def test_models_and_adapters_are_served_without_the_libraries_of_mlx_lm_that_nobody_uses(tiny: Path, tmp_path: Path) -> None:
    adapter = tiny_adapter(tmp_path / "adapter", tiny)
    with home_with({"tiny": tiny}) as home:
        server = Server(home, {"models": {"tiny": {"adapters": {"one": str(adapter)}}}})
        server.variables = {"PYTHONPROFILEIMPORTTIME": "1"}
        server.start()
        try:
            answers = [server.chat(name, "hello", max_tokens=4) for name in ("tiny", "tiny+one")]
        finally:
            server.stop()
        logs = [path.read_text() for path in (home / "logs").iterdir()]
    assert [answer.status for answer in answers] == [200, 200]
    imported = {name for log in logs for name in IMPORTED.findall(log)}
    assert {"mlx_lm.generate", "mlx_lm.tuner.utils", "aiohttp"} <= imported, (
        "the workers and the gateway have not said what they import"
    )
    assert not NEVER_USED & {name.partition(".")[0] for name in imported}
