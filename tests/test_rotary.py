"""Rotary embedding: nanoinfer/layers/rotary_embedding.py and its kernel, against transformers."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig

from nanoinfer import LLM
from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.rotary import Rope, rotary_ref
from nanoinfer.layers.rotary_embedding import (
    RotaryEmbedding,
    frequency_axes,
    get_rope,
    inverse_frequencies,
)
from nanoinfer.model_config import RopeConfig

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
BF16_EPS = 2**-8  # half a unit in the last place, relative


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["ref", "auto"])
def kernels(request) -> Kernels:
    return select_kernels(CPU, request.param, use_compile=False)


# -- Frequencies ----------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3-3.2": {**LLAMA3, "factor": 32.0},
    "llama3-narrow": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.5},
    "yarn": YARN,
    "yarn-tiny": {**YARN, "original_max_position_embeddings": 64},
    "yarn-no-ramp": {**YARN, "original_max_position_embeddings": 6},
    "yarn-ramp-beyond-the-end": {
        **YARN,
        "rope_theta": 20.0,
        "original_max_position_embeddings": 3000,
    },
    "yarn-factor-1": {**YARN, "factor": 1.0},
    "yarn-betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn-one-beta": {**YARN, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "yarn-mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn-equal-mscales": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-mscale-alone": {**YARN, "mscale": 0.707},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.8782488562869419},
    "yarn-attention-factor-wins": {**YARN, "attention_factor": 1.5, "mscale": 1.0,
                                   "mscale_all_dim": 0.5},
    "yarn-truncate-false": {**YARN, "truncate": False},
    "yarn-gpt-oss": {**YARN, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "truncate": False},
}  # fmt: skip
HEAD_DIMS = [16, 64, 128]


def hf_config(
    name: str, head_dim: int = 64, theta: float = 1e6, max_position: int = 40960
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_parameters={"rope_theta": theta, **ROPES[name]},
    )


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(name, head_dim, theta):
    hf = hf_config(name, head_dim, theta)
    theirs = LlamaRotaryEmbedding(hf)
    inv_freq, factor = inverse_frequencies(RopeConfig.from_hf(hf, head_dim))
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_every_method_changes_the_default():
    """Else the comparison above would show nothing."""
    default, _ = inverse_frequencies(RopeConfig.from_hf(hf_config("default"), 64))
    for name in set(ROPES) - {"default", "yarn-factor-1", "yarn-ramp-beyond-the-end"}:
        inv_freq, _ = inverse_frequencies(RopeConfig.from_hf(hf_config(name), 64))
        assert (inv_freq / default).min() < 0.5, name
        assert (inv_freq / default).max() <= 1, name


@pytest.mark.parametrize("partial_rotary_factor", [0.25, 0.5])
@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn"])
def test_partial_frequencies_equal_transformers(name, partial_rotary_factor):
    hf = hf_config(name)
    hf.rope_parameters["partial_rotary_factor"] = partial_rotary_factor
    config = RopeConfig.from_hf(hf, 64)
    inv_freq, _ = inverse_frequencies(config)
    assert config.rotary_dim == 2 * len(inv_freq) == int(64 * partial_rotary_factor)
    if name != "default":  # which is not partial in transformers' Llama
        expected, _ = ROPE_INIT_FUNCTIONS[name](hf, "cpu")
        torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn", "yarn-mscale"])
def test_rotary_equals_transformers(name, dtype):
    hf = hf_config(name)
    positions = torch.tensor([0, 1, 2, 77, 3, 4095, 300, 0, 2047])
    query, key = random(9, 4, 64, dtype=dtype), random(9, 2, 64, dtype=dtype, seed=1)
    exact = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions[None])  # cos, sin in fp32
    q, k = (x.float().transpose(0, 1)[None] for x in (query, key))
    expected = [x[0].transpose(0, 1) for x in apply_rotary_pos_emb(q, k, *exact)]
    rope = get_rope(RopeConfig.from_hf(hf, 64), 4096, CPU)
    found = rope(positions, query, key, Kernels())
    # Angles of thousands of radians in fp32 are off by some 1e-4 here and there.
    rtol = 1e-4 if dtype == torch.float32 else BF16_EPS
    for ours, theirs, x in zip(found, expected, (query, key), strict=True):
        assert ours.dtype == dtype
        assert ours.shape == x.shape
        torch.testing.assert_close(ours.float(), theirs, rtol=rtol, atol=1e-3)


def test_rotary_turns_pairs_half_a_head_apart():
    """(1, 0) at dims i and i + R/2 becomes (cos, sin); the table's row is [cos | sin]."""
    rope = Rope(torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.6, 0.0, 0.8, 1.0]]))
    query = torch.tensor([[[1.0, 2.0, 0.0, 0.0]]])
    found, _ = rotary_ref(torch.tensor([1]), query, query, rope)
    torch.testing.assert_close(found, torch.tensor([[[0.6, 0.0, 0.8, 2.0]]]))
    found, _ = rotary_ref(torch.tensor([0]), query, query, rope)
    assert torch.equal(found, query)


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_rotary_leaves_the_rest(dtype):
    whole = RopeConfig(head_dim=32, rotary_dim=32, theta=1e4)
    partial = RopeConfig(head_dim=96, rotary_dim=32, theta=1e4)
    positions = torch.tensor([0, 5, 9])
    query, key = random(3, 4, 96, dtype=dtype), random(3, 1, 96, dtype=dtype, seed=1)
    found = get_rope(partial, 16, CPU)(positions, query, key, Kernels())
    rope = get_rope(whole, 16, CPU)
    expected = rope(positions, query[..., :32], key[..., :32], Kernels())
    for ours, front, x in zip(found, expected, (query, key), strict=True):
        assert torch.equal(ours[..., :32], front)
        assert torch.equal(ours[..., 32:], x[..., 32:])
        assert not torch.equal(ours[1:, :, :32], x[1:, :, :32])


def test_table_holds_cos_and_sin_in_float32():
    table = get_rope(RopeConfig(head_dim=32, rotary_dim=16, theta=1e4), 100, CPU).rope.cos_sin
    assert table.shape == (100, 16)
    assert table.dtype == torch.float32
    assert torch.equal(table[0], torch.tensor([1.0] * 8 + [0.0] * 8))
    torch.testing.assert_close(table[:, 0], torch.arange(100.0).cos())
    torch.testing.assert_close(table[:, 8], torch.arange(100.0).sin())


def test_equal_parameters_share_one_table():
    def config(theta: float = 12345.0) -> RopeConfig:
        return RopeConfig(head_dim=32, rotary_dim=32, theta=theta)

    rope = get_rope(config(), 64, CPU)
    assert get_rope(config(), 64, torch.device("cpu")) is rope
    others = [get_rope(config(54321.0), 64, CPU), get_rope(config(), 65, CPU)]
    assert all(other.rope.cos_sin is not rope.rope.cos_sin for other in others)
    alive = weakref.ref(rope.rope.cos_sin)
    del rope
    gc.collect()
    assert alive() is None  # nobody uses it
    assert get_rope(config(), 64, CPU).rope.cos_sin.shape == (64, 32)


def test_the_table_keeps_its_address_while_one_of_its_users_lives():
    """A captured graph holds on to the address, not to the object."""
    config = RopeConfig(head_dim=32, rotary_dim=32, theta=23456.0)
    one, two = get_rope(config, 64, CPU), get_rope(config, 64, CPU)
    address = one.rope.cos_sin.data_ptr()
    before = one.rope.cos_sin.clone()
    del one
    gc.collect()
    others = [get_rope(config, 64 + i, CPU) for i in range(1, 9)]  # would take freed memory
    again = get_rope(config, 64, CPU)
    assert again is two
    assert again.rope.cos_sin.data_ptr() == address
    assert torch.equal(again.rope.cos_sin, before)
    assert address not in {other.rope.cos_sin.data_ptr() for other in others}


def test_layers_and_engines_share_the_table(tiny_qwen3):
    def tables(llm: LLM) -> set[int]:
        layers = llm.engine._pipeline.runner._model.model.layers
        return {id(layer.self_attn.attn._rope) for layer in layers}

    with LLM(tiny_qwen3, num_kv_blocks=16) as one, LLM(tiny_qwen3, num_kv_blocks=16) as two:
        assert len(tables(one) | tables(two)) == 1


# -- Which dimensions, which pairs, which way -----------------------------------------------------


def as_complex(x: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Each pair as one number x1 + i x2."""
    x1, x2 = (x[..., ::2], x[..., 1::2]) if is_interleaved else x.double().chunk(2, dim=-1)
    return torch.complex(x1.double(), x2.double())


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_pairs_are_multiplied_by_a_unit_complex_number(kernels, is_interleaved):
    config = RopeConfig(head_dim=16, rotary_dim=16, theta=1e4, is_interleaved=is_interleaved)
    positions, query = torch.tensor([0, 3, 17]), random(3, 2, 16)
    found, _ = get_rope(config, 32, CPU)(positions, query, None, kernels)
    angles = torch.outer(positions.double(), 1e4 ** (-torch.arange(0, 16, 2).double() / 16))
    factor = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    expected = as_complex(query, is_interleaved) * factor
    torch.testing.assert_close(as_complex(found, is_interleaved), expected, rtol=1e-5, atol=1e-5)


def test_a_permutation_maps_one_pairing_into_the_other(kernels):
    neox = RopeConfig(head_dim=16, rotary_dim=16, theta=1e4)
    interleaved = RopeConfig(head_dim=16, rotary_dim=16, theta=1e4, is_interleaved=True)
    positions, query = torch.tensor([1, 5, 9]), random(3, 2, 16)
    order = torch.arange(16).view(2, 8).T.flatten()  # 0 8 1 9 ..: pairs come to lie side by side
    expected, _ = get_rope(neox, 16, CPU)(positions, query, None, kernels)
    found, _ = get_rope(interleaved, 16, CPU)(positions, query[..., order], None, kernels)
    assert torch.equal(found, expected[..., order])
    other, _ = get_rope(interleaved, 16, CPU)(positions, query, None, kernels)
    assert not torch.allclose(other, expected, atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 24, 64])
def test_a_part_of_a_head_is_turned_and_the_rest_passes(kernels, offset, dtype):
    config = RopeConfig(head_dim=96, rotary_dim=32, theta=1e4, offset=offset)
    whole = RopeConfig(head_dim=32, rotary_dim=32, theta=1e4)
    positions, query = torch.tensor([0, 5, 9]), random(3, 4, 96, dtype=dtype)
    found, _ = get_rope(config, 16, CPU)(positions, query, None, kernels)
    middle = slice(offset, offset + 32)
    expected, _ = get_rope(whole, 16, CPU)(positions, query[..., middle], None, kernels)
    assert torch.equal(found[..., middle], expected)
    assert torch.equal(found[..., :offset], query[..., :offset])
    assert torch.equal(found[..., offset + 32 :], query[..., offset + 32 :])


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_conjugate_turns_back(kernels, is_interleaved):
    config = RopeConfig(head_dim=48, rotary_dim=32, theta=1e4, offset=16,
                        is_interleaved=is_interleaved)  # fmt: skip
    rope, positions = get_rope(config, 64, CPU), torch.tensor([0, 1, 63])
    query, key = random(3, 4, 48), random(3, 2, 48, seed=1)
    turned = rope(positions, query, key, kernels)
    assert not torch.allclose(turned[0][1:], query[1:], atol=0.1)
    for ours, x in zip(rope(positions, *turned, kernels, is_conjugate=True), (query, key),
                       strict=True):  # fmt: skip
        torch.testing.assert_close(ours, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_conjugate_is_the_rotation_by_negative_angles(kernels, is_interleaved, dtype):
    config = RopeConfig(head_dim=16, rotary_dim=16, theta=1e4, is_interleaved=is_interleaved)
    rope, positions = get_rope(config, 64, CPU), torch.tensor([0, 1, 63])
    query, key = random(3, 4, 16, dtype=dtype), random(3, 2, 16, dtype=dtype, seed=1)
    cos, sin = rope.rope.cos_sin.chunk(2, dim=-1)
    negative = rope.rope._replace(cos_sin=torch.cat((cos, -sin), dim=-1))
    expected = kernels.rotary(positions, query, key, negative)
    assert all(map(torch.equal, rope(positions, query, key, kernels, is_conjugate=True), expected))
    assert not torch.equal(rope(positions, query, key, kernels)[0], expected[0])


@pytest.mark.parametrize("is_conjugate", [False, True])
def test_rotation_keeps_the_length_of_a_head(kernels, is_conjugate):
    rope = get_rope(RopeConfig(head_dim=48, rotary_dim=32, theta=1e4, offset=16), 64, CPU)
    query = random(3, 4, 48)
    found, _ = rope(torch.tensor([0, 1, 63]), query, None, kernels, is_conjugate)
    torch.testing.assert_close(found.norm(dim=-1), query.norm(dim=-1), rtol=1e-6, atol=0)


def test_a_key_of_none_changes_nothing_for_the_query(kernels):
    rope, positions = get_rope(RopeConfig(head_dim=8, rotary_dim=8, theta=1e4), 9, CPU), [3, 8]
    query, key = random(2, 4, 8), random(2, 1, 8, seed=1)
    alone, none = rope(torch.tensor(positions), query, None, kernels)
    both, _ = rope(torch.tensor(positions), query, key, kernels)
    assert none is None
    assert torch.equal(alone, both)


def test_a_row_is_read_once_per_token():
    """[cos | sin] in one gather of T rows, for query and key together."""
    rope = Rope(torch.randn(99, 8))
    counted = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if any(x is rope.cos_sin for x in args if isinstance(x, torch.Tensor)):
                counted.append(tuple(out.shape))
            return out

    with Mode():
        rotary_ref(torch.tensor([3, 5]), random(2, 4, 8), random(2, 1, 8), rope)
    assert counted == [(2, 8)]


@pytest.mark.parametrize("num_axes", [1, 3])
def test_the_last_row_of_the_table_turns_by_its_angle(kernels, num_axes):
    config = mrope((2, 1, 1), True) if num_axes == 3 else mrope((2, 1, 1), True, mrope_section=None)
    rope = get_rope(config, 50, CPU)
    positions = torch.full((3, 2) if num_axes == 3 else (2,), 49)
    query = torch.cat((torch.ones(2, 1, 4), torch.zeros(2, 1, 4)), dim=-1)  # becomes (cos, sin)
    found, _ = rope(positions, query, None, kernels)
    angles = 49 * 1e4 ** (-torch.arange(0, 8, 2).double() / 8)
    expected = torch.cat((angles.cos(), angles.sin())).float().expand(2, 1, 8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("position", [-1, 16])
def test_a_position_without_a_row_is_named_whichever_axis_it_is_on(axis, position):
    kernels = select_kernels(CPU, "auto", use_compile=False)
    if kernels.name != "cpu":
        pytest.skip("no C++ kernels here")
    positions = torch.tensor([[3, 15], [15, 0], [0, 15]])
    rope, query = get_rope(mrope((2, 1, 1), True), 16, CPU), random(2, 1, 8)
    rope(positions, query, None, kernels)
    positions[axis, 1] = position
    with pytest.raises(ValueError) as caught:
        rope(positions, query, None, kernels)
    assert f"got {positions[:, 1].tolist()} at token 1, need 0 to 15" in str(caught.value)


@pytest.mark.parametrize("position", [-1, 16])
def test_a_position_without_a_row_is_named(position):
    kernels = select_kernels(CPU, "auto", use_compile=False)
    if kernels.name != "cpu":
        pytest.skip("no C++ kernels here")
    rope = get_rope(RopeConfig(head_dim=8, rotary_dim=8, theta=1e4), 16, CPU)
    rope(torch.tensor([15]), random(1, 1, 8), None, kernels)  # the last row
    with pytest.raises(ValueError, match=f"got {position} at token 1, need 0 to 15"):
        rope(torch.tensor([3, position]), random(2, 1, 8), None, kernels)


# -- Pruned frequencies ---------------------------------------------------------------------------

PRUNED = {"kind": "yarn", "factor": 4.0, "original_max_position": 64, "theta": 1e4, "head_dim": 64}


def test_pruning_leaves_slow_frequencies_and_then_every_nth():
    whole, _ = inverse_frequencies(RopeConfig(**PRUNED, rotary_dim=64))
    slow = whole[whole <= 2 * math.pi / 100]
    assert 0 < len(slow) < len(whole)
    for interval in (1, 3):
        config = RopeConfig(
            **PRUNED,
            rotary_dim=64,
            high_freq_cycle_threshold=100.0,
            rope_freq_sample_interval=interval,
        )
        found, _ = inverse_frequencies(config)
        assert torch.equal(found, slow[::interval])


def test_a_table_narrower_than_what_is_turned_is_refused():
    config = RopeConfig(**PRUNED, rotary_dim=64, rope_freq_sample_interval=2)
    with pytest.raises(ValueError, match=r"got 16 frequencies \(a table of 32 columns\), need 32"):
        RotaryEmbedding(config, 128, CPU)


@pytest.mark.parametrize(("threshold", "interval"), [(None, 2), (100.0, 1), (100.0, 3)])
def test_a_pruned_table_turns_its_own_width_by_what_is_left(kernels, threshold, interval):
    """Of 32 frequencies; the dimensions beyond the table pass."""
    whole, factor = inverse_frequencies(RopeConfig(**PRUNED, rotary_dim=64))
    left = whole if threshold is None else whole[2 * math.pi / whole >= threshold]
    left = left[::interval]
    R = 2 * len(left)
    assert 0 < R < 64
    config = RopeConfig(**PRUNED, rotary_dim=R, frequency_dim=64,
                        high_freq_cycle_threshold=threshold,
                        rope_freq_sample_interval=interval)  # fmt: skip
    rope, query, positions = RotaryEmbedding(config, 128, CPU), random(2, 1, 64), [1, 100]
    assert rope.rope.cos_sin.shape == (128, R)
    found, _ = rope(torch.tensor(positions), query, None, kernels)
    assert torch.equal(found[..., R:], query[..., R:])
    angles = torch.outer(torch.tensor(positions).double(), left.double())
    turn = torch.polar(torch.full_like(angles, factor), angles).unsqueeze(1)
    expected = as_complex(query[..., :R], False) * turn
    torch.testing.assert_close(as_complex(found[..., :R], False), expected, rtol=1e-5, atol=1e-4)


def test_pruning_in_a_checkpoint_is_read():
    hf = hf_config("yarn")
    hf.rope_parameters |= {"high_freq_cycle_threshold": 50.0, "rope_freq_sample_interval": 2}
    config = RopeConfig.from_hf(hf, 64)
    assert (config.high_freq_cycle_threshold, config.rope_freq_sample_interval) == (50.0, 2)


# -- MRoPE ----------------------------------------------------------------------------------------


def mrope(section: tuple[int, ...], is_interleaved: bool, **other: Any) -> RopeConfig:
    return RopeConfig(**{"head_dim": 2 * sum(section), "rotary_dim": 2 * sum(section), "theta": 1e4,
                         "mrope_section": section, "is_mrope_interleaved": is_interleaved,
                         **other})  # fmt: skip


def image_positions() -> torch.Tensor:
    """4 tokens of text, a picture of 3 x 5 patches, 3 tokens of text: [3, 22]."""
    text = torch.arange(4).expand(3, -1)
    grid = torch.stack((torch.zeros(15), torch.arange(15) // 5, torch.arange(15) % 5)).long() + 4
    return torch.cat((text, grid, torch.arange(3).expand(3, -1) + 9), dim=1)


def test_axes_of_frequencies():
    blocks, interleaved = (frequency_axes(mrope((3, 3, 2), flag)) for flag in (False, True))
    assert blocks.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert interleaved.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert frequency_axes(mrope((4, 2, 1), True)).tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert frequency_axes(RopeConfig(head_dim=8, rotary_dim=8, theta=1e4)) is None


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_three_equal_axes_are_one(kernels, dtype, is_interleaved):
    """Bit for bit; and one position is enough for text."""
    config = mrope((11, 11, 10), is_interleaved, head_dim=96)
    plain = RopeConfig(head_dim=96, rotary_dim=64, theta=1e4)
    positions = torch.tensor([0, 7, 63, 12])
    query, key = random(4, 3, 96, dtype=dtype), random(4, 1, 96, dtype=dtype, seed=1)
    rope = get_rope(config, 64, CPU)
    expected = get_rope(plain, 64, CPU)(positions, query, key, kernels)
    for ours in (positions.repeat(3, 1), positions):
        assert all(map(torch.equal, rope(ours, query, key, kernels), expected))


def test_positions_of_a_picture_are_what_transformers_counts():
    """Else the comparisons below would be about positions that no model sees."""
    model = modeling_qwen3_5.Qwen3_5Model.__new__(modeling_qwen3_5.Qwen3_5Model)
    torch.nn.Module.__init__(model)
    model.config = Qwen3_5Config()
    merge = model.config.vision_config.spatial_merge_size
    kinds = torch.tensor([[0] * 4 + [1] * 15 + [0] * 3])  # 1: of a picture
    grid = torch.tensor([[1, 3 * merge, 5 * merge]])
    theirs, _ = model.get_rope_index(torch.zeros_like(kinds), kinds, image_grid_thw=grid)
    assert torch.equal(theirs[:, 0], image_positions())


def check_mrope(
    theirs: Any, config: RopeConfig, head_dim: int, kernels: Kernels, dtype: torch.dtype
) -> None:
    positions = image_positions()
    T = positions.shape[1]
    query, key = random(T, 4, head_dim, dtype=dtype), random(T, 2, head_dim, dtype=dtype, seed=1)
    module, apply = theirs
    cos_sin = module(query.float(), positions[:, None])
    q, k = (x.float().transpose(0, 1)[None] for x in (query, key))
    expected = [x[0].transpose(0, 1) for x in apply(q, k, *cos_sin)]
    rope = get_rope(config, 64, CPU)
    for ours, x in zip(rope(positions, query, key, kernels), expected, strict=True):
        assert ours.dtype == dtype
        rtol = 1e-5 if dtype == torch.float32 else BF16_EPS
        torch.testing.assert_close(ours.float(), x, rtol=rtol, atol=1e-5)
    for swap in ((0, 2, 1), (1, 0, 2)):  # else the comparison would show little
        swapped, _ = rope(positions[[*swap]].contiguous(), query, key, kernels)
        assert not torch.allclose(swapped.float(), expected[0], atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_interleaved_sections_equal_transformers_qwen3_5(kernels, dtype):
    hf = Qwen3_5TextConfig()
    hf.rope_parameters |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    config = RopeConfig.from_hf(hf, hf.head_dim)
    assert (config.rotary_dim, config.mrope_section) == (64, (11, 11, 10))
    assert config.is_mrope_interleaved
    module = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(hf)
    theirs = (module, modeling_qwen3_5.apply_rotary_pos_emb)
    check_mrope(theirs, config, hf.head_dim, kernels, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sections_in_blocks_equal_transformers_qwen2_vl(kernels, dtype):
    hf = Qwen2VLTextConfig()
    hf.rope_parameters |= {"mrope_section": [16, 24, 24]}
    config = RopeConfig.from_hf(hf, 128)
    assert config.mrope_section == (16, 24, 24)
    assert not config.is_mrope_interleaved
    module = modeling_qwen2_vl.Qwen2VLRotaryEmbedding(hf)
    theirs = (module, modeling_qwen2_vl.apply_rotary_pos_emb)
    check_mrope(theirs, config, 128, kernels, dtype)


@pytest.mark.parametrize("section", [(3, 3, 3), (4, 4), (2, 2, 2, 2)])
def test_sections_that_are_not_the_frequencies_are_refused(section):
    config = mrope((3, 3, 2), True)
    config = RopeConfig(**{**vars(config), "mrope_section": section})
    with pytest.raises(ValueError, match=r"need 3 numbers that add up to 8"):
        RotaryEmbedding(config, 16, CPU)


# -- Questions that readers ask about MRoPE, answered ---------------------------------------------


def test_is_the_table_part_of_the_checkpoint(tiny_qwen3):
    """No: it is computed from the config, and no module holds it."""
    with LLM(tiny_qwen3, num_kv_blocks=4) as llm:
        model = llm.engine._pipeline.runner._model
        assert not any("rope" in name or "rotary" in name for name in model.state_dict())
        assert not isinstance(model.model.layers[0].self_attn.attn._rope, torch.nn.Module)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_does_a_gather_keep_torch_compile_away(is_interleaved):
    """No: with the gather in it the rotation is one graph, for all lengths and layers."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(rotary_ref, backend=counter, fullgraph=True, dynamic=True)
    config = mrope((11, 11, 10), is_interleaved)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layer, T in enumerate((5, 9, 22)):
            query, key = random(T, 4, 64, seed=layer), random(T, 2, 64, seed=layer + 9)
            rope, positions = get_rope(config, 64, CPU).rope, image_positions()[:, :T].contiguous()
            found = compiled(positions, query, key, rope)
            assert all(map(torch.equal, found, rotary_ref(positions, query, key, rope)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("width", [5, 7, 40])
def test_can_mrope_be_cached_although_pictures_differ(kernels, width):
    """Yes: each axis is a position below the table's length, whatever the picture."""
    config, P = mrope((11, 11, 10), True), 64
    cells = torch.arange(6 * width)
    positions = torch.stack((cells * 0, cells // width, cells % width))
    query = random(len(cells), 2, 64)
    rope = get_rope(config, P, CPU)
    assert rope.rope.cos_sin.shape == (P, 64)
    found, _ = rope(positions, query, None, kernels)
    inv_freq, _ = inverse_frequencies(config)
    angles = positions[frequency_axes(config)].T.float() * inv_freq  # computed on the fly
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    x1, x2 = query.chunk(2, dim=-1)
    expected = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_why_11_11_10():
    """They must add up to half of the rotated dimensions, 32; how they are split is a choice."""
    for section in ((11, 11, 10), (16, 8, 8), (32, 0, 0)):
        axes = frequency_axes(mrope(section, True, head_dim=64, rotary_dim=64))
        assert [int((axes == axis).sum()) for axis in range(3)] == [*section]
    with pytest.raises(ValueError, match="need 3 numbers that add up to 32"):
        frequency_axes(mrope((11, 11, 11), True, head_dim=64, rotary_dim=64))


def test_what_does_the_gather_pick():
    """For each token and frequency, the angle of that frequency's axis: the double loop."""
    config = mrope((3, 3, 2), True)
    table, axes = get_rope(config, 32, CPU).rope.cos_sin, frequency_axes(config)
    positions = image_positions()
    query = torch.cat((torch.ones(22, 1, 8), torch.zeros(22, 1, 8)), dim=-1)  # becomes (cos, sin)
    found, _ = rotary_ref(positions, query, None, get_rope(config, 32, CPU).rope)
    for token in range(22):
        for i, axis in enumerate(axes.tolist()):
            row = table[positions[axis, token]]
            assert found[token, 0, i] == row[i]
            assert found[token, 0, i + 8] == row[i + 8]


def test_are_members_of_a_pair_turned_by_different_axes():
    """No: a pair has one frequency, and a frequency has one axis. Qwen pairs i with i + R/2.

    The pairing 2i with 2i + 1 is another rotation: not what transformers computes.
    """
    config = mrope((3, 3, 2), True)
    axes = get_rope(config, 32, CPU).rope.axes
    assert torch.equal(axes[:8], axes[8:])  # of cos i and sin i, which turn dims i and i + 8
    positions, query = image_positions(), random(22, 1, 16)
    found, _ = rotary_ref(positions, query, None, get_rope(config, 32, CPU).rope)
    pairs = found[..., :8] ** 2 + found[..., 8:] ** 2
    torch.testing.assert_close(pairs, query[..., :8] ** 2 + query[..., 8:] ** 2)
    neighbours = found[..., ::2] ** 2 + found[..., 1::2] ** 2
    assert not torch.allclose(neighbours, query[..., ::2] ** 2 + query[..., 1::2] ** 2, atol=0.1)
    hf = Qwen3_5TextConfig(head_dim=16)
    hf.rope_parameters |= {"mrope_section": [3, 3, 2], "partial_rotary_factor": 1.0}
    cos, sin = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(hf)(query, positions[:, None])
    theirs, _ = modeling_qwen3_5.apply_rotary_pos_emb(
        query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos, sin
    )
    torch.testing.assert_close(theirs[0].transpose(0, 1), found, rtol=1e-5, atol=1e-5)


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_axes", [1, 3])
def test_compiled_rotation_is_one_kernel_and_the_references_bits(num_axes, dtype):
    from torch._inductor.utils import run_and_get_code

    compiled = select_kernels(CPU, "ref", use_compile=True)
    positions = torch.arange(150).view(3, 50) * 37 % 64
    positions = positions if num_axes == 3 else positions[0].contiguous()
    query, key = random(50, 4, 64, dtype=dtype), random(50, 2, 64, dtype=dtype, seed=1)
    rope = get_rope(mrope((11, 11, 10), True), 64, CPU).rope
    try:
        found, codes = run_and_get_code(compiled.rotary, positions, query, key, rope)
    except Exception as error:
        if "InvalidCxxCompiler" in type(error).__name__ or "Python.h" in str(error):
            pytest.skip(f"inductor cannot compile here: {error}")
        raise
    assert len(codes) == 1
    assert codes[0].count("async_compile.cpp_pybinding(") == 1
    for ours, expected in zip(found, rotary_ref(positions, query, key, rope), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
