"""One-dimensional tensor parallelism in six facts (spec TP-6..8)."""

from shoal.axes.card import Card

CARD = Card(
    key="tp",
    name="tensor parallelism",
    cuts="hidden: every weight matrix, by whole heads, MLP columns and token ids",
    keeps="1/t of the matrices of every layer, and the activations between a column layer and its row layer",
    replicated="norms, biases of row layers, and the activations between layer pairs (10 of 34 s b h bytes of a GPT block)",
    moves="activations: 8 (t-1)/t x b s h x bytes per element per block and micro-batch, whatever the width of the MLP",
    primitive="all_reduce",
    when="4 times per block and micro-batch, on the critical path: 2 in forward, 2 in backward",
    pros=(
        "weights, gradients and optimizer states shrink t-fold, without gathering any",
        "a single sequence is computed t times as fast",
        "logits are never gathered",
    ),
    cons=(
        "hardly any transfer hides behind computation, so it belongs inside a node",
        "t must divide the heads",
        "activations between layer pairs stay whole",
    ),
    cures=("compute", "memory"),
)
