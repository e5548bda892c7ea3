"""nanoinfer/loader.py: the model gets what the folder holds, or an error that says why not."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from oracle import hf_logprobs
from safetensors.torch import load_file, save_file
from tiny import TINY_NAMES, adds_one, randomise, save_tiny_tokenizer
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoint import find_checkpoint
from nanoinfer.kernels import Kernels
from nanoinfer.loader import load_weights
from nanoinfer.model_config import ModelConfig
from nanoinfer.models.qwen3 import CausalLM

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"
CPU = torch.device("cpu")


@pytest.fixture
def copy(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a tiny checkpoint that the test may change."""

    def make(name: str = "tiny-qwen3") -> Path:
        return Path(shutil.copytree(tiny(name), tmp_path / name))

    return make


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    """The folder's model. Whatever the loader leaves out stays NaN."""
    config = ModelConfig.from_hf(folder)
    model = CausalLM(config, 64, Kernels(), dtype=dtype, device=CPU)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    load_weights(model, folder, tie=config.tie_word_embeddings)
    return model


def error_of(folder: Path) -> str:
    """The message that loading ends with: a ValueError of one line."""
    with pytest.raises(ValueError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def change(folder: Path, **changes: object) -> None:
    """Change config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> dict[str, Tensor]:
    """Edit the tensors of a folder with one file; returns them as they are now."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def shard(folder: Path, num_shards: int = 3) -> dict[str, str]:
    """Spread the folder's tensors over files with an index; returns its weight_map."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        # Names dealt in turns: q, k and v of one layer are in different files.
        names = sorted(tensors)[i::num_shards]
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def expected_parameters(tensors: dict[str, Tensor], model: str) -> dict[str, Tensor]:
    """The checkpoint's tensors under the model's names: fused ones stacked, 1 added to norms."""
    parts = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    expected = {
        name: 1 + tensor if adds_one(name, model) else tensor for name, tensor in tensors.items()
    }
    for name in [name for name in tensors if name.endswith("conv1d.weight")]:
        expected[name] = expected[name].squeeze(1).T
    for first in [name for name in tensors if name.endswith(".experts.0.gate_proj.weight")]:
        prefix = first.removesuffix("0.gate_proj.weight")

        def take(kind: str, prefix: str = prefix) -> Tensor:
            return torch.stack([expected.pop(f"{prefix}{i}.{kind}.weight") for i in range(8)])

        expected[f"{prefix}gate_up_proj"] = torch.cat((take("gate_proj"), take("up_proj")), 1)
        expected[f"{prefix}down_proj"] = take("down_proj")
    for fused, names in parts.items():
        for first in [name for name in expected if f".{names[0]}." in name]:
            stack = [expected.pop(first.replace(names[0], name)) for name in names]
            expected[first.replace(names[0], fused)] = torch.cat(stack)
    return expected


def logprobs_of(folder: Path, ids: list[int], **kwargs: object) -> Tensor:
    """[T - 1, V]: row t is what the engine says about the token after ids[: t + 1]."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    with LLM(folder, num_kv_blocks=8, device="cpu", **kwargs) as llm:
        (output,) = llm.generate(ids, params, use_tqdm=False)
    rows = output.prompt_logprobs[1:]
    return torch.tensor([[row[i].logprob for i in range(len(row))] for row in rows])


IDS = torch.randint(0, 273, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("name", TINY_NAMES)
def test_logits_equal_transformers(tiny, name):
    found = logprobs_of(tiny(name), IDS, dtype="float32", kernels="ref")
    torch.testing.assert_close(found, hf_logprobs(tiny(name), IDS)[:-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_parameter_is_filled_from_its_tensors(tiny, name):
    expected = expected_parameters(load_file(tiny(name) / "model.safetensors"), name)
    found = dict(load(tiny(name)).named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


def test_the_part_that_writes_is_read_of_a_checkpoint_that_sees(tiny, tmp_path):
    """Qwen3.5's usual form: a nested config, model.language_model.*, model.visual.*, mtp.*."""
    plain = tiny("tiny-qwen3_5")
    text = Qwen3_5TextConfig.from_pretrained(plain)
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    config = Qwen3_5Config(
        text_config={**text.to_dict(), "tie_word_embeddings": False},
        vision_config={**vision, "out_hidden_size": 64},
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen3_5ForConditionalGeneration(config).float()
        randomise(model)
    model.save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    tensors = rewrite(tmp_path, lambda t: t.update({"mtp.fc.weight": torch.zeros(64, 128)}))
    assert any(name.startswith("model.visual.") for name in tensors)
    ids = torch.tensor([IDS])
    expected = model.eval()(ids).logits[0].float().log_softmax(-1)
    found = logprobs_of(tmp_path, IDS, dtype="float32", kernels="ref")
    torch.testing.assert_close(found, expected[:-1], rtol=1e-4, atol=1e-4)
    rewrite(tmp_path, lambda t: t.update({"model.other.weight": torch.zeros(1)}))
    assert "model.other.weight" in error_of(tmp_path)


def test_a_tensor_in_two_shards_is_an_error(copy):
    folder = copy()
    weight_map = shard(folder)
    other = next(file for file in weight_map.values() if file != weight_map[Q_PROJ])
    tensors = load_file(folder / other)
    tensors[Q_PROJ] = load_file(folder / weight_map[Q_PROJ])[Q_PROJ]
    save_file(tensors, folder / other, {"format": "pt"})
    assert Q_PROJ in error_of(folder)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_shards_are_read_by_the_index(copy, tiny_qwen3, num_shards):
    folder = copy()
    assert len(set(shard(folder, num_shards).values())) == num_shards
    expected = load(tiny_qwen3).state_dict()
    for name, parameter in load(folder).state_dict().items():
        assert torch.equal(parameter, expected[name]), name


def test_one_file_of_another_name_is_read(copy, tiny_qwen3):
    folder = copy()
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert torch.equal(load(folder).lm_head.weight, load(tiny_qwen3).lm_head.weight)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_stray_files_are_ignored(copy, tiny_qwen3, is_sharded):
    folder = copy()
    if is_sharded:
        shard(folder)
    save_file({"stray": torch.ones(1)}, folder / "adapter_model.safetensors")
    save_file({HEAD: torch.ones(273, 64)}, folder / "model-00009-of-00009.safetensors")
    (folder / "consolidated.safetensors").write_bytes(b"not even one")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / ".DS_Store").write_bytes(b"\0")
    (folder / "original").mkdir()
    shutil.copy(tiny_qwen3 / "model.safetensors", folder / "original" / "model.safetensors")
    expected = load(tiny_qwen3).state_dict()
    for name, parameter in load(folder).state_dict().items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("engine_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checkpoint_of_any_float_type(copy, dtype, engine_dtype):
    folder = copy()
    tensors = rewrite(folder, lambda t: t.update({k: v.to(dtype) for k, v in t.items()}))
    change(folder, dtype=str(dtype).removeprefix("torch."))
    expected = expected_parameters(tensors, "tiny-qwen3")
    for name, parameter in load(folder, engine_dtype).named_parameters():
        assert parameter.dtype == engine_dtype
        assert torch.equal(parameter, expected[name].to(engine_dtype)), name
    if engine_dtype == torch.float32:
        found = logprobs_of(folder, IDS, dtype="float32", kernels="ref")
        torch.testing.assert_close(found, hf_logprobs(folder, IDS)[:-1], rtol=1e-4, atol=1e-4)


# -- The head: a matrix of its own, or the embedding's --------------------------------------------


def drop_head(tensors: dict[str, Tensor]) -> None:
    tensors.pop(HEAD, None)


def equal_head(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def other_head(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].flip(0)


@pytest.mark.parametrize(
    ("tie", "edit", "is_tied"),
    [
        (True, drop_head, True),
        (True, equal_head, True),
        (True, other_head, False),
        (False, equal_head, False),
        (False, other_head, False),
    ],
)
def test_head_is_tied_as_in_transformers(copy, tie, edit, is_tied):
    folder = copy()
    tensors = rewrite(folder, edit)
    change(folder, tie_word_embeddings=tie)
    model = load(folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    assert torch.equal(model.model.embed_tokens.weight, tensors[EMBEDDING])
    assert torch.equal(model.lm_head.weight, tensors.get(HEAD, tensors[EMBEDDING]))
    found = logprobs_of(folder, IDS, dtype="float32", kernels="ref")
    torch.testing.assert_close(found, hf_logprobs(folder, IDS)[:-1], rtol=1e-4, atol=1e-4)


def test_untied_without_head_is_an_error(copy):
    folder = copy("tiny-qwen3-tied")
    change(folder, tie_word_embeddings=False)
    message = error_of(folder)
    assert HEAD in message
    assert str(folder) in message


# -- Damaged folders ------------------------------------------------------------------------------


def test_missing_shard(copy):
    folder = copy()
    file = shard(folder)[Q_PROJ]
    (folder / file).unlink()
    message = error_of(folder)
    assert str(folder / file) in message
    assert "download" in message


@pytest.mark.parametrize("name", [Q_PROJ, EMBEDDING, "model.norm.weight"])
def test_missing_tensor_is_named(copy, name):
    folder = copy()
    rewrite(folder, lambda tensors: tensors.pop(name))
    message = error_of(folder)
    assert str(folder) in message
    assert name in message  # as the file would call it
    assert ";" in message, "no remedy"


def test_tensor_that_only_the_index_knows(copy):
    folder = copy()
    file = folder / shard(folder)[Q_PROJ]
    tensors = load_file(file)
    del tensors[Q_PROJ]
    save_file(tensors, file, {"format": "pt"})
    assert Q_PROJ in error_of(folder)


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "x"],
)
def test_unexpected_tensor_is_named(copy, name):
    folder = copy()
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(2, 2)}))
    message = error_of(folder)
    assert str(folder / "model.safetensors") in message
    assert repr(name) in message
    assert "architecture" in message


@pytest.mark.parametrize("name", [Q_PROJ, HEAD, "model.norm.weight"])
@pytest.mark.parametrize("how", ["longer", "flat", "int8", "float64"])
def test_wrong_shape_or_dtype_is_named(copy, name, how):
    folder = copy()
    edits = {
        "longer": lambda t: torch.cat((t, t[:1])),
        "flat": lambda t: t.flatten()[None],
        "int8": lambda t: t.to(torch.int8),
        "float64": lambda t: t.double(),
    }
    old = load_file(folder / "model.safetensors")[name]
    tensors = rewrite(folder, lambda tensors: tensors.update({name: edits[how](tensors[name])}))
    message = error_of(folder)
    assert str(folder / "model.safetensors") in message
    assert repr(name) in message
    assert str(list(tensors[name].shape)) in message
    assert str(list(old.shape)) in message
    assert str(tensors[name].dtype) in message
    assert "config.json" in message


def test_folder_without_weights(copy):
    folder = copy()
    (folder / "model.safetensors").unlink()
    assert f"{folder}: no safetensors" in error_of(folder)


def test_pickled_weights_are_not_read(copy):
    folder = copy()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    message = error_of(folder)
    assert f"{folder}: no safetensors" in message
    assert ".bin" in message
    assert "convert" in message


def test_several_files_without_an_index(copy):
    folder = copy()
    shard(folder)
    (folder / INDEX).unlink()
    message = error_of(folder)
    assert str(folder) in message
    assert "3 safetensors" in message
    assert INDEX in message


@pytest.mark.parametrize("text", ["", "{", "[]", '{"metadata": {}}', '{"weight_map": []}'])
def test_broken_index_is_named(copy, text):
    folder = copy()
    shard(folder)
    (folder / INDEX).write_text(text)
    assert str(folder / INDEX) in error_of(folder)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_file(copy, keep, is_sharded):
    folder = copy()
    file = folder / (shard(folder)[Q_PROJ] if is_sharded else "model.safetensors")
    file.write_bytes(file.read_bytes()[:keep])
    message = error_of(folder)
    assert str(file) in message
    assert "download it again" in message


def test_git_lfs_pointer(copy):
    folder = copy()
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 1503300328\n"
    (folder / "model.safetensors").write_text(text)
    message = error_of(folder)
    assert str(folder / "model.safetensors") in message
    assert "git lfs pull" in message


def test_frequencies_of_old_files_are_ignored(copy, tiny_qwen3):
    folder = copy()
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(16) for name in names}))
    assert torch.equal(load(folder).lm_head.weight, load(tiny_qwen3).lm_head.weight)


# -- From "model" to a folder ---------------------------------------------------------------------


def test_folder_is_found_as_it_is(tiny_qwen3, monkeypatch):
    assert find_checkpoint(tiny_qwen3) == tiny_qwen3
    assert find_checkpoint(str(tiny_qwen3)) == tiny_qwen3
    monkeypatch.setenv("HOME", str(tiny_qwen3.parent))
    assert find_checkpoint(f"~/{tiny_qwen3.name}") == tiny_qwen3


def test_empty_folder(tmp_path):
    with pytest.raises(ValueError, match=r"^.*config\.json: not found; need a folder") as caught:
        LLM(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "model",
    [
        "",
        "no such model!",
        "/nowhere/model",
        "./model",
        "~/nowhere",
        "gpt2",
        "https://hub/owner/name",
        "owner/name/more",
        "../name",
        "a\0b",
        "a" * 5000,
        "nowhere/model.gguf",
    ],
    ids=lambda model: repr(model[:20]),
)
def test_nonsense_is_an_error(model, monkeypatch):
    """Not found, said at once, in one line, without asking the network."""
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append(a))
    with pytest.raises(ValueError, match="folder") as caught:
        find_checkpoint(model)
    assert asked == []
    message = str(caught.value)
    assert model[:50] in message or repr(model)[:50] in message
    assert "\n" not in message


def test_path_to_a_file_is_an_error(tiny_qwen3):
    file = tiny_qwen3 / "model.safetensors"
    with pytest.raises(ValueError, match="is a file; need a folder") as caught:
        find_checkpoint(file)
    assert str(file) in str(caught.value)


def test_damaged_gguf_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"model\.gguf"):
        find_checkpoint(file)


def test_hub_id_is_downloaded(tiny_qwen3, monkeypatch):
    asked = []

    def snapshot_download(repo: str, allow_patterns: list[str]) -> str:
        asked.append(repo)
        assert "*.safetensors" in allow_patterns
        assert not any(pattern in allow_patterns for pattern in ("*", "*.bin", "*.pt", "*.py"))
        return str(tiny_qwen3)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_checkpoint("Qwen/Qwen3-0.6B") == tiny_qwen3
    assert asked == ["Qwen/Qwen3-0.6B"]


@pytest.mark.skipif(os.environ["HF_HUB_OFFLINE"] != "1", reason="would ask the network")
def test_hub_that_cannot_be_reached_says_so():
    with pytest.raises(ValueError, match="'nanoinfer/no-such-model'") as caught:
        LLM("nanoinfer/no-such-model")
    message = str(caught.value)
    assert "\n" not in message
    assert "could not be had from the hub" in message
    assert "local folder" in message
