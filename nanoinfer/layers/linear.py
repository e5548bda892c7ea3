"""Linear layers: y = x W^T + b, and how each is filled from a checkpoint.

In: x [..., K]; W [N, K]. Out: y [..., N], each row on a 32-byte boundary (kernels/linear.py).

q, k and v (or gate and up) read the same input, so their weights are stacked into one matrix: one
GEMM instead of three. With tensor parallelism each of `size` ranks holds a part of a matrix. Both
are matters of loading only: what a class adds to `Linear` is its `cuts`, which say which slice of
which of the checkpoint's tensors goes where. At run time all are one matrix, of whatever dtype.

    2 ranks, 4 query and 2 key-value heads: qkv_proj of rank 1 is   q2 q3 | k1 | v1
    Column: y is cut (concatenate the ranks')     Row: x is cut (add the ranks')

On a CPU `pack` re-orders the weight once into the blocks that its kernels read fastest, for any
number of rows (kernels/linear.py). The plain copy is dropped: no weight is held twice.

Source: Megatron-LM's column and row parallel layers; names are vLLM's. M rows, K inputs, N outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.kernels.linear import (
    ROW_BYTES,
    Pack,
    PackedWeight,
    check_out,
    empty_rows,
    flatten_rows,
    linear_ref,
    quantize_blocks_fp8,
    quantize_rows_int8,
)
from nanoinfer.kernels.quantize import FP8, Quantized
from nanoinfer.layers.parameter import (
    ONE_RANK,
    Cut,
    Parallel,
    empty_parameter,
    load_cut,
    load_whole,
)

_KINDS = {torch.int8: quantize_rows_int8, FP8: quantize_blocks_fp8}


class Linear(nn.Module):
    """The whole matrix. `factory` is the dtype and device of the parameters."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, **factory: Any
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.cuts = {"": Cut(out_features, 0, out_features)}
        self.weight = empty_parameter(out_features, in_features, **factory)
        self.bias = empty_parameter(out_features, **factory) if bias else None
        self.scales: Tensor | None = None
        self._packed: PackedWeight | None = None

    def parts(self, name: str) -> list[str]:
        """What parameter `name` is filled from."""
        return list(self.cuts)

    def load(self, name: str, part: str, tensor: Tensor) -> None:
        """Copy this rank's slice of checkpoint part `part` into parameter `name`.

        Raises KeyError for a part that is not in here, ValueError for a wrong shape or dtype, and
        after `quantize`, whose scales would no longer fit.
        """
        self._check_plain("load")
        load_cut(getattr(self, name).data, tensor, self.cuts[part])

    def quantize(self, dtype: torch.dtype) -> None:
        """Turn the weight into int8 (a scale a row) or float8_e4m3fn (a scale a 128 x 128 block).

        Raises ValueError for another dtype, and for a weight that is packed or quantised.
        """
        self._check_plain("quantize")
        if dtype not in _KINDS:
            raise ValueError(f"dtype: got {dtype}, need one of {', '.join(map(str, _KINDS))}")
        self.weight.data, self.scales = _KINDS[dtype](self.weight.data)
        if self.bias is not None:
            self.bias.data = self.bias.data.float()  # it is added to sums in fp32

    def _check_plain(self, name: str) -> None:
        if self.scales is not None or self._packed is not None:
            raise ValueError(
                f"{name}: got a weight in its final form, need the plain one; do it first"
            )

    def pack(self, pack: Pack) -> PackedWeight | None:
        """Re-order the weight, if `pack` has a better order; afterwards `weight` is empty."""
        if self._packed is None:
            self._packed = pack(self.weight.data, self.scales)
            if self._packed is not None:
                self.weight.data = torch.empty(0, dtype=self.weight.dtype)
        return self._packed

    def forward(
        self, x: Tensor | Quantized, out: Tensor | None = None, out_acc: Tensor | None = None
    ) -> Tensor:
        """x [..., K] (or a Quantized [M, K]) -> [..., N] of x's dtype (or bf16), on 32-byte rows.

        out: where to write instead. out_acc: what to add to instead, += (rounded once). They must
        have that shape, dtype and alignment, or ValueError is raised; returned is the one given.
        """
        is_whole = self.out_features * self.weight.itemsize % ROW_BYTES == 0
        is_simple = out is None and out_acc is None and is_whole
        # With leading dimensions that are no view of rows, F.linear rounds, then adds the bias.
        if is_simple and isinstance(x, Tensor) and (x.dim() == 2 or x.is_contiguous()):
            if self._packed is not None and x.dim() == 2:
                return self._packed.multiply(x, self.bias, False)
            if self._packed is None and self.scales is None:
                return F.linear(x, self.weight, self.bias)
        return self._multiply_into(x, out, out_acc)

    def wide(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N] in fp32: the sums as they are, where the body hands them out."""
        if self._packed is not None:
            return self._packed.multiply(x, self.bias, True)
        return self(x).float()

    def _multiply_into(
        self, x: Tensor | Quantized, out: Tensor | None, out_acc: Tensor | None
    ) -> Tensor:
        if out is not None and out_acc is not None:
            raise ValueError("out, out_acc: got both, need one: overwrite, or add to")
        rows, dtype = (x.values, torch.bfloat16) if isinstance(x, Quantized) else (x, x.dtype)
        shape = (*rows.shape[:-1], self.out_features)
        if rows.shape[-1] != self.in_features:
            raise ValueError(f"x: got {tuple(rows.shape)}, need [..., {self.in_features}]")
        given = out if out_acc is None else out_acc
        if given is None:
            given = empty_rows(shape, dtype, rows.device)
        else:
            check_out("out" if out_acc is None else "out_acc", given, shape, dtype)
        target = flatten_rows("out" if out_acc is None else "out_acc", given)
        if isinstance(x, Tensor):
            x = x.reshape(-1, self.in_features)
        packed, is_accumulating = self._packed, out_acc is not None
        if (
            packed is None
            or isinstance(x, Quantized)
            or (is_accumulating and packed.blocks is None)
        ):
            weight = self.weight if packed is None else packed.plain()
            linear_ref(x, weight, self.scales, self.bias, target, is_accumulating)
        elif is_accumulating:
            target.copy_(packed.multiply(x, self.bias, True).add_(target))
        else:
            target.copy_(packed.multiply(x, self.bias, False))
        return given


class ColumnParallelLinear(Linear):
    """Each rank computes an equal share of y."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        parallel: Parallel = ONE_RANK,
        **factory: Any,
    ) -> None:
        cut = _equal_cut("out_features", out_features, parallel)
        super().__init__(in_features, cut.length, bias, **factory)
        self.cuts = {"": cut}


class MergedColumnParallelLinear(Linear):
    """Several column-parallel matrices, one below the other: `out_features` {name: rows}."""

    def __init__(
        self,
        in_features: int,
        out_features: dict[str, int],
        bias: bool = False,
        parallel: Parallel = ONE_RANK,
        **factory: Any,
    ) -> None:
        cuts = {name: _equal_cut(name, size, parallel) for name, size in out_features.items()}
        super().__init__(in_features, sum(cut.length for cut in cuts.values()), bias, **factory)
        self.cuts = _stacked(cuts)


class QKVParallelLinear(Linear):
    """Query, key and value projections, cut between heads.

    With fewer key-value heads than ranks, neighbouring ranks hold copies of the same head. Where
    `is_gated`, each query head is followed by a gate of its size.
    """

    def __init__(
        self,
        in_features: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool = False,
        parallel: Parallel = ONE_RANK,
        is_gated: bool = False,
        **factory: Any,
    ) -> None:
        groups = min(parallel.size, num_kv_heads)  # of ranks that share key-value heads
        copies = Parallel(size=groups).share("ranks over key-value heads", parallel.size)
        group = Parallel(parallel.rank // copies, groups)
        kv = _equal_cut("num_kv_heads", num_kv_heads, group, head_dim)
        q = _equal_cut("num_heads", num_heads, parallel, head_dim * (1 + is_gated))
        super().__init__(in_features, q.length + 2 * kv.length, bias, **factory)
        self.cuts = _stacked({"q_proj": q, "k_proj": kv, "v_proj": kv})
        self.sizes = (q.length, kv.length, kv.length)  # of q, k and v in a row of y
        self.query_size = head_dim * (1 + is_gated)  # of one head, with its gate


class RowParallelLinear(Linear):
    """Each rank takes an equal share of x; the sum of all ranks' y is the product."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        parallel: Parallel = ONE_RANK,
        **factory: Any,
    ) -> None:
        self._parallel = parallel
        cut = _equal_cut("in_features", in_features, parallel)
        super().__init__(cut.length, out_features, bias, **factory)
        self.cuts = {"": cut}

    def load(self, name: str, part: str, tensor: Tensor) -> None:
        self._check_plain("load")
        cut = self.cuts[part]
        if name == "weight":
            load_cut(self.weight.data, tensor, cut, dim=1)
            return
        load_whole(getattr(self, name).data, tensor)
        if self._parallel.rank > 0:  # a bias that all ranks added would count `size` times
            getattr(self, name).data.zero_()


def _equal_cut(name: str, count: int, parallel: Parallel, unit: int = 1) -> Cut:
    """This rank's share of `count` units of `unit` rows."""
    length = parallel.share(name, count) * unit
    return Cut(count * unit, parallel.rank * length, length)


def _stacked(cuts: dict[str, Cut]) -> dict[str, Cut]:
    """The same, one below the other."""
    target, stacked = 0, {}
    for name, cut in cuts.items():
        stacked[name] = cut._replace(target=target)
        target += cut.length
    return stacked
