"""ZeRO-1, 2, 3 with FSDP, and hybrid shard in six facts each (spec Z-1..4, FSDP-1, CMP-1)."""

from shoal.axes.card import Card

ZERO1 = Card(
    key="zero=1",
    name="ZeRO-1: optimizer states cut",
    cuts="batch, and the vector of optimizer states",
    keeps="1/N of the optimizer states: 4 + 12/N bytes per parameter with mixed-precision Adam",
    replicated="weights and gradients",
    moves="gradients to their shards, updated weights back: (N-1)/N x parameters x (gradient + weight bytes), as plain dp",
    primitive="reduce_scatter and all_gather (or all_reduce and all_gather, half as much again)",
    when="gradients during the last micro-batch's backward, weights after the update: once a step",
    pros=("the largest state shrinks N-fold", "no more traffic than plain data parallelism"),
    cons=("weights and gradients stay whole",),
    cures=("compute", "memory"),
)
ZERO2 = Card(
    key="zero=2",
    name="ZeRO-2: optimizer states and gradients cut",
    cuts="batch, and the vectors of optimizer states and gradients",
    keeps="1/N of optimizer states and gradients: 2 + 14/N bytes per parameter",
    replicated="weights",
    moves="as ZeRO-1 with one micro-batch; gradients once more for each further one",
    primitive="reduce_scatter and all_gather",
    when="each bucket of gradients during every micro-batch's backward, weights after the update",
    pros=("the whole gradient never exists",),
    cons=("traffic grows with accumulation", "weights stay whole"),
    cures=("compute", "memory"),
)
ZERO3 = Card(
    key="zero=3",
    name="ZeRO-3, FSDP: everything cut",
    cuts="batch, and the vectors of weights, gradients and optimizer states",
    keeps="1/N of all states: 16/N bytes per parameter, and a gathered unit or two while it computes",
    replicated="nothing",
    moves="weights twice and gradients once per micro-batch: 1.5 times plain dp",
    primitive="2 all_gather and 1 reduce_scatter per unit",
    when="before a unit computes, in forward and in backward; the next unit is fetched meanwhile",
    pros=("states shrink N-fold: what fits depends on the largest unit, not on depth",),
    cons=("most traffic of the data axis", "each unit waits for its weights where nothing hides it"),
    cures=("compute", "memory"),
)
HSDP = Card(
    key="hsdp",
    name="hybrid shard",
    cuts="as the ZeRO stage, inside a group; groups are replicas of each other",
    keeps="1/(N/R) of the states, for R replicas of a shard group",
    replicated="every shard, R times",
    moves="as the stage inside the group; across replicas 2 (R-1)/R of the shard's gradients",
    primitive="the stage's own inside; all_reduce across",
    when="across replicas once a step, after the last micro-batch",
    pros=("gathers stay on fast links",),
    cons=("R times the memory of sharding over all ranks",),
    cures=("compute", "memory"),
)
