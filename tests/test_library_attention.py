"""attention_backend: what is handed to torch's and flash-attn's kernels, and what is refused.

The kernels need a GPU. Here stand-ins take their arguments, by their names, and answer from a
gather of the pages; torch's own checks are run on fake tensors that claim to be on a GPU.
"""

import logging
import sys
import types

import pytest
import torch
from test_paged_attention import make_case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from nanoinfer import LLM, EngineConfig
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.library_attention import load_attention
from nanoinfer.kernels.paged_attention import paged_attention_ref
from nanoinfer.layers.attention_backend import choose_attention

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
STEPS = [[(1, 300), (1, 5)], [(5, 5), (1, 270), (40, 290)]]


def stand_in_for_varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa,
    seqused_k, block_table,
):  # fmt: skip
    """torch 2.13's signature, but for what is optional."""
    assert window_size == (-1, 0)
    assert enable_gqa
    assert cu_seq_k.shape == cu_seq_q.shape
    assert max_q >= cu_seq_q.diff().max()
    assert max_k >= seqused_k.max()
    return paged_attention_ref(query, key, value, block_table, seqused_k, cu_seq_q, scale)


def make_flash_attn():
    """flash-attn 2.8's two functions, of which the second has no seqused_k."""

    def with_kvcache(q, k_cache, v_cache, *, cache_seqlens, softmax_scale, causal, block_table):
        assert causal
        assert q.shape[1] == 1
        bounds = torch.arange(len(q) + 1, dtype=torch.int32)
        where = (block_table, cache_seqlens, bounds)
        return paged_attention_ref(q[:, 0], k_cache, v_cache, *where, softmax_scale)[:, None]

    def varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        block_table,
    ):  # fmt: skip
        assert causal
        lens = cu_seqlens_k.diff()
        assert cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q >= cu_seqlens_q.diff().max()
        assert max_seqlen_k >= lens.max()
        return paged_attention_ref(q, k, v, block_table, lens, cu_seqlens_q, softmax_scale)

    module = types.ModuleType("flash_attn")
    module.flash_attn_with_kvcache, module.flash_attn_varlen_func = with_kvcache, varlen_func
    return module


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", stand_in_for_varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", make_flash_attn())


@pytest.mark.parametrize("step", STEPS, ids=["decoding", "mixed"])
@pytest.mark.parametrize("name", ["varlen", "flash_attn"])
def test_arguments_mean_what_ours_do(name, step):
    attention = load_attention(name, CUDA, BF16, 256, 32)
    case = make_case(step, block_size=256)
    assert torch.equal(attention(*case), paged_attention_ref(*case))


def test_torch_takes_the_arguments(monkeypatch):
    """Its own schema and shape checks, on fake tensors: decoding and chunks."""
    monkeypatch.undo()
    attention = load_attention("varlen", CUDA, BF16, 256, 64)
    with FakeTensorMode():
        for T, S in ((3, 3), (40, 3)):
            q = torch.empty(T, 8, 64, dtype=BF16, device="cuda")
            caches = [torch.empty(9, 256, 2, 64, dtype=BF16, device="cuda") for _ in range(2)]
            tables, lens, bounds = (
                torch.empty(shape, dtype=torch.int32, device="cuda")
                for shape in ((S, 4), (S,), (S + 1,))
            )
            out = attention(q, *caches, tables, lens, bounds, 0.125)
            assert (out.shape, out.dtype, out.device.type) == (q.shape, BF16, "cuda")


@pytest.mark.parametrize("name", ["varlen", "flash_attn"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": torch.device("cpu")}, "needs a GPU, got cpu; leave it at auto"),
        ({"dtype": torch.float32}, "needs bfloat16 or float16, got torch.float32"),
        ({"block_size": 16}, "needs blocks of a multiple of 256 tokens, got 16; try block_size"),
        ({"head_dim": 512}, r"needs heads of 8, 16 \.\. 256, got 512"),
    ],
)
def test_impossible_combinations_are_refused_by_name(name, change, message):
    good = {"device": CUDA, "dtype": BF16, "block_size": 512, "head_dim": 128}
    load_attention(name, **good)
    with pytest.raises(ValueError, match=f"attention_backend: {name} {message}"):
        load_attention(name, **(good | change))


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ValueError, match="flash_attn needs the package flash-attn"):
        load_attention("flash_attn", CUDA, BF16, 256, 64)
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value: None)
    with pytest.raises(ValueError, match="varlen needs torch 2"):
        load_attention("varlen", CUDA, BF16, 256, 64)


def test_the_choice_replaces_one_kernel_and_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(EngineConfig, "torch_device", CUDA)
    table = Kernels(name="triton")
    options = {"model": "m", "block_size": 256}
    with caplog.at_level(logging.INFO, "nanoinfer"):
        assert choose_attention(EngineConfig(**options), table, BF16, 64) is table
        assert not caplog.records
        chosen = EngineConfig(**options, attention_backend="flash_attn")
        found = choose_attention(chosen, table, BF16, 64)
    assert [record.message for record in caplog.records] == ["attention: flash_attn"]
    assert found._replace(paged_attention=table.paged_attention) == table
    assert found.paged_attention.__name__ == "paged_attention_flash"
    quantised = EngineConfig(**options, attention_backend="varlen", kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="varlen reads no caches in 8 bits, got int8"):
        choose_attention(quantised, table, BF16, 64)


def test_a_cpu_refuses_at_the_start(tiny_qwen3):
    with pytest.raises(ValueError, match="attention_backend: varlen needs a GPU, got cpu"):
        LLM(tiny_qwen3, device="cpu", attention_backend="varlen")
