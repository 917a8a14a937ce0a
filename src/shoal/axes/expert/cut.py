"""Which piece of a mixture of experts a rank keeps (spec EP-1): experts over the expert axis, their matrices over etp. No torch."""

from dataclasses import dataclass

from shoal.axes.expert.cost import experts_of
from shoal.axes.piece import Piece, Run, Share, everything
from shoal.axes.tensor import cut as tensor
from shoal.spec.inventory import Parameter


@dataclass(frozen=True)
class Place:
    """Where a rank stands: number `rank` of `ranks` along the expert axis, number `tensor_rank` of `tensor_ranks` along tp.

    cut: whether matrices are cut over the tensor ranks (etp = tp), else each tensor rank does its share of the tokens.
    sequence: whether tokens come cut along the sequence.
    """

    ranks: int
    rank: int
    tensor_ranks: int
    tensor_rank: int
    cut: bool
    sequence: bool


def piece(parameter: Parameter, place: Place) -> Piece:
    """What a rank keeps of a parameter of a mixture of experts.

    Where tensor ranks route other tokens (uncut experts, or a cut sequence) the gradients of what they all keep are
    partial. Experts that the expert axis cuts name no copies: their gradients are summed over the ranks of "edp".
    """
    apart = parameter.experts and place.ranks > 1
    if place.cut:
        kept = tensor.piece(parameter, place.tensor_ranks, place.tensor_rank, place.sequence)
    elif place.tensor_ranks == 1 or apart:
        kept = everything(parameter)
    else:
        kept = everything(parameter, [Share("tp", 0, parameter.shape[0], partial=True)])
    if not apart:
        return kept
    own = experts_of(parameter.experts, place.ranks, place.rank)
    return Piece(parameter, (len(own), *kept.shape[1:]), ((Run(own.start, own.stop, 0),), *kept.runs[1:]))
