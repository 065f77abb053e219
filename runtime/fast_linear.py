"""Linear layers in float32 on a CPU, for large minibatches and small networks. Used by `pql.py`.

The operator is one of PyTorch's own compiler, not a public one: the pinned version has it.
"""

from typing import Any

import torch
from torch import Tensor, nn


class FastLinear(nn.Linear):
    """A linear layer by oneDNN, which uses AVX-512 wherever it is; MKL, PyTorch's choice, on Intel alone.

    256 x 256, 256 rows, one core of an EPYC (Zen 5): forward 0.18 instead of 0.35 ms, with backward 0.65, not 1.1. On
    a Zen 4 both take 0.4 ms. Timed by hand, beside other programs on the Zen 4.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype == self.weight.dtype == torch.float32 and x.dim() == 2:
            return _OneDnnLinear.apply(x, self.weight, self.bias)
        return super().forward(x)


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _times_transposed(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (_times_transposed(gradient, weight.t()) if of_x else None,
                _times_transposed(gradient.t(), x.t()) if of_weight else None,
                gradient.sum(0) if of_bias else None)


def _times_transposed(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), y.contiguous(), bias, "none", [], "")


def make_fast(module: nn.Module, smallest: int = 64) -> None:
    """Let all linear layers of at least this size, which gain by it, be `FastLinear`."""
    for part in module.modules() if torch.backends.mkldnn.is_available() else ():
        if type(part) is nn.Linear and min(part.in_features, part.out_features) >= smallest:
            part.__class__ = FastLinear
