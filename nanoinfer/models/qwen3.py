"""The decoder of Qwen3, Qwen2 and Llama checkpoints.

In: a batch of T tokens and one KV cache per layer.
Out: final hidden states [T, E]; `logits` turns chosen rows into scores over the vocabulary.

    ids -> embed -> [ norm -> qkv -> (q, k norm) -> rotary -> attention -> o
                      norm -> gate, up -> silu * -> down ] x layers -> norm -> head

Families differ in data, chosen at construction: Qwen3 normalises q and k per head, Qwen2 has
biases on q, k and v, Llama has neither. `forward` has no ifs about models. Modules carry the
checkpoint's names, so that loading is one loop (loader.py). The residual stream is handed from norm
to norm, which adds to it (layernorm.py).

T tokens, H query heads, KV key-value heads, D head dim, E hidden, V vocabulary, R sampled rows.
"""

from typing import Any

from torch import Tensor, nn

from nanoinfer.batch import Batch
from nanoinfer.kernels import Kernels
from nanoinfer.layers.activation import MLP
from nanoinfer.layers.attention import Attention, KVCache, KVCacheSpec
from nanoinfer.layers.embedding import Embedding
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanoinfer.model_config import ModelConfig


class SelfAttention(nn.Module):
    def __init__(
        self, config: ModelConfig, rope: RotaryEmbedding, kernels: Kernels, **factory: Any
    ) -> None:
        super().__init__()
        self._head_dim = D = config.head_dim
        self._q_size = config.num_attention_heads * D
        self._kv_size = config.num_key_value_heads * D
        sizes = {"q_proj": self._q_size, "k_proj": self._kv_size, "v_proj": self._kv_size}
        self.qkv_proj = Linear(config.hidden_size, sizes, bias=config.qkv_bias, **factory)
        self.o_proj = Linear(self._q_size, config.hidden_size, **factory)

        def head_norm() -> nn.Module:
            if config.qk_norm:
                return RMSNorm(D, config.rms_norm_eps, kernels, **factory)
            return nn.Identity()

        self.q_norm, self.k_norm = head_norm(), head_norm()
        self._rope = rope
        self._kernels = kernels
        self.attn = Attention(D, kernels)

    def forward(self, hidden: Tensor, cache: KVCache, batch: Batch) -> Tensor:
        q, k, v = self.qkv_proj(hidden).split((self._q_size, self._kv_size, self._kv_size), dim=-1)
        q = self.q_norm(q.unflatten(-1, (-1, self._head_dim)))  # [T, H, D]
        k = self.k_norm(k.unflatten(-1, (-1, self._head_dim)))  # [T, KV, D]
        v = v.unflatten(-1, (-1, self._head_dim))
        q, k = self._rope(batch.positions, q, k, self._kernels)
        return self.o_proj(self.attn(q, k, v, cache, batch))


class DecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, rope: RotaryEmbedding, kernels: Kernels, **factory: Any
    ) -> None:
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, eps, kernels, **factory)
        self.self_attn = SelfAttention(config, rope, kernels, **factory)
        self.post_attention_layernorm = RMSNorm(E, eps, kernels, **factory)
        self.mlp = MLP(E, config.intermediate_size, kernels, **factory)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, cache: KVCache, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """`hidden` is what the layer before adds; the sum is made by this layer's first norm."""
        if residual is None:
            normed, residual = self.input_layernorm(hidden), hidden
        else:
            normed, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(normed, cache, batch)
        normed, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(normed), residual


class Decoder(nn.Module):
    def __init__(
        self, config: ModelConfig, max_position: int, kernels: Kernels, **factory: Any
    ) -> None:
        super().__init__()
        rope = get_rope(config.rope, max_position, factory["device"])
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList(
            DecoderLayer(config, rope, kernels, **factory) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels, **factory)

    def forward(self, batch: Batch, caches: list[KVCache]) -> Tensor:
        hidden, residual = self.embed_tokens(batch.input_ids), None  # [T, E]
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden, residual = layer(hidden, residual, cache, batch)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class CausalLM(nn.Module):
    """Decoder and head. `factory` is the dtype and device of the parameters."""

    def __init__(
        self, config: ModelConfig, max_position: int, kernels: Kernels, **factory: Any
    ) -> None:
        super().__init__()
        self._cache_spec = KVCacheSpec(
            config.num_key_value_heads, config.head_dim, factory["dtype"]
        )
        self.model = Decoder(config, max_position, kernels, **factory)
        self.lm_head = Embedding(config.vocab_size, config.hidden_size, **factory)

    def tie_weights(self) -> None:
        self.lm_head.weight = self.model.embed_tokens.weight

    def cache_specs(self) -> list[KVCacheSpec]:
        """What each layer caches; the runner allocates it."""
        return [self._cache_spec] * len(self.model.layers)

    def forward(self, batch: Batch, caches: list[KVCache]) -> Tensor:
        return self.model(batch, caches)  # [T, E], after the final norm

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head.logits(hidden)  # [R, V] fp32
