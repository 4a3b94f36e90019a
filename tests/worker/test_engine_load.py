"""What cannot be loaded is told apart before a request waits for it, with a message that names the file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.protocol import Code, ModelRef
from tests.stands.models import REPO, tiny_model
from tests.stands.sink import ForcedText, RecordingSink, RunningEngine
from worker.engine import Engine
from worker.faults import EXIT_UNLOADABLE
from worker.job import LoadSpec


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def failure(model: Path, **settings: object) -> tuple[str, str, int]:
    sink = RecordingSink()
    Engine(LoadSpec(ModelRef(id="tiny", path=str(model), context=0), settings=settings), ForcedText(), sink).start()
    assert sink.settled.wait(60)
    assert sink.failure is not None
    return sink.failure


def test_a_truncated_shard(model: Path) -> None:
    shard = model / "model.safetensors"
    whole = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-100])
    code, message, exit_code = failure(model)
    assert (code, exit_code) == (Code.MODEL_UNLOADABLE, EXIT_UNLOADABLE)
    assert str(shard) in message
    assert f"{whole - 100} bytes of {whole}" in message


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, (20).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}', b"\x02" + bytes(7) + b"[]"]
)
def test_a_shard_without_a_readable_header(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    code, message, exit_code = failure(model)
    assert (code, exit_code) == (Code.MODEL_UNLOADABLE, EXIT_UNLOADABLE)
    assert "header" in message


def test_an_index_that_names_a_file_that_is_not_there(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    code, message, exit_code = failure(model)
    assert (code, exit_code) == (Code.MODEL_UNLOADABLE, EXIT_UNLOADABLE)
    assert "model-00002-of-00002.safetensors" in message


def test_no_weights_at_all(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert failure(model)[::2] == (Code.MODEL_UNLOADABLE, EXIT_UNLOADABLE)


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"model_type": 3}'])
def test_a_config_that_is_none(model: Path, config: str) -> None:
    (model / "config.json").write_text(config)
    code, message, exit_code = failure(model)
    assert (code, exit_code) == (Code.MODEL_UNLOADABLE, EXIT_UNLOADABLE)
    assert "config.json" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "perpetuum_mobile"}, "perpetuum_mobile"),
        ({"hidden_size": 128}, ""),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"hidden_size": None}, ""),
    ],
)
def test_an_architecture_or_shape_this_build_cannot_make(model: Path, change: dict[str, object], said: str) -> None:
    config = json.loads((model / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    code, message, exit_code = failure(model)
    assert (code, exit_code) == (Code.MODEL_UNLOADABLE, EXIT_UNLOADABLE)
    assert said in message


def test_a_models_own_code_runs_only_where_it_is_allowed(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"model_file": "own.py"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nfrom mlx_lm.models.llama import Model, ModelArgs\n"
    )
    code, message, exit_code = failure(model)
    assert (code, exit_code) == (Code.MODEL_UNLOADABLE, EXIT_UNLOADABLE)
    assert "trust_remote_code" in message
    assert not (tmp_path / "ran").exists()
    sink = RecordingSink()
    spec = LoadSpec(ModelRef(id="tiny", path=str(model), context=0), settings={"trust_remote_code": True})
    engine = Engine(spec, ForcedText(), sink)
    engine.start()
    assert sink.settled.wait(60)
    assert sink.failure is None
    assert (tmp_path / "ran").exists()
    engine.stop(5.0)


def test_loading_shows_its_stages_and_what_the_model_costs(model: Path) -> None:
    with RunningEngine(model, text=ForcedText(context=2048)) as e:
        info = e.sink.info
    assert info is not None
    stages = [stage for stage, _, _ in e.sink.stages]
    assert list(dict.fromkeys(stages)) == ["import", "weights", "warm"]
    _, done, total = next(entry for entry in reversed(e.sink.stages) if entry[0] == "weights")
    assert done == total == info.weights_bytes > 0
    assert info.context == 2048
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dim, float32
    assert info.peak_bytes >= info.weights_bytes


@pytest.mark.parametrize(("settings", "context"), [({}, 2048), ({"context": 512}, 512), ({"context": 9999}, 2048)])
def test_a_setting_can_only_lower_the_context(model: Path, settings: dict[str, object], context: int) -> None:
    sink = RecordingSink()
    engine = Engine(LoadSpec(ModelRef(id="tiny", path=str(model), context=0), settings=settings), ForcedText(), sink)
    engine.start()
    assert sink.settled.wait(60)
    assert sink.info is not None
    assert sink.info.context == context
    engine.stop(5.0)


LIMITS = """
import resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), 3500))
from tests.stands.sink import ForcedText, RunningEngine
with RunningEngine(Path(sys.argv[1]), text=ForcedText()) as e:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
time.sleep(0.5)  # until the engine's thread has lain down for good
"""


@pytest.mark.parametrize(("before", "after"), [(3000, 3000), (256, 2048)])
def test_the_limit_of_open_files_is_never_lowered_and_the_process_ends_cleanly(model: Path, before: int, after: int) -> None:
    command = [sys.executable, "-c", LIMITS, str(model), str(before)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [str(after), "3500"]), done.stderr[-2000:]


def test_an_architecture_whose_code_ends_the_program_over_a_missing_package(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "olmo"}))  # wants ai2-olmo, and exits without it
    code, message, exit_code = failure(model)
    assert (code, exit_code) == (Code.MODEL_UNLOADABLE, EXIT_UNLOADABLE)
    assert "'olmo'" in message and "package" in message
