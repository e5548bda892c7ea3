"""Owns the weights and the caches, and runs one step.

In: a `Batch`. Out: a `Launched` step: per scheduled sequence the sampled token ids and the log
probabilities asked for. It never sees a Sequence, and the engine above never sees a tensor.

At start: choose dtype and kernels, build the model, load it, see how much memory is left, allocate
the caches. Invariant: weights and caches are all that stays allocated between steps.

A production engine adds: several ranks.
"""

import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from nanoinfer.batch import Batch, PromptLogprobs
from nanoinfer.cache_sizes import CacheSizes, choose_max_model_len, plan_caches
from nanoinfer.config import DTYPES, QUANTIZED, EngineConfig
from nanoinfer.cpu_graphs import CpuGraphs
from nanoinfer.cuda_graphs import CudaGraphs
from nanoinfer.graphs import free_memory, make_graphs
from nanoinfer.kernels import select_kernels
from nanoinfer.kernels.build import cpu_features
from nanoinfer.launched import Launched
from nanoinfer.layers.attention_backend import choose_attention
from nanoinfer.layers.quantized_kv_cache import choose_specs
from nanoinfer.loader import load_weights
from nanoinfer.model_config import ModelConfig
from nanoinfer.models.qwen3 import Cache, CausalLM
from nanoinfer.outputs import Logprob
from nanoinfer.sampler import sample, top_logprobs

logger = logging.getLogger("nanoinfer")

_PROMPT_LOGPROB_ROWS = 64  # logits of this many prompt rows at a time: bounds memory


class ModelRunner:
    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path) -> None:
        self._block_size = config.block_size
        self._device = config.torch_device
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device: got {config.device!r}, need cpu: this torch sees no GPU")
        kernels = select_kernels(self._device, config.kernels, config.use_compile)
        dtype = choose_dtype(config.dtype_name, model_config.dtype, self._device, kernels.name)
        self.kernels = choose_attention(config, kernels, dtype, model_config.head_dim)
        longest = config.max_model_len or model_config.max_model_len
        if longest > model_config.max_model_len:
            raise ValueError(
                f"max_model_len: got {longest}, need at most {model_config.max_model_len}, the "
                "model's; for more, set yarn in config.json"
            )
        self._model = CausalLM(
            model_config, longest, self.kernels, dtype=dtype, device=self._device
        )
        logger.info("loading %s as %s", folder.name, str(dtype).removeprefix("torch."))
        tie, keep_fp8 = model_config.tie_word_embeddings, self.kernels.keeps_fp8
        load_weights(self._model, folder, tie, keep_fp8)
        packers = (self.kernels.pack_weight, self.kernels.pack_experts)
        self._model.finish_weights(QUANTIZED[config.quantization], *packers)
        self._specs = choose_specs(config, self._model.cache_specs(), self.kernels)
        self._caches = self._allocate(CacheSizes(0, 0, 0))  # null blocks and slots only
        loaded = (self._model, self._caches)
        free = functools.partial(free_memory, *loaded, config, longest, self.kernels)
        self.cache_sizes = plan_caches(config, self._specs, longest, free)
        self.max_model_len = choose_max_model_len(config, self.cache_sizes.num_blocks, longest)
        self._caches = self._allocate(self.cache_sizes)
        longest_table = -(-self.max_model_len // config.block_size)
        self._graphs: CpuGraphs | CudaGraphs | None = None
        if not config.enforce_eager:
            sizes = (self.cache_sizes.max_num_seqs, longest_table, self._device)
            self._graphs = make_graphs(self._model, self._caches, *sizes, self.kernels)

    @torch.inference_mode()
    def launch(self, batch: Batch, before: Launched | None = None) -> Launched:
        """One step: forward, logits of the rows that matter, sampling.

        Pending input ids are what `before` samples. On a GPU this returns before the work is done,
        unless log probabilities are asked for.
        """
        if batch.pending is not None:
            assert before is not None, "somebody samples what is pending"
            rows, sources = batch.pending
            batch.input_ids[rows] = before.token_ids[sources]
        hidden, logits_indices = self._forward(batch)
        drawn = None
        if batch.sampling is not None:
            logits = self._model.logits(hidden[logits_indices])  # [R, V]
            drawn = sample(logits, batch.sampling, self.kernels)
        found = {
            wanted.entry: self._prompt_logprobs(hidden[wanted.rows], wanted)
            for wanted in batch.prompt_logprobs
        }
        return Launched(batch, drawn, found)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor | slice]:
        """Hidden states, and which of them are sampled from."""
        if self._graphs is not None and self._graphs.can_run(batch):
            return self._graphs.run(batch), batch.logits_indices
        if batch.prompt_logprobs or len(batch.logits_indices) == 0:
            return self._model(batch, self._caches), batch.logits_indices
        return self._model(batch, self._caches, batch.logits_indices), slice(None)

    def _prompt_logprobs(self, hidden: Tensor, wanted: PromptLogprobs) -> list[dict[int, Logprob]]:
        found: list[dict[int, Logprob]] = []
        for start in range(0, len(wanted.targets), _PROMPT_LOGPROB_ROWS):
            chunk = slice(start, start + _PROMPT_LOGPROB_ROWS)
            logprobs = self._model.logits(hidden[chunk]).log_softmax(-1)
            rows = wanted.targets[chunk]
            found += top_logprobs(logprobs, rows, [wanted.num_logprobs] * len(rows))
        return found

    def _allocate(self, sizes: CacheSizes) -> list[Cache]:
        """Block 0 is the null block, slot 0 the null slot."""
        layout = (self._block_size, self._device)
        return [spec.allocate(1 + sizes.num_units(spec.unit), *layout) for spec in self._specs]


def choose_dtype(
    wanted: str, checkpoint: torch.dtype, device: torch.device, kernels: str
) -> torch.dtype:
    """The engine's dtype: as asked, or the checkpoint's as far as device and kernels suit it."""
    if DTYPES.get(wanted) == torch.float16 and device.type == "cpu":
        raise ValueError("dtype: got float16 on a CPU, need float32 or bfloat16")
    if wanted != "auto" or device.type == "cuda" or checkpoint == torch.float32:
        return DTYPES.get(wanted, checkpoint)
    has_bf16 = kernels == "cpu" or cpu_features() & {"avx512_bf16", "amx_bf16", "bf16"}
    return torch.bfloat16 if has_bf16 else torch.float32
