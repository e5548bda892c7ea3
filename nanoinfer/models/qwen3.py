"""The decoder of Qwen3, Qwen3-MoE, Qwen3.5, Qwen2 and Llama checkpoints.

In: a batch of T tokens and one cache per layer.
Out: final hidden states [T, E]; `logits` turns chosen rows into scores over the vocabulary.

    ids -> embed -> [ norm -> qkv -> attention (q, k norm; rotary) -> o
                      norm -> gate, up -> silu * -> down ] x layers -> norm -> head

Families differ in data, chosen at construction: Qwen3 normalises q and k per head, Qwen2 has
biases on q, k and v, Llama has neither. A layer mixes tokens by attention or by a gated delta net
(Qwen3.5: three of four), and transforms each by one MLP or by chosen experts. `forward` has no ifs
about models. Modules carry the checkpoint's names, so that loading is one loop (loader.py). The
residual stream is handed from norm to norm, which adds to it (layernorm.py).

T tokens, H query heads, KV key-value heads, D head dim, E hidden, V vocabulary, R sampled rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.batch import Batch
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.linear import Pack, if_readable
from nanoinfer.kernels.moe import PackExperts
from nanoinfer.kernels.norm_rope_store import HeadNorms
from nanoinfer.layers.attention import KV, Attention, KVCacheSpec
from nanoinfer.layers.embedding import Embedding
from nanoinfer.layers.gated_delta_net import GatedDeltaNet, StateCache, StateCacheSpec
from nanoinfer.layers.layernorm import Form, RMSNorm
from nanoinfer.layers.linear import Linear, QKVParallelLinear, RowParallelLinear
from nanoinfer.layers.moe import Experts, make_mlp
from nanoinfer.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanoinfer.model_config import ModelConfig

Cache = KV | StateCache
CacheSpec = KVCacheSpec | StateCacheSpec


class SelfAttention(nn.Module):
    def __init__(
        self, config: ModelConfig, rope: RotaryEmbedding, kernels: Kernels, **factory: Any
    ) -> None:
        super().__init__()
        E, D = config.hidden_size, config.head_dim
        heads = (config.num_attention_heads, config.num_key_value_heads)
        self.qkv_proj = QKVParallelLinear(
            E, D, *heads, bias=config.qkv_bias, is_gated=config.gated_attention, **factory
        )
        self.o_proj = RowParallelLinear(heads[0] * D, E, **factory)
        norms = None
        if config.qk_norm:
            self.q_norm = _make_norm(D, config, kernels, **factory)
            self.k_norm = _make_norm(D, config, kernels, **factory)
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, config.rms_norm_eps)
        self.cache_spec = KVCacheSpec(heads[1], D, factory["dtype"])
        self.attn = Attention(D, rope, norms, kernels, config.gated_attention)

    def forward(self, hidden: Tensor, cache: KV, batch: Batch, rows: Tensor | None) -> Tensor:
        D = self.cache_spec.head_dim
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)
        q = q.unflatten(-1, (-1, self.qkv_proj.query_size))  # [T, H, D], or with a gate [T, H, 2D]
        k, v = k.unflatten(-1, (-1, D)), v.unflatten(-1, (-1, D))  # [T, KV, D]
        attended = self.attn(q, k, v, cache, batch)  # [T, H * D]
        return self.o_proj(attended if rows is None else attended[rows])


class DecoderLayer(nn.Module):
    """Module `self_attn` or `linear_attn` mixes tokens, as the checkpoint names it."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        rope: RotaryEmbedding,
        kernels: Kernels,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.input_layernorm = _make_norm(config.hidden_size, config, kernels, **factory)
        self._is_attending = config.layer_types[index] == "full_attention"
        if self._is_attending:
            self.self_attn = SelfAttention(config, rope, kernels, **factory)
        else:
            self.linear_attn = GatedDeltaNet(config, kernels, **factory)
        self.post_attention_layernorm = _make_norm(config.hidden_size, config, kernels, **factory)
        self.mlp = make_mlp(config, index, kernels, **factory)

    @property
    def mixer(self) -> SelfAttention | GatedDeltaNet:
        return self.self_attn if self._is_attending else self.linear_attn

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cache: Cache,
        batch: Batch,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`hidden` is what the layer before adds; the sum is made by this layer's first norm.

        Behind the mixer only `rows` go on; None: all.
        """
        if residual is None:
            normed, residual = self.input_layernorm(hidden), hidden
        else:
            normed, residual = self.input_layernorm(hidden, residual)
        hidden = self.mixer(normed, cache, batch, rows)
        residual = residual if rows is None else residual[rows]
        normed, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(normed), residual


def _make_norm(size: int, config: ModelConfig, kernels: Kernels, **factory: Any) -> RMSNorm:
    form: Form = "one_plus" if config.norm_adds_one else "plain"
    return RMSNorm(size, config.rms_norm_eps, kernels, form, **factory)


class Decoder(nn.Module):
    def __init__(
        self, config: ModelConfig, max_position: int, kernels: Kernels, **factory: Any
    ) -> None:
        super().__init__()
        rope = get_rope(config.rope, max_position, factory["device"])
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, rope, kernels, **factory)
            for i in range(config.num_hidden_layers)
        )
        self.norm = _make_norm(config.hidden_size, config, kernels, **factory)

    def forward(
        self,
        hidden: Tensor,
        batch: Batch,
        caches: list[Cache],
        start_layer: Callable[[int], None] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Embedded tokens [T, E] -> hidden states of `rows`, or of all.

        start_layer is told which one begins. The last layer's cache is the last thing that all
        tokens are needed for, so that the rest of it is done for `rows` alone.
        """
        residual, last = None, len(self.layers) - 1
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if start_layer is not None:
                start_layer(i)
            chosen = rows if i == last else None
            hidden, residual = layer(hidden, residual, cache, batch, chosen)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class CausalLM(nn.Module):
    """Decoder and head. `factory` is the dtype and device of the parameters."""

    def __init__(
        self, config: ModelConfig, max_position: int, kernels: Kernels, **factory: Any
    ) -> None:
        super().__init__()
        self.model = Decoder(config, max_position, kernels, **factory)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, **factory)

    def tie_weights(self) -> None:
        self.lm_head.weight = self.model.embed_tokens.weight

    def finish_weights(
        self, quantization: torch.dtype | None, pack: Pack, pack_experts: PackExperts
    ) -> None:
        """Bring all weights into their final form, one after the other.

        A tied head that is quantised becomes a matrix of its own, and the embedding stays as it
        is. One that is packed stays one matrix, from whose blocks the embedding is read.
        """
        embedding, head = self.model.embed_tokens, self.lm_head
        is_tied = head.weight is embedding.weight
        is_shared = is_tied and quantization is None
        if is_tied:
            head.weight = nn.Parameter(embedding.weight.data, requires_grad=False)
        for module in self.modules():
            if isinstance(module, Experts):
                if quantization is not None:
                    raise ValueError("quantization: got int8 for experts, need None")
                module.pack(pack_experts)
            elif isinstance(module, Linear):
                if quantization is not None:
                    module.quantize(quantization)
                if module is not head or not is_shared:
                    module.pack(pack)
                elif (packed := module.pack(if_readable(pack))) is not None:
                    assert packed.blocks is not None, "it is readable"
                    embedding.read_from(packed.blocks)

    def cache_specs(self) -> list[CacheSpec]:
        """What each layer caches; the runner allocates it."""
        layers = (layer for layer in self.model.layers if isinstance(layer, DecoderLayer))
        return [layer.mixer.cache_spec for layer in layers]

    def forward(self, batch: Batch, caches: list[Cache], rows: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm: [T, E], or those of `rows` (not empty)."""
        return self.model(self.embed(batch.input_ids), batch, caches, rows=rows)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)  # [T, E]

    def run_layers(
        self,
        hidden: Tensor,
        batch: Batch,
        caches: list[Cache],
        start_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        return self.model(hidden, batch, caches, start_layer)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> [R, V] in fp32: sampling compares small differences."""
        return self.lm_head.wide(hidden)
