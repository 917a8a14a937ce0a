"""Cutting and joining along one dim, for collectives: lengths, buffers, and that dim brought to the front and back."""

from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.comm.world import Group


def into(out: Tensor | None, x: Tensor) -> Tensor:
    """x itself, or `out` filled with it."""
    if out is None:
        return x.contiguous()
    if not out.is_set_to(x):
        out.copy_(x)
    return out


def front(x: Tensor, dim: int) -> Tensor:
    """x with `dim` first, contiguous: the pieces of a cut along it lie one after the other."""
    assert x.dim() > 0, "a scalar has no dim to cut"
    return x.movedim(dim, 0).contiguous()


def back(dim: int) -> Callable[[Tensor], Tensor]:
    """Undoes `front`."""
    return lambda x: x.movedim(0, dim).contiguous()


def buffer(out: Tensor | None, dim: int, like: Tensor, length: int) -> Tensor:
    """`out`, checked, or a new tensor: `length` rows as those of `like`."""
    shape = (length, *like.shape[1:])
    if out is None:
        return like.new_empty(shape)
    assert dim == 0, "out is for dim 0"
    assert out.shape == shape and out.dtype == like.dtype, f"out is {tuple(out.shape)} {out.dtype}; {shape} is needed"
    assert out.is_contiguous(), "out must be contiguous"
    return out


def cut(length: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    """Lengths of the pieces of a dim."""
    if sizes is None:
        assert length % group.size == 0, f"{length} does not divide among {group.size} ranks; pass sizes"
        return [length // group.size] * group.size
    assert len(sizes) == group.size, f"{len(sizes)} sizes for {group.size} ranks"
    assert sum(sizes) == length and min(sizes) >= 0, f"sizes {list(sizes)} do not add up to {length}"
    return list(sizes)


def equal(lengths: Sequence[int]) -> bool:
    """Whether all pieces are alike."""
    return min(lengths) == max(lengths)


def joined(own: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    """Lengths of the pieces that the ranks bring, `own` being this rank's; without `sizes` all are alike."""
    if sizes is None:
        return [own] * group.size
    assert len(sizes) == group.size, f"{len(sizes)} sizes for {group.size} ranks"
    assert sizes[group.index] == own, f"a piece of {own} was given, one of {sizes[group.index]} announced"
    return list(sizes)
