"""Keys and values in 8 bits: the conversion, its C++ twins, and engines that run on it."""

import pytest
import torch
from conftest import NEEDED, kernel_library
from test_paged_attention import MIXED, make_case, naive_attention

from nanoinfer import LLM, EngineConfig, SamplingParams
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.norm_rope_store import (
    HeadNorms,
    make_norm_rope_store_cpu,
    norm_rope_store_ref,
)
from nanoinfer.kernels.paged_attention import make_paged_attention_cpu, paged_attention_ref
from nanoinfer.kernels.quantized_kv import (
    KV_DTYPES,
    KVScales,
    dequantize_heads,
    hadamard,
    quantize_heads,
)
from nanoinfer.kernels.rotary import Rope
from nanoinfer.layers.attention import KVCacheSpec
from nanoinfer.layers.gated_delta_net import StateCacheSpec
from nanoinfer.layers.quantized_kv_cache import QuantizedKVCacheSpec, choose_specs

INT8, E4M3 = KV_DTYPES
HEADS = [(torch.float32, D) for D in (128, 80, 32, 20, 7)]
HEADS += [(torch.bfloat16, D) for D in (128, 80, 32, 20)]


@pytest.fixture(params=["native", *NEEDED])
def library(request):
    return kernel_library(request.param)


def hadamard_matrix(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), matrix)
    return matrix * size**-0.5


def in_8_bits(k_cache, v_cache, dtype, is_rotated):
    """Two caches as KVCache has them, unwritten slots with zeros instead of NaN."""
    k_cache, v_cache = (x.nan_to_num() for x in (k_cache, v_cache))
    if is_rotated:
        k_cache, v_cache = hadamard(k_cache), hadamard(v_cache)
    (k, k_scales), (v, v_scales) = (quantize_heads(x, dtype) for x in (k_cache, v_cache))
    return k, v, KVScales(k_scales, v_scales, is_rotated)


def make_store_case(dtype, head_dim, num_tokens=21):
    """Arguments of norm_rope_store but for the caches and slots; slots of a pool of 4 x 16."""
    torch.manual_seed(0)
    fused = torch.randn(num_tokens, 8, head_dim) * torch.logspace(-3, 2, num_tokens)[:, None, None]
    q, k, v = fused.to(dtype).split([4, 2, 2], dim=1)
    weight = torch.rand(head_dim).to(dtype)
    rope = Rope(torch.randn(50, head_dim // 2 * 2), None)
    positions = torch.randint(0, 50, (num_tokens,))
    return [q, k, v, HeadNorms(weight, weight, 1e-6), positions, rope]


def new_caches(dtype, head_dim, is_rotated):
    spec = QuantizedKVCacheSpec(2, head_dim, dtype, is_rotated)
    return spec.allocate(4, 16, torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 2, 16, 128, 256])
def test_a_rotation_is_the_normalised_hadamard_matrix(size):
    x = torch.randn(3, 5, size)
    expected = x.double() @ hadamard_matrix(size)
    torch.testing.assert_close(hadamard(x).double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(x)), x, atol=1e-6, rtol=1e-5)  # its own inverse


def test_a_head_of_another_size_is_turned_in_pieces():
    x = torch.randn(2, 80)
    pieces = x.unflatten(-1, (5, 16))
    torch.testing.assert_close(hadamard(x), hadamard(pieces).flatten(-2))
    assert hadamard(torch.ones(7)).equal(torch.ones(7))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_value_is_at_most_half_a_step_off(dtype):
    torch.manual_seed(0)
    x = torch.randn(50, 64) * torch.logspace(-4, 4, 50)[:, None]
    values, scales = quantize_heads(x, dtype)
    assert values.dtype == dtype
    assert scales.shape == (50,)
    error = (dequantize_heads(values, scales, torch.float32) - x).abs()
    steps = scales[:, None].expand_as(x)
    if dtype == E4M3:  # 3 bits of mantissa, and 2^-9 near 0
        steps = steps * (2.0 ** ((x.abs() / steps).log2().floor() - 3)).clamp(min=2.0**-9)
    assert (error <= 0.501 * steps).all()
    assert (values.float().abs().amax(-1) == (127 if dtype == INT8 else 448)).all()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_heads_of_zeros_are_zeros_again(dtype):
    values, scales = quantize_heads(torch.zeros(2, 8), dtype)
    assert scales.gt(0).all()
    assert dequantize_heads(values, scales, torch.bfloat16).eq(0).all()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_rotation_spreads_an_outlier(dtype):
    torch.manual_seed(0)
    x = torch.randn(100, 128)
    x[:, 17] = 80
    plain = dequantize_heads(*quantize_heads(x, dtype), torch.float32)
    turned = hadamard(dequantize_heads(*quantize_heads(hadamard(x), dtype), torch.float32))
    rest = torch.arange(128) != 17
    plain_error, turned_error = ((y - x)[:, rest].square().mean() for y in (plain, turned))
    if dtype == INT8:  # whose steps are alike everywhere
        assert turned_error < plain_error / 10
    else:  # has an exponent of its own for each value, which an outlier does not take away
        assert turned_error > plain_error


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [32, 20])
def test_reference_is_attention_over_what_was_stored(head_dim, dtype, is_rotated):
    """Against a softmax a token in fp64, over the dequantised caches, turned back."""
    case = make_case(MIXED, head_dim=head_dim)
    k, v, scales = in_8_bits(case[1], case[2], dtype, is_rotated)
    wide = [
        dequantize_heads(k, scales.k, torch.float32),
        dequantize_heads(v, scales.v, torch.float32),
    ]
    q = case[0]
    if is_rotated:  # so must q be, as norm_rope_store leaves it
        wide = [hadamard(x) for x in wide]
        case[0] = hadamard(q)
    expected = naive_attention(q, *wide, *case[3:])
    found = paged_attention_ref(case[0], k, v, *case[3:], scales)
    torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("q_dtype", "head_dim"), HEADS)
def test_attention_twin(library, q_dtype, head_dim, dtype, is_rotated):
    """Decoding (streams of keys) and chunks (tiles); any width of head."""
    attention = make_paged_attention_cpu(library, 2)
    for chunks in (MIXED, [(1, 300), (1, 17)]):
        case = make_case(chunks, head_dim=head_dim, dtype=q_dtype)
        k, v, scales = in_8_bits(case[1], case[2], dtype, is_rotated)
        arguments = (case[0], k, v, *case[3:], scales)
        found, expected = attention(*arguments), paged_attention_ref(*arguments)
        tolerance = 3e-6 if q_dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("q_dtype", "head_dim"), HEADS)
def test_store_twin(library, q_dtype, head_dim, dtype, is_rotated):
    """Values come out bit by bit; of q and k the norm adds up in another order."""
    case = make_store_case(q_dtype, head_dim)
    slots = torch.randperm(64)[:21]
    results = []
    for store in (norm_rope_store_ref, make_norm_rope_store_cpu(library, 2)):
        cache = new_caches(dtype, head_dim, is_rotated)
        queries = store(*case, cache.k, cache.v, slots, cache.scales)
        results.append((queries.float(), cache))
    (expected, reference), (found, cache) = results
    tolerance = {"atol": 1e-5, "rtol": 1e-5}
    if q_dtype == torch.bfloat16:
        tolerance = {"atol": 2e-2, "rtol": 1e-2}
    torch.testing.assert_close(found, expected, **tolerance)
    assert cache.v.float().equal(reference.v.float())
    assert cache.scales.v.equal(reference.scales.v)
    keys = [dequantize_heads(c.k, c.scales.k, torch.float32) for c in (cache, reference)]
    unlike = (keys[0] - keys[1]).abs() > 1e-5 * keys[1].abs().amax(-1, keepdim=True)
    assert unlike.float().mean() < 2e-3  # on the other side of a rounding


@pytest.mark.parametrize("store", ["ref", "native"])
def test_slots_that_are_not_named_stay(store):
    body = norm_rope_store_ref
    if store == "native":
        body = make_norm_rope_store_cpu(kernel_library("native"), 2)
    cache = new_caches(INT8, 32, True)
    body(
        *make_store_case(torch.float32, 32, 2),
        cache.k,
        cache.v,
        torch.tensor([5, 40]),
        cache.scales,
    )
    for tensor in (cache.k, cache.v, *cache.scales[:2]):
        written = tensor.flatten(0, 1).ne(0).flatten(1).any(1).nonzero().flatten()
        assert written.tolist() == [5, 40]


def test_a_bad_slot_writes_nothing():
    body = make_norm_rope_store_cpu(kernel_library("native"), 2)
    cache, slots = new_caches(E4M3, 32, False), torch.tensor([5, 64])
    case = make_store_case(torch.float32, 32, 2)
    with pytest.raises(ValueError, match="slot_mapping: got 64 at token 1"):
        body(*case, cache.k, cache.v, slots, cache.scales)
    assert cache.k.float().eq(0).all()
    assert cache.scales.v.eq(0).all()


@pytest.mark.parametrize("kernels", ["ref", "native"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v, s: (k.float(), v, s), "k_cache, v_cache: got torch.float32, torch.int8"),
        (lambda k, v, s: (k, v, None), "need one of torch.float32 for both"),
        (lambda k, v, s: (k, v, s._replace(k=s.k[:1])), "scales.k: got torch.float32"),
        (lambda k, v, s: (k, v, s._replace(v=s.v.half())), "scales.v: got torch.float16"),
    ],
)
def test_refusals_by_name(kernels, change, message):
    attention = paged_attention_ref
    if kernels == "native":
        attention = make_paged_attention_cpu(kernel_library("native"), 2)
    case = make_case(MIXED)
    k, v, scales = change(*in_8_bits(case[1], case[2], INT8, False))
    with pytest.raises(ValueError, match=message):
        attention(case[0], k, v, *case[3:], scales)


def test_a_spec_counts_what_it_allocates():
    specs = [QuantizedKVCacheSpec(2, 32, dtype, True) for dtype in KV_DTYPES]
    for spec in (*specs, KVCacheSpec(2, 32, torch.float32)):
        k, v, *scales = spec.allocate(3, 16, torch.device("cpu"))
        tensors = [k, v, *(x for pair in scales for x in pair[:2])]
        assert 3 * spec.bytes_per_unit(16) == sum(x.numel() * x.itemsize for x in tensors)


PROMPTS = [list(range(3 + i, 40 + 9 * i)) for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3_5"])
def test_engine_does_not_depend_on_how_it_runs(tiny, name, dtype, is_rotated):
    """Chunks, prefix hits, preemption, recorded steps, kernels: the same keys, the same tokens."""
    options = {"dtype": "float32", "kv_cache_dtype": dtype, "kv_cache_rotation": is_rotated}
    with LLM(tiny(name), kernels="ref", **options) as llm:
        expected = answers(llm)
    with LLM(tiny(name), max_num_batched_tokens=17, **options) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected
        assert llm.stats().prefix_hit_tokens > 0
    with LLM(tiny(name), num_kv_blocks=14, enforce_eager=True, **options) as llm:
        assert answers(llm) == expected
        assert llm.stats().preemptions > 0


def test_engine_reads_what_it_stored_in_8_bits(tiny_qwen3):
    """It does depend on the cache: the answers' probabilities are near, and not the same."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = {}
    for dtype in ("auto", "int8", "fp8_e4m3"):
        with LLM(tiny_qwen3, dtype="float32", kv_cache_dtype=dtype) as llm:
            (output,) = llm.generate([{"prompt_token_ids": PROMPTS[4]}], params, use_tqdm=False)
        pairs = zip(PROMPTS[4], output.prompt_logprobs, strict=True)
        found[dtype] = torch.tensor([p[i].logprob for i, p in pairs if p is not None])
    for dtype in ("int8", "fp8_e4m3"):
        difference = (found[dtype] - found["auto"]).abs()
        assert 0 < difference.mean() < 0.1


def test_as_many_bytes_hold_more_blocks(tiny_qwen3):
    sizes = {}
    for dtype in ("auto", "int8"):
        with LLM(
            tiny_qwen3, dtype="bfloat16", kv_cache_dtype=dtype, kv_cache_memory=1 << 20
        ) as llm:
            sizes[dtype] = llm.stats().total_blocks
    assert sizes["int8"] > 1.6 * sizes["auto"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: got 'fp8', need one of auto, int8, fp8_e4m3"),
        ({"kv_cache_dtype": torch.int8}, "kv_cache_dtype: got torch.int8"),
        ({"kv_cache_rotation": 1}, "kv_cache_rotation: got 1"),
    ],
)
def test_options_are_checked(tiny_qwen3, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(tiny_qwen3, **options)


def test_e4m3_needs_a_gpu_that_converts_it():
    old, new = Kernels(name="triton"), Kernels(name="triton", keeps_fp8=True)
    state, attending = StateCacheSpec(None, torch.float32), KVCacheSpec(2, 32, torch.bfloat16)

    def choose(dtype, kernels):
        config = EngineConfig(model="m", kv_cache_dtype=dtype)
        kept, found = choose_specs(config, [state, attending], kernels)
        assert kept is state
        return found

    with pytest.raises(ValueError, match="need a GPU of compute capability 8"):
        choose("fp8_e4m3", old)
    assert choose("int8", old) == QuantizedKVCacheSpec(2, 32, INT8, is_rotated=True)
    assert choose("fp8_e4m3", new).dtype == choose("fp8_e4m3", Kernels()).dtype == E4M3
    assert choose("auto", old) is attending
