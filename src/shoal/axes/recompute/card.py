"""Recomputation in six facts (spec BG-5). It splits nothing, and goes together with everything that does."""

from shoal.axes.card import Card

CARD = Card(
    key="recompute",
    name="activation recomputation",
    cuts="nothing: activations that backward needs are made again",
    keeps="full: a block's input, b x s x h; selective: all but norms' outputs and activation products",
    replicated="nothing more than without it",
    moves="full: the block's forward collectives once more; selective: nothing",
    primitive="those of the block",
    when="in backward, block by block",
    pros=("activations of many layers fit: one block's at a time", "bit-equal gradients", "goes with every axis"),
    cons=("full: one more forward, a third more time", "full: half as much traffic again on the tensor axis"),
    cures=("memory",),
)
