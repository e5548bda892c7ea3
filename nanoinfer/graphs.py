"""Which kind of graphs a device has, and how much of its memory is left for caches beside them.

In: a loaded model and its caches (null blocks and slots alone will do). Out: an object that replays
decoding steps, or None; bytes.

On a GPU the worst step is run and all graphs are captured to see what they take; what is left of
`gpu_memory_utilization` belongs to the caches. The graphs are captured again when these are there,
at the addresses that they will keep.
"""

import torch

from nanoinfer.batch import Batch, SamplingBatch
from nanoinfer.cache_sizes import memory_for_caches
from nanoinfer.config import EngineConfig
from nanoinfer.cpu_graphs import CpuGraphs
from nanoinfer.cuda_graphs import CudaGraphs
from nanoinfer.kernels import Kernels
from nanoinfer.launched import collect
from nanoinfer.models.qwen3 import Cache, CausalLM
from nanoinfer.sampler import sample


def make_graphs(
    model: CausalLM,
    caches: list[Cache],
    max_num_seqs: int,
    max_blocks: int,
    device: torch.device,
    kernels: Kernels,
) -> CpuGraphs | CudaGraphs | None:
    """None for kernels that read their batch on the host, as the references do."""
    if kernels.name == "triton":
        return CudaGraphs(model, caches, max_num_seqs, max_blocks, device)
    if kernels.recorder is not None:
        return CpuGraphs(model, caches, kernels.recorder, max_blocks)
    return None


def free_memory(
    model: CausalLM, caches: list[Cache], config: EngineConfig, longest: int, kernels: Kernels
) -> int:
    """Bytes for caches: on a CPU a share of what is free, on a GPU what weights and work leave."""
    device = config.torch_device
    if device.type == "cpu":
        return memory_for_caches()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        num_tokens = config.max_num_batched_tokens
        batch = worst_batch(num_tokens, min(num_tokens, longest), config.block_size, device)
        rows = min(config.max_num_seqs, num_tokens)
        sampling = worst_sampling(rows, device)
        collect(sample(model.logits(model(batch, caches)[:rows]), sampling, kernels), [0] * rows)
    taken = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()  # what the step took is counted below
    free, total = torch.cuda.mem_get_info(device)
    if not config.enforce_eager:
        max_blocks = -(-longest // config.block_size)
        graphs = make_graphs(model, caches, config.max_num_seqs, max_blocks, device, kernels)
        taken += free - torch.cuda.mem_get_info(device)[0]
        del graphs
        torch.cuda.empty_cache()
    return int(free - (1 - config.gpu_memory_utilization) * total - taken)


def worst_sampling(num_rows: int, device: torch.device) -> SamplingBatch:
    """Every row is filtered and asks for log probabilities."""
    ones = torch.ones(num_rows, device=device)
    ids = torch.ones(num_rows, dtype=torch.int64, device=device)
    return SamplingBatch(
        temperatures=ones,
        top_k=ids,
        top_p=ones / 2,
        min_p=ones / 2,
        seeds=ids,
        positions=ids,
        added=None,
        repetition=None,
        penalties=None,
        num_logprobs=[0] * num_rows,
    )


def worst_batch(num_tokens: int, longest: int, block_size: int, device: torch.device) -> Batch:
    """Prompts of up to `longest` tokens in the null block: the worst case for memory."""
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    bounds = [*range(0, num_tokens, longest), num_tokens]
    cu_seqlens_q = torch.tensor(bounds, dtype=torch.int32, device=device)
    S, M = len(bounds) - 1, -(-longest // block_size)
    return Batch(
        input_ids=zeros,
        positions=torch.arange(num_tokens, device=device) % longest,
        slot_mapping=zeros,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=cu_seqlens_q.diff(),
        block_tables=torch.zeros(S, M, dtype=torch.int32, device=device),
        states=torch.zeros(2, S, dtype=torch.int32, device=device),
        logits_indices=zeros[:1],
        sampled_entries=[],
        num_entries=S,
        sampling=None,
    )
