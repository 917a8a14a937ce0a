"""Tensor parallelism for any module: linear layers and embeddings, chosen by name, replaced by layers that are cut."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn

from shoal.axes.piece import Piece, Share, everything
from shoal.axes.tensor.cut import piece
from shoal.axes.tensor.run import ColumnLinear, RowLinear, leave, look_up
from shoal.comm.collectives import all_reduce
from shoal.comm.conjugate import all_gather_split, split_all_gather
from shoal.comm.world import Group
from shoal.kernels.linear import Linear
from shoal.spec.errors import RequestError, alternatives, divisors, nearest, shown
from shoal.spec.inventory import Cut, Parameter, Part

Value = TypeVar("Value", str, int)

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class GatheredColumnLinear(ColumnLinear):
    """X (..., in) -> Y (..., out), whole on every rank: what each computed of Y is gathered along the features."""

    def forward(self, x: Tensor) -> Tensor:
        return all_gather_split(super().forward(x), self.group, dim=-1)


class SplitRowLinear(RowLinear):
    """X (..., in), the same on every rank -> Y (..., out): each rank takes its own features of X."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(split_all_gather(x, self.group, dim=-1))


class CutEmbedding(nn.Embedding):
    """tokens (...) -> (..., h): each rank looks up its own ids, those from `first` on; the sum over ranks is whole.

    padding: the id, of all, whose vector gets no gradient.
    """

    def __init__(self, rows: int, features: int, first: int, padding: int | None, group: Group):
        super().__init__(rows, features)
        self.first, self.padding, self.group = first, padding, group

    def forward(self, tokens: Tensor) -> Tensor:
        ids = self.num_embeddings * self.group.size
        # no rank would have them, and the sum would be zero; on a GPU nobody waits for the answer
        torch._assert_async(((tokens >= 0) & (tokens < ids)).all(), f"token ids must lie from 0 to {ids - 1}")
        x = look_up(tokens, self.weight, self.first, self.group)
        if self.padding is not None:
            x = torch.where((tokens == self.padding)[..., None], x.detach(), x)
        return leave(x, self.group, sequence=False)


LINEAR = {
    "column": ColumnLinear,
    "column, gathered": GatheredColumnLinear,
    "row": RowLinear,
    "row, split": SplitRowLinear,
}
STYLES = (*LINEAR, "vocabulary", "between")


def parallelize(
    module: nn.Module, styles: Mapping[str, str], group: Group, units: Mapping[str, int] | None = None
) -> dict[str, Piece]:
    """Cuts `module` in place over the ranks of `group`: each keeps a part of its weights (Shoeybi et al. 2019).

    styles: patterns, as in a shell, for names of submodules ("*.q_proj"), each with what becomes of those that match:

        "column"            nn.Linear cut by outputs: X whole -> this rank's features of Y
        "column, gathered"  the same, and Y is made whole on every rank
        "row"               nn.Linear cut by inputs: this rank's features of X -> Y whole; the bias is added once
        "row, split"        the same from an X that is whole on every rank
        "vocabulary"        nn.Embedding cut by ids
        "between"           any module between a column and a row layer, such as a norm over each head: it stays whole
                            but sees this rank's features only, so the gradients of its parameters are summed

    units: for such patterns, how many outputs, inputs or ids stay together, such as the size of a head; by default 1.
    Returns what this rank keeps of each parameter, under the names of module.named_parameters(): `Piece.put` puts the
    whole together again, `Piece.take` fills a part from it.

    Every rank calls this with the same weights. Parameters stay the same objects, and tied where they are, but those that
    are cut are smaller and without a gradient. A module on the "meta" device can be cut before it has memory. Code
    between a column and a row layer must take what comes, such as view(b, s, -1, head_size), and must call its layers, not
    read their weights; a layer that computes q, k and v at once cannot be cut like this, as its parts would mix. Inputs
    have two dims or more.

    Raises RequestError, before anything is changed, for: a pattern that matches nothing, an unknown style, a module that
    the style cannot cut, two styles for one module, a size that does not divide, a tied parameter not cut alike.
    """
    layers = _layers(module)
    chosen = _matched(layers, styles, "styles")
    together = _matched(layers, units or {}, "units")
    for layer, style in chosen.items():
        _check_kind(layers[layer][0], layer, style)
        _check_owners(module, layers[layer], style)
        _check_size(layers[layer][0], layer, style, together.get(layer, 1), group.size)
    pieces = _pieces(module, layers, chosen, group)
    for name, parameter in module.named_parameters():
        _shrink(parameter, pieces[name])
    for old, style in chosen.items():
        if style == "between":
            _sum_gradients(old, group)
            continue
        new = _cut_layer(old, style, group)
        for name in layers[old]:
            module.set_submodule(name, new)
    return pieces


def _layers(module: nn.Module) -> dict[nn.Module, list[str]]:
    """The submodules, each with all the names it goes by."""
    layers: dict[nn.Module, list[str]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if layer is not module:
            layers.setdefault(layer, []).append(name)
    return layers


def _matched(
    layers: Mapping[nn.Module, list[str]], patterns: Mapping[str, Value], field: str
) -> dict[nn.Module, Value]:
    """What the patterns say of each submodule that one of them matches."""
    found: dict[nn.Module, tuple[str, Value]] = {}
    for pattern, value in patterns.items():
        matching = [layer for layer, names in layers.items() if any(fnmatchcase(name, pattern) for name in names)]
        if not matching:
            known = [name for layer, names in layers.items() if _is_plain(layer) for name in names]
            ends = {name.rpartition(".")[2]: f"*.{name.rpartition('.')[2]}" if "." in name else name for name in known}
            near = nearest(pattern.rpartition(".")[2], ends)
            hint = ends[near] if near else next(iter(ends.values()), None)
            would = f'"{hint}" would do' if hint else "it has no linear layer or embedding"
            raise RequestError(field, f'{field}: "{shown(pattern)}" matches no submodule; {would}')
        for layer in matching:
            other, said = found.setdefault(layer, (pattern, value))
            if said != value:
                name = layers[layer][0]
                raise RequestError(
                    field,
                    f'{field}: {name} is "{said}" by "{other}" and "{value}" by "{pattern}"; patterns that do not '
                    f"overlap would do",
                )
    return {layer: value for layer, (_, value) in found.items()}


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is torch's own or ours: a subclass may compute something else, or be cut already."""
    return type(layer) in (nn.Linear, Linear, nn.Embedding)


def _check_kind(name: str, layer: nn.Module, style: str) -> None:
    """Raises RequestError where a style is none or cannot cut this layer."""

    def refuse(why: str, hint: str) -> RequestError:
        return RequestError(name, f'{name} = "{shown(style)}": {why}; {hint} would do')

    if style not in STYLES:
        near = nearest(style, STYLES) or STYLES[0]
        raise refuse("there is no such style", f'"{near}"')
    if style == "between":
        return
    wanted = nn.Embedding if style == "vocabulary" else nn.Linear
    if not (isinstance(layer, wanted) and _is_plain(layer)):
        other = ("a pattern without it", '"column" or "row"', '"vocabulary"')
        kind = _is_plain(layer) * (1 + isinstance(layer, nn.Embedding))
        raise refuse(f"that cuts an nn.{wanted.__name__}, not a layer of type {type(layer).__name__}", other[kind])
    if isinstance(layer, nn.Embedding):
        for option, off in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(layer, option) != off:
                raise refuse(f"a cut embedding knows no {option} = {getattr(layer, option)}", f"{option} = {off}")
    if any(getattr(layer, hooks) for hooks in HOOKS):
        raise refuse("it has hooks, which would be lost", "hooks that are registered afterwards")


def _check_owners(module: nn.Module, names: list[str], style: str) -> None:
    """Raises RequestError for a layer whose owner, in eval(), reads the weights instead of calling the layer."""
    for name in names:
        owner = module.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.TransformerEncoderLayer):
            raise RequestError(
                name,
                f'{name} = "{style}": nn.TransformerEncoderLayer reads its layers\' weights in eval(), past their sums over '
                "ranks; a block that calls its layers would do",
            )


def _check_size(name: str, layer: nn.Module, style: str, together: int, ranks: int) -> None:
    """Raises RequestError where the ranks cannot have equal parts that keep units whole."""
    dim = _dim(style, "weight")
    if dim is None:
        return
    assert isinstance(layer, nn.Linear | nn.Embedding)
    size = layer.weight.shape[dim]
    what = "ids" if style == "vocabulary" else ("outputs", "inputs")[dim]
    if together < 1 or size % together:
        would = alternatives(divisors(size), together)
        raise RequestError(name, f"{name} has {size} {what}, no whole number of units of {together}; {would} would do")
    count = size // together
    if count % ranks:
        units = f"{size} {what}" if together == 1 else f"{count} units of {together} {what}"
        would = alternatives(divisors(count), ranks)
        raise RequestError(name, f"{name} has {units}, which {ranks} ranks do not divide; {would} ranks would")


def _dim(style: str, leaf: str) -> int | None:
    """The dim along which a style cuts the weight or bias of its layer; None where every rank keeps all of it."""
    if style in ("row", "row, split"):
        return 1 if leaf == "weight" else None
    return None if style == "between" else 0


def _pieces(
    module: nn.Module, layers: Mapping[nn.Module, list[str]], chosen: Mapping[nn.Module, str], group: Group
) -> dict[str, Piece]:
    """What this rank keeps of every parameter; raises RequestError where the styles do not agree about one."""
    style_of = {name: style for layer, style in chosen.items() for name in layers[layer]}
    between = tuple(f"{name}." for name, style in style_of.items() if style == "between")
    for name in style_of:
        if name.startswith(between):
            outer = next(outer for outer in between if name.startswith(outer))[:-1]
            raise RequestError(outer, f'{outer} = "between" holds {name}, which is cut; a pattern without it would do')
    treated: dict[nn.Parameter, tuple[str, tuple[int | None, bool]]] = {}
    pieces: dict[str, Piece] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        dim = _dim(style_of.get(owner, "between"), leaf)
        first, treatment = treated.setdefault(parameter, (name, (dim, name.startswith(between))))
        if treatment != (dim, name.startswith(between)):
            raise RequestError(
                name,
                f"{name} is tied to {first}, but not cut like it; styles for both that cut the same dim "
                f'("vocabulary" and "column, gathered"), or for neither, would do',
            )
        if first == name:
            pieces[name] = _piece(name, parameter, dim, group)
    return pieces


def _piece(name: str, parameter: nn.Parameter, dim: int | None, group: Group) -> Piece:
    shape = tuple(parameter.shape)
    cut = None if dim is None else Cut(dim, (Part(shape[dim], shape[dim]),))
    # Its values are there, so how to start it is never asked.
    whole = Parameter(name, shape, name.rpartition(".")[0], len(shape) > 1, "zeros", 0.0, cut)
    if cut is not None:
        return piece(whole, group.size, group.index, sequence=False)
    shared = shape and group.size > 1
    return everything(whole, [Share(group.axis, 0, shape[0], partial=False)] if shared else [])


def _shrink(parameter: nn.Parameter, piece: Piece) -> None:
    """Leaves of a parameter what the piece says."""
    if piece.shape == tuple(parameter.shape):
        return
    part = parameter.data.new_empty(piece.shape)
    piece.take(parameter.data, part)
    parameter.data, parameter.grad = part, None


def _cut_layer(old: nn.Module, style: str, group: Group) -> nn.Module:
    """The layer that takes the place of one whose parameters are cut."""
    new: nn.Linear | nn.Embedding
    with torch.device("meta"):  # the parameters are there already
        if isinstance(old, nn.Embedding):
            rows, features = old.weight.shape
            new = CutEmbedding(rows, features, group.index * rows, old.padding_idx, group)
        else:
            assert isinstance(old, nn.Linear)
            outputs, inputs = old.weight.shape
            new = LINEAR[style](inputs, outputs, old.bias is not None, group)
            new.bias = old.bias
    new.weight = old.weight
    return new.train(old.training)


def _sum_gradients(layer: nn.Module, group: Group) -> None:
    """Each backward, the gradients of the layer's parameters are summed over the group before they are added up."""

    def total(gradient: Tensor) -> Tensor:
        with group.ledger.at(phase="backward"):
            return all_reduce(gradient.clone(memory_format=torch.contiguous_format), group)

    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.register_hook(total)
