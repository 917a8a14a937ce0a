"""Two-dimensional tensor parallelism in six facts (spec 2D-1, 2D-2)."""

from shoal.axes.card import Card

CARD = Card(
    key="tp=2x2",
    name="2D tensor parallelism",
    cuts="hidden features and samples of activations, inputs and outputs of weights: q x q blocks of each",
    keeps="1/q^2 of every matrix and of every activation, and a block of others for the moment it is multiplied",
    replicated="norm weights and biases in each row of the grid; fewer KV heads than q in some columns",
    moves="(q-1)/q^2 x (X + W) bytes per layer forward, twice that backward: weights travel as well as activations",
    primitive="broadcast and reduce along rows (X) and columns (W); small all_reduce in norms and loss",
    when="in q steps inside every matrix product, forward and backward, on the critical path",
    pros=(
        "activations shrink as weights do, also between layers and in norms",
        "q must divide heads, not q^2, so more ranks fit the same heads",
        "sends less than one dimension where a micro-batch has many tokens",
    ),
    cons=(
        "ranks must be a square",
        "sequences of a micro-batch must divide by q",
        "weights travel, so few tokens cost as much as many",
        "many small messages",
    ),
    cures=("compute", "memory"),
)
