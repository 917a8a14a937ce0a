"""Data parallelism in six facts (spec DP-4)."""

from shoal.axes.card import Card

CARD = Card(
    key="dp",
    name="data parallelism",
    cuts="batch",
    keeps="its share of the batch and that share's activations",
    replicated="weights, gradients and optimizer states: 16 bytes per parameter on every rank with mixed-precision Adam",
    moves="gradients: 2 (N-1)/N x parameters x bytes per element, sent and received alike, whatever the batch",
    primitive="all_reduce",
    when="once a step, in buckets, while the last micro-batch's backward is still running",
    pros=("simple", "throughput grows nearly linearly", "allows a large batch"),
    cons=("saves no memory", "limited by the largest useful batch", "traffic grows with the parameters"),
    cures=("compute",),
)
