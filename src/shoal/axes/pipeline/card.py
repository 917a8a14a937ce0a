"""Pipeline parallelism in six facts (spec PP-13)."""

from shoal.axes.card import Card

CARD = Card(
    key="pp",
    name="pipeline parallelism",
    cuts="layers: depth, in runs of whole layers",
    keeps="weights, gradients and optimizer states of its own layers, and activations of the micro-batches under way in them",
    replicated="nothing (a tied embedding on the first and last stage, all weights twice with dualpipe)",
    moves="activations forward and gradients back, b x s x h x bytes per element each: 2m of them per rank and step, m at the "
    "ends; the total does not change with m at a fixed batch",
    primitive="send and receive, between neighbours only",
    when="after every forward and every backward of a micro-batch, beside the next one's work",
    pros=("least traffic at long sequences and large models, so it crosses nodes", "states shrink p-fold"),
    cons=(
        "the bubble: (p-1)/m of the useful time with 1f1b",
        "stages must take equally long, and embedding and head weigh on the ends",
        "a schedule is easy to draw and hard to get right",
    ),
    cures=("compute", "memory"),
)
