"""ZB-V (Qi et al. 2023): split backwards on a V of two chunks per rank; hardly a bubble in the memory of 1F1B.

The orders are made here by a rule of choice, tick by tick, with F, I and W one tick each. A rank holds 2p chunks of
micro-batches at most, from F to W: as much as 1F1B's first stage. With m >= 2p and equal times a rank that has begun
stands still for one tick at most, as simulation finds for p up to 16.
"""

from shoal.axes.pipeline.dependencies import Result, needs, results
from shoal.axes.pipeline.schedules.instruction import F, I, Instruction, Schedule, W, v_shape


def zb_v(p: int, m: int) -> Schedule:
    """Instructions of p ranks with two chunks each for m micro-batches."""
    shape = Schedule("zb-v", [[]] * p, v_shape(p), [0] * m)
    ranks = [_Rank(rank, shape, room=2 * p) for rank in range(p)]
    made: set[Result] = set()
    while any(len(rank.order) < 6 * m for rank in ranks):
        tick = [rank.step(made) for rank in ranks]
        made.update(result for results in tick for result in results)
    return Schedule("zb-v", [rank.order for rank in ranks], shape.routes, shape.route_of)


class _Rank:
    """One rank as its order grows. room: chunks of micro-batches that it may still take on."""

    def __init__(self, rank: int, shape: Schedule, room: int):
        self.rank, self.shape, self.room = rank, shape, room
        self.order: list[Instruction] = []
        self.forwards, self.inputs = [0, 0], [0, 0]  # micro-batches done, by chunk
        self.put_off: list[Instruction] = []

    def step(self, made: set[Result]) -> list[Result]:
        """Runs one instruction, if any can run; returns what it leaves behind."""
        choices = self._choices(made)
        if not choices:
            return []
        x = choices[0]
        self.order.append(x)
        if x.kind == "F":
            self.forwards[x.chunk] += 1
            self.room -= 1
        elif x.kind == "I":
            self.inputs[x.chunk] += 1
            self.put_off.append(W(x.micro_batch, x.chunk))
        else:
            self.put_off.remove(x)
            self.room += 1
        return results(self.rank, x)

    def _choices(self, made: set[Result]) -> list[Instruction]:
        """What can run, best first.

        A micro-batch comes in (F of chunk 0) only where two places are free, so that its way back up stays open; when
        there are fewer, weight halves clear some.
        """
        up, down = F(self.forwards[1], 1), F(self.forwards[0], 0)
        back = [I(self.inputs[chunk], chunk) for chunk in (0, 1)]
        forwards = [x for x, places in ((up, 1), (down, 2)) if self.room >= places]
        ready = [
            x
            for x in (*forwards, *back)
            if x.micro_batch < self.shape.micro_batches and made.issuperset(needs(self.shape, self.rank, x))
        ]
        weights = self.put_off[:1]
        return [*weights, *ready] if self.room < 2 else [*ready, *weights]
