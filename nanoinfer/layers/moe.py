"""Mixture of experts in place of an MLP: a router and many small MLPs; a token meets a few of them.

In: x [T, E]. Out: [T, E]. Qwen3.5's mixtures have one more expert that every token meets, behind a
gate of its own.

Checkpoints hold experts one by one (experts.3.gate_proj.weight) or all in one tensor; here they are
one tensor each for gate with up, and for down. T tokens, E hidden, X experts, I inner size.
"""

import re
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.hybrid_config import MoEConfig
from nanoinfer.kernels import Kernels
from nanoinfer.kernels import moe as kernel
from nanoinfer.kernels.linear import Pack, PackedWeight, if_readable
from nanoinfer.kernels.moe import PackExperts, Routing
from nanoinfer.layers.activation import MLP
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.parameter import empty_parameter, load_whole
from nanoinfer.model_config import ModelConfig

WHOLE_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_ONE_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def expert_target(name: str) -> tuple[str, str] | None:
    """The tensor of one expert -> (parameter of all, part of it); None for any other name."""
    if (match := _ONE_EXPERT.fullmatch(name)) is None:
        return None
    above, index, kind = match.groups()
    parameter = "down_proj" if kind == "down_proj" else "gate_up_proj"
    return f"{above}.{parameter}", f"{index}.{kind}"


class Router(Linear):
    def pack(self, pack: Pack) -> PackedWeight | None:
        """Only for a kernel that hands its fp32 sums out."""
        return super().pack(if_readable(pack))

    def logits(self, x: Tensor) -> Tensor:
        """x [T, E] -> [T, X] in fp32: near ties decide which experts run."""
        if self._packed is not None:
            return self.wide(x)
        return F.linear(x.float(), self.weight.float())


class Experts(nn.Module):
    def __init__(self, num_experts: int, inner: int, hidden: int, **factory: Any) -> None:
        super().__init__()
        self.num_experts = num_experts
        self._inner = inner
        self.gate_up_proj = empty_parameter(num_experts, 2 * inner, hidden, **factory)
        self.down_proj = empty_parameter(num_experts, hidden, inner, **factory)

    def parts(self, name: str) -> list[str]:
        """What parameter `name` is filled from, where experts come one by one."""
        kinds = ["down_proj"] if name == "down_proj" else ["gate_proj", "up_proj"]
        return [f"{i}.{kind}" for i in range(self.num_experts) for kind in kinds]

    def load(self, name: str, part: str, tensor: Tensor) -> None:
        """part: "" for all experts in one tensor, else as `parts` has it."""
        target = getattr(self, name).data
        if part:
            index, _, kind = part.partition(".")
            target = target[int(index)]
            first = self._inner if kind == "up_proj" else 0
            target = target if kind == "down_proj" else target[first : first + self._inner]
        load_whole(target, tensor)

    def pack(self, pack: PackExperts) -> None:
        """Bring the weights into the order that the kernel reads."""
        packed = pack(self.weights)
        self.gate_up_proj.data, self.down_proj.data = packed

    @property
    def weights(self) -> kernel.Experts:
        return kernel.Experts(self.gate_up_proj.data, self.down_proj.data)


class MoE(nn.Module):
    """`factory` is the dtype and device of the weights."""

    def __init__(
        self, config: MoEConfig, hidden_size: int, kernels: Kernels, **factory: Any
    ) -> None:
        super().__init__()
        inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
        self.gate = Router(hidden_size, config.num_experts, **factory)
        self.experts = Experts(config.num_experts, inner, hidden_size, **factory)
        self._routing = Routing(config.num_experts_per_tok, config.norm_topk_prob)
        self._has_shared = shared > 0
        if self._has_shared:
            self.shared_expert = MLP(hidden_size, shared, kernels, **factory)
            self.shared_expert_gate = Linear(hidden_size, 1, **factory)
        self._kernels = kernels

    def router_logits(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, X] in fp32."""
        return self.gate.logits(x)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router_logits(x)
        y = self._kernels.moe(x, logits, self.experts.weights, self._routing)
        if self._has_shared:
            y = y + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return y


def make_mlp(config: ModelConfig, layer: int, kernels: Kernels, **factory: Any) -> MLP | MoE:
    """What layer `layer` transforms its tokens by."""
    if config.moe is not None and layer in config.moe.layers:
        return MoE(config.moe, config.hidden_size, kernels, **factory)
    return MLP(config.hidden_size, config.intermediate_size, kernels, **factory)
