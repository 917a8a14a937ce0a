"""Recomputation running: what backward needs is made again instead of kept (Chen et al. 2016; Korthikanti et al. 2022).

`recomputed` keeps the input of a block and nothing else ("full"). `remade` keeps everything but tensors that cost no
matrix product, such as norms, rotations and activation functions ("selective"); with fused attention, which never
stores its scores, those are what is worth making again. Dropout masks are functions of keys, so both are bit-equal.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from shoal.comm.ledger import Ledger


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor, ledger: Ledger) -> Tensor:
    """function(x), of which only x is kept; backward computes it a second time, its collectives included.

    Those are recorded under phase "backward", at the layer and micro-batch of the forward. Gradients of parameters that
    function uses appear by `backward()` (not by torch.autograd.grad). function must not be a unit of ZeRO-3 itself but
    lie inside one, so that the unit is gathered once for both the second forward and the backward.
    """
    if not torch.is_grad_enabled():
        return function(x)
    anchor = torch.empty(0, requires_grad=True)  # the parameters need gradients even where x does not
    return _Recomputed.apply(x, anchor, function, ledger)


class _Recomputed(torch.autograd.Function):
    """A graph inside the graph: it is built in backward and walked at once.

    torch.utils.checkpoint would lay the second forward's tensors under the first one's graph; it keeps what functions
    hold beside their saved tensors, and gives backward copies of the parameters, on which put-off gradients get lost.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, function: Callable[[Tensor], Tensor], ledger: Ledger) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function, ctx.ledger, ctx.place = function, ledger, ledger.place
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[0])
        _, layer, micro_batch = ctx.place
        with ctx.ledger.at(phase="backward", layer=layer, micro_batch=micro_batch), torch.enable_grad():
            y = ctx.function(x)
        if y.requires_grad:
            torch.autograd.backward(y, gradient)
        return x.grad, None, None, None


class Cheap(NamedTuple):
    """A tensor that is cheap to make again: make(*inputs), in memory of its own. The inputs are kept in its place."""

    make: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def remade(use: Callable[..., Tensor], *cheap: Cheap, wanted: bool = True) -> Tensor:
    """use(*made), for the tensors that `cheap` makes; what backward needs of them is made again.

    Nothing is saved unless something else keeps the inputs anyway. wanted: False only computes.
    """
    if wanted and torch.is_grad_enabled():
        return _remade(use, cheap)
    return use(*(tensor.make(*tensor.inputs) for tensor in cheap))


@torch.compiler.disable(recursive=False)  # what is used and made may be compiled; hooks cannot be
def _remade(use: Callable[..., Tensor], cheap: tuple[Cheap, ...]) -> Tensor:
    made = [tensor.make(*tensor.inputs) for tensor in cheap]
    recipes = {x.untyped_storage()._cdata: tensor for x, tensor in zip(made, cheap, strict=True)}
    # torch asks only the innermost hooks, so what is not ours goes to those around, which tell versions of weights apart
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    @torch.compiler.disable
    def pack(x: Tensor) -> Any:
        recipe = recipes.get(x.untyped_storage()._cdata)
        if recipe is not None:
            return _View(recipe, x.shape, x.stride(), int(x.storage_offset()))
        return outer[0](x) if outer else x

    @torch.compiler.disable
    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _View):
            with torch.no_grad():
                again = packed.recipe.make(*packed.recipe.inputs)
            return again.as_strided(packed.size, packed.stride, packed.offset)
        return outer[1](packed) if outer else packed

    with saved_tensors_hooks(pack, unpack):
        return use(*made)


class _View(NamedTuple):
    """What autograd keeps in place of a view of a cheap tensor."""

    recipe: Cheap
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
