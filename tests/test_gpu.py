"""What only a GPU can show: run with `pytest -m gpu`, or by scripts/gpu_check.py.

The same inputs as the CPU's tests use, moved over; bf16 against references in fp32.
"""

import dataclasses

import pytest
import test_gated_delta as delta
import test_moe as mixture
import torch
from oracle import good_prompts, hf_greedy
from test_cuda_graphs import tensors_of
from test_paged_attention import make_case
from test_quantized_kv import in_8_bits, make_store_case, new_caches
from tiny import TINY_NAMES

from nanoinfer import LLM, SamplingParams
from nanoinfer.batch import Batch
from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.gumbel import row_keys
from nanoinfer.kernels.library_attention import load_attention
from nanoinfer.kernels.linear import linear_ref, quantize_blocks_fp8
from nanoinfer.kernels.moe import Routing
from nanoinfer.kernels.quantized_kv import KV_DTYPES, dequantize_heads
from nanoinfer.layers.attention import KVCacheSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda")
BF16 = torch.bfloat16
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def kernels():
    return select_kernels(GPU, "auto", use_compile=False)


def to_gpu(x):
    if isinstance(x, torch.Tensor):
        return x.to(GPU)
    return type(x)(*(to_gpu(part) for part in x)) if isinstance(x, tuple) else x


def check(found, expected, tolerance=2e-2):
    error = (found.float().cpu() - expected.float()).norm() / expected.float().norm()
    assert error < tolerance


@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 4, 128), (8, 2, 256), (9, 3, 64)])
@pytest.mark.parametrize(
    "step", [[(1, 300), (1, 5), (1, 1000)], [(70, 70), (1, 90), (130, 400)], [(1, 0), (1, 40)]]
)
def test_attention(kernels, heads, step):
    case = make_case(step, *heads[:2], head_dim=heads[2], dtype=BF16)
    wide = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in case]
    check(kernels.paged_attention(*map(to_gpu, case)), Kernels().paged_attention(*wide))


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_and_values_in_8_bits(kernels, head_dim, dtype, is_rotated):
    if dtype == torch.float8_e4m3fn and not kernels.keeps_fp8:
        pytest.skip("no FP8 here")
    case = make_case([(1, 300), (70, 90), (1, 5)], head_dim=head_dim, dtype=BF16)
    k, v, scales = in_8_bits(case[1], case[2], dtype, is_rotated)
    rest = (k, v, *case[3:], scales)
    expected = Kernels().paged_attention(case[0].float(), *rest)
    check(kernels.paged_attention(*map(to_gpu, (case[0], *rest))), expected)
    *arguments, slots = (*make_store_case(BF16, head_dim), torch.randperm(64)[:21])
    cache = new_caches(dtype, head_dim, is_rotated)
    on_gpu = to_gpu(cache)
    queries = kernels.norm_rope_store(
        *map(to_gpu, arguments), on_gpu.k, on_gpu.v, to_gpu(slots), on_gpu.scales
    )
    expected = Kernels().norm_rope_store(*arguments, cache.k, cache.v, slots, cache.scales)
    check(queries, expected)
    for name in ("k", "v"):
        caches = ((getattr(c, name), getattr(c.scales, name)) for c in (on_gpu, cache))
        check(*(dequantize_heads(*c, torch.float32) for c in caches))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_norm_rope_store(kernels, head_dim):
    *arguments, slots = (*make_store_case(BF16, head_dim), torch.randperm(64)[:21])
    cache = KVCacheSpec(2, head_dim, BF16).allocate(4, 16, torch.device("cpu"))
    on_gpu = to_gpu(cache)
    queries = kernels.norm_rope_store(*map(to_gpu, arguments), *on_gpu, to_gpu(slots))
    check(queries, Kernels().norm_rope_store(*arguments, *cache, slots))
    check(on_gpu.k, cache.k)
    assert torch.equal(on_gpu.v.cpu(), cache.v)


@pytest.mark.parametrize("name", ["varlen", "flash_attn"])
@pytest.mark.parametrize("step", [[(1, 300), (1, 5), (1, 0)], [(70, 70), (1, 590)]])
def test_attention_of_libraries(name, step):
    try:
        attention = load_attention(name, GPU, BF16, 256, 128)
    except ValueError as error:
        pytest.skip(str(error))
    case = make_case(step, 16, 8, head_dim=128, block_size=256, dtype=BF16)
    case[1:3] = [x.nan_to_num() for x in case[1:3]]
    wide = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in case]
    check(attention(*map(to_gpu, case)), Kernels().paged_attention(*wide))


def test_draw(kernels):
    torch.manual_seed(0)
    R = 64
    logits = torch.randn(R, 151_936) * 3
    keys = row_keys(torch.arange(R), torch.arange(R))
    given = [torch.rand(R), torch.randint(0, 3, (R,)) * 40, 1 - torch.rand(R) / 5]
    given += [torch.rand(R) / 100 * (torch.arange(R) % 2), keys]
    expected = Kernels().draw(logits.clone(), *given)
    torch.cuda.synchronize()
    on_gpu = [x.to(GPU) for x in (logits, *given)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = kernels.draw(*on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (found.cpu() == expected).float().mean() > 0.98  # the rest: a mass near top_p


@pytest.mark.parametrize("case", delta.CASES, ids=range(len(delta.CASES)))
def test_delta_and_convolution(kernels, case):
    x, where = delta.inputs(case, 4, 8, 128, 128), delta.places(case, 12)
    state = delta.make_state(12, 8, 128, 128)
    on_gpu, places = state.to(GPU), [to_gpu(i) for i in where]
    found = kernels.gated_delta(*map(to_gpu, x), on_gpu, *places)
    check(found, delta.gated_delta_ref(*x, state, *where), 1e-4)
    check(on_gpu[1:], state[1:], 1e-4)
    rows, weight = delta.strided(len(x[0]), 300), torch.randn(4, 300)
    state = delta.make_state(12, 3, 300)
    on_gpu = state.to(GPU)
    found = kernels.causal_conv(rows.to(GPU), weight.to(GPU), on_gpu, *places)
    check(found, delta.causal_conv_ref(rows, weight, state, *where), 1e-5)
    assert torch.equal(on_gpu[1:].cpu(), state[1:])


def test_mixture(kernels):
    x, logits, experts = mixture.make_case(200, 256, 128, 16, dtype=BF16)
    routing = Routing(4, True)
    expected = Kernels().moe(x, logits, experts, routing)
    check(kernels.moe(to_gpu(x), to_gpu(logits), to_gpu(experts), routing), expected)


@pytest.mark.parametrize(("M", "K", "N"), [(1, 768, 512), (4, 1152, 256), (200, 2048, 4096)])
def test_fp8_product(kernels, M, K, N):
    if not kernels.keeps_fp8:
        pytest.skip("no FP8 here")
    x, weight = torch.randn(M, K, dtype=BF16), torch.randn(N, K) / K**0.5
    values, scales = quantize_blocks_fp8(weight)
    expected = torch.empty(M, N)
    linear_ref(x.float(), values, scales, None, expected)
    packed = kernels.pack_weight(to_gpu(values), to_gpu(scales))
    check(packed.multiply(to_gpu(x), None, False), expected, 5e-2)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 7}])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_greedy_ids_equal_transformers(tiny, name, options):
    folder = tiny(name)
    prompts = list(good_prompts(folder, [1, 3, 16, 17, 64, 100], NUM_TOKENS).values())
    with LLM(folder, dtype="float32", device="cuda", max_model_len=128, **options) as llm:
        for _ in range(2):  # cold, and from the prefix cache
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.outputs[0].token_ids == hf_greedy(folder, prompt, NUM_TOKENS)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3_5"])
def test_replays_are_the_bits_of_the_model_and_wait_for_nothing(tiny, name):
    with LLM(tiny(name), dtype="bfloat16", device="cuda", skip_tokenizer_init=True) as llm:
        runner = llm.engine._pipeline.runner
        for prompt in ([5, 6, 7], [8] * 30, [9] * 5):
            llm.engine.add_request(llm.engine.make_request(prompt, GREEDY))
        while llm.engine.scheduler.waiting or not llm.engine.scheduler.running[-1].output_token_ids:
            llm.engine.step()
        batch = Batch.build(llm.engine.scheduler.schedule(), llm.engine.config.block_size, GPU)
        states = [tensor.clone() for tensor in tensors_of(runner._caches)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            replayed = runner._graphs.run(batch).clone()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for tensor, before in zip(tensors_of(runner._caches), states, strict=True):
            tensor.copy_(before)
        assert torch.equal(replayed, runner._model(pad(batch, 4), runner._caches)[:3])


def pad(batch, size):
    """As the bucket has it: sequences of no keys behind."""
    more = size - batch.num_entries

    def longer(x):
        return torch.cat((x, x.new_zeros(more, *x.shape[1:])))

    names = ("input_ids", "positions", "slot_mapping", "seq_lens", "block_tables")
    fields = {name: longer(getattr(batch, name)) for name in names}
    fields["states"] = longer(batch.states.T).T.contiguous()
    fields["cu_seqlens_q"] = torch.arange(size + 1, dtype=torch.int32, device=GPU)
    return dataclasses.replace(batch, num_entries=size, **fields)
