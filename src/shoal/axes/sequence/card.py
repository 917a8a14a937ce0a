"""Sequence parallelism on the tensor ranks in six facts (spec SP-1..3)."""

from shoal.axes.card import Card

CARD = Card(
    key="sp",
    name="sequence parallelism",
    cuts="sequence, of what lies between the layer pairs of tensor parallelism: norms, dropout and residuals",
    keeps="1/t of those activations, so with regather 1/t of a block's",
    replicated="norms and biases of row layers, whose gradients are partial and summed over the tensor ranks once a step",
    moves="as tensor parallelism: each all_reduce in its two halves; with regather 2 (t-1)/t x b s h more per block",
    primitive="all_gather before a layer pair, reduce_scatter after it; the other way round in backward",
    when="4 all_gather and 4 reduce_scatter per block and micro-batch; regather's all_gather beside computation",
    pros=("activations shrink t-fold with no more traffic", "norms and dropout are computed once, not t times"),
    cons=("t must divide the sequence", "leaves the inside of attention as it is: for long sequences see cp"),
    cures=("memory",),
)
