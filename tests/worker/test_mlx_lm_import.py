"""mlx_lm without what a worker never uses, which is there for whoever uses it after all."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.stands.models import REPO, tiny_model

FIRST_LIGHT = """
import sys
from worker.mlx_lm_import import tokenizers_later
with tokenizers_later():
    import mlx_lm
    from mlx_lm.generate import BatchGenerator
assert not {"transformers", "huggingface_hub"} & set(sys.modules), "imported, or something that stands for it was left behind"
"""
THEN_WHOLE = """
model, tokenizer = mlx_lm.load(sys.argv[1])
assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
from huggingface_hub import snapshot_download
import transformers, mlx_lm.utils
assert isinstance(transformers.AutoTokenizer, type) and transformers.__spec__
try:
    mlx_lm.utils.snapshot_download()
except TypeError as e:
    assert "repo_id" in str(e), e
"""
ALREADY_THERE = """
import huggingface_hub, sys
from worker.mlx_lm_import import tokenizers_later
with tokenizers_later():
    assert sys.modules["huggingface_hub"] is huggingface_hub
    import mlx_lm.utils
assert mlx_lm.utils.snapshot_download is huggingface_hub.snapshot_download
assert sys.modules["huggingface_hub"] is huggingface_hub
"""
MORE_IS_NAMED = """
import sys
import worker.mlx_lm_import as ours
from supervisor.protocol import ModelRef
from tests.stands.sink import ForcedText, RecordingSink
from worker.engine import Engine
from worker.job import LoadSpec
assert "mlx_lm" not in sys.modules
ours.LATER = tuple(name for name in ours.LATER if "." not in name)
sink = RecordingSink()
engine = Engine(LoadSpec(ModelRef(id="tiny", path=sys.argv[1], context=0), settings={}), ForcedText(), sink)
engine.start()
assert sink.settled.wait(60) and sink.failure is None, sink.failure
engine.stop(5.0)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("program", [FIRST_LIGHT, FIRST_LIGHT + THEN_WHOLE, ALREADY_THERE], ids=["light", "whole", "there"])
def test_what_is_left_out_comes_with_its_first_use(model: Path, program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program, str(model)], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_mlx_lm_that_names_more_of_those_libraries_is_imported_with_all_of_them(model: Path) -> None:
    command = [sys.executable, "-c", MORE_IS_NAMED, str(model)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
