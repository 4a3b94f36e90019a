"""lm-eval itself, unmodified, against a running server: loglikelihoods of token prompts, and generation through chat.

`make clients` installs it and runs this; it is left out where `lm_eval` is not found. What it asks for is tested without it as
well.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stands.server import Server

BIN = Path(sys.executable).parent
LM_EVAL = shutil.which(
    "lm_eval", path=os.pathsep.join([str(BIN.parent / "clients" / "bin"), str(BIN), os.environ.get("PATH", "")])
)
pytestmark = [pytest.mark.real, pytest.mark.skipif(LM_EVAL is None, reason="lm-eval is not installed: make clients")]

QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " a large purple fish", " Berlin"], "answer": 0},
    {"question": "Two plus two is", "choices": [" seven hundred", " four", " blue"], "answer": 1},
    {"question": "Water is made of hydrogen and", "choices": [" chairs", " iron", " oxygen"], "answer": 2},
    {"question": "The opposite of hot is", "choices": [" cold", " green"], "answer": 0},
]
TASKS: dict[str, dict[str, object]] = {
    "pick_the_end": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "say_the_end": {
        "output_type": "generate_until",
        "doc_to_text": "Complete the sentence: {{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(questions)}}, "test_split": "test"}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))  # JSON is YAML
    return tmp_path


def evaluate(tasks: Path, task: str, model: str, arguments: str, *more: str) -> dict[str, object]:
    assert LM_EVAL is not None
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "hf"), "OPENAI_API_KEY": "unused"}
    command = [LM_EVAL, "--model", model, "--model_args", arguments, "--tasks", task, "--include_path", str(tasks)]
    command += ["--output_path", str(tasks / "results.json"), *more]
    done = subprocess.run(command, env=os.environ | offline, cwd=tasks, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = tasks.glob("results*.json")
    return json.loads(written.read_text())["results"][task]


def test_lm_eval_scores_continuations_through_completions(real: Server, smollm2: Path, tasks: Path) -> None:
    arguments = f"model=smollm2,base_url={real.url}/v1/completions,tokenizer={smollm2},num_concurrent=2"
    assert evaluate(tasks, "pick_the_end", "local-completions", arguments)["acc,none"] == 1.0


def test_lm_eval_generates_through_chat(real: Server, tasks: Path) -> None:
    arguments = f"model=smollm2,base_url={real.url}/v1/chat/completions,tokenized_requests=False"
    result = evaluate(tasks, "say_the_end", "local-chat-completions", arguments, "--apply_chat_template", "--log_samples")
    assert "exact_match,none" in result
    (logged,) = tasks.glob("samples_say_the_end*.jsonl")
    samples = [json.loads(line) for line in logged.read_text().splitlines()]
    assert len(samples) == len(QUESTIONS)
    assert all(sample["resps"][0][0].strip() for sample in samples), samples
