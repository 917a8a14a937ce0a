"""The order of forwards alone, for evaluation: any number of micro-batches over the places of a schedule. No torch."""

from shoal.axes.pipeline.schedules.instruction import F, Schedule


def forward_only(schedule: Schedule, micro_batches: int) -> Schedule:
    """A schedule without backwards on the same places, for `micro_batches` micro-batches, taking the routes in turn.

    As many micro-batches as there are ranks go through a stage before the next stage's turn, so that every rank works
    while stages come in loops or in a V. All ranks follow one order of all forwards, so that none waits in a circle.
    """
    routes, ranks = schedule.routes, schedule.ranks
    orders: list[list] = [[] for _ in range(ranks)]
    for start in range(0, micro_batches, ranks):
        for stage in range(schedule.stages):
            for i in range(start, min(start + ranks, micro_batches)):
                place = routes[i % len(routes)][stage]
                orders[place.rank].append(F(i, place.chunk))
    return Schedule(f"{schedule.name}, forward only", orders, routes, [i % len(routes) for i in range(micro_batches)])
