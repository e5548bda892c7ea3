"""From a folder's safetensors to a model.

In: an empty model whose modules carry the checkpoint's names; the folder. Out: the same model with
every parameter filled exactly once.

    checkpoint                                   model
    model.layers.0.self_attn.q_proj.weight  -->  model.layers.0.self_attn.qkv_proj.weight[:q]
    model.layers.0.self_attn.k_proj.weight  -->                                     [q : q + k]

Invariant: a missing or an unexpected tensor, or one of another shape, is an error that names it.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint import find_files, open_safetensors
from nanoinfer.fp8 import SCALE, choose_kept, dequantize, load_blocks, read_scales
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.moe import WHOLE_EXPERTS, Experts, expert_target

_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "in_proj"),
}
# Old Llama files hold what is computed here. Images and drafts (MTP) are not read.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$|^model\.visual\.|^mtp\.|\.weight_scale_inv$")
_PREFIX = re.compile(r"^model\.language_model\.")  # of the part that writes, where one sees too


def load_weights(model: nn.Module, folder: Path, tie: bool, keep_fp8: bool = False) -> None:
    """Fill `model` from `folder`; with `tie` the head shares the embedding's matrix.

    FP8 weights are dequantised, or with `keep_fp8` kept where a linear layer takes them.
    """
    files = find_files(folder)
    parameters = dict(model.named_parameters())
    missing = {(name, part) for name in parameters for part in _parts(model, name)}
    scales = read_scales([open_safetensors(path) for path in files])
    kept = choose_kept(model, {_target(name) for name in scales}, keep_fp8)
    for path in files:
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is not a dict)
                if _IGNORED.search(name):
                    continue
                target, shard = _target(name)
                is_whole = target in parameters and target.endswith(WHOLE_EXPERTS)
                filled = _parts(model, target) if is_whole and not shard else [shard]
                found = {(target, part) for part in filled}
                if not found <= missing:
                    raise ValueError(
                        f"{path}: tensor {name!r} is there twice, or not part of this architecture"
                    )
                tensor, what = file.get_tensor(name), f"{path}: {name!r}"
                layer: Any = model.get_submodule(target.rpartition(".")[0])
                if (scale := scales.pop(name, None)) is None:
                    _load(layer, target, shard, tensor, what)
                elif target in kept:
                    load_blocks(layer, shard, tensor, scale, what)
                else:
                    _load(layer, target, shard, dequantize(tensor, scale, what), what)
                missing -= found
    head, embedding = ("lm_head.weight", ""), parameters["model.embed_tokens.weight"]
    if tie and (head in missing or torch.equal(parameters["lm_head.weight"], embedding)):
        model.tie_weights()  # type: ignore[operator]
        missing.discard(head)
    if scales:
        raise ValueError(f"{folder}: {min(scales) + SCALE!r} has no weight; download it again")
    if missing:
        name = _source(*min(missing))
        raise ValueError(
            f"{folder}: {name!r} is missing, in all {len(missing)} tensor(s); download it again"
        )


def _target(name: str) -> tuple[str, str]:
    """Checkpoint name -> (parameter name, which part of it)."""
    name = _PREFIX.sub("model.", name)
    if (of_expert := expert_target(name)) is not None:
        return of_expert
    parent, _, kind = name.rpartition(".")
    above, _, module = parent.rpartition(".")
    return (f"{above}.{_FUSED[module]}.{kind}", module) if module in _FUSED else (name, "")


def _source(parameter: str, part: str) -> str:
    """The inverse."""
    parent, _, kind = parameter.rpartition(".")
    if parameter.endswith(WHOLE_EXPERTS):
        return f"{parent}.{part}.weight"
    return f"{parent.rpartition('.')[0]}.{part}.{kind}" if part else parameter


def _parts(model: nn.Module, parameter: str) -> list[str]:
    """What fills a parameter: several tensors of the checkpoint, or one."""
    parent, _, kind = parameter.rpartition(".")
    module = model.get_submodule(parent)
    return module.parts(kind) if isinstance(module, Linear | Experts) else [""]


def _load(layer: Any, target: str, shard: str, tensor: Tensor, what: str) -> None:
    try:
        layer.load(target.rpartition(".")[2], shard, tensor)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from error
