"""DualPipe (DeepSeek-AI 2024): micro-batches enter at both ends, and a forward runs together with a backward.

Every rank holds two stages, r for one direction and p - 1 - r for the other, so weights exist twice. The bubble is
(p/2 - 1)(F&B + B - 3W), and p + 1 micro-batches stay alive.
"""

from collections.abc import Iterator

from shoal.axes.pipeline.schedules.instruction import B, F, I, Instruction, Overlap, Place, Schedule, Step, W


def dualpipe(p: int, m: int) -> Schedule:
    """Instructions of p ranks for m micro-batches, half in each direction; p and m even, m >= 2p."""
    half = m // 2
    down = tuple(Place(rank, 0) for rank in range(p))
    up = tuple(Place(rank, 1) for rank in reversed(range(p)))

    def rank(r: int) -> list[Step]:
        if r < p // 2:
            return list(eight_phases(r, p // 2, near=(0, 0), far=(1, half), count=half))
        return list(eight_phases(p - 1 - r, p // 2, near=(1, half), far=(0, 0), count=half))

    return Schedule("dualpipe", [rank(r) for r in range(p)], [down, up], [0] * half + [1] * half)


def eight_phases(r: int, ranks: int, near: tuple[int, int], far: tuple[int, int], count: int) -> Iterator[Step]:
    """The order of the r-th rank from an end where micro-batches enter, out of `ranks` from there to the middle.

    near: what comes from that end: its chunk on this rank and its first micro-batch; far: what comes from the middle.
    count: micro-batches of each. A backward is split into I and W where its W is to be put off.
    """
    behind = ranks - 1 - r  # ranks between this one and the middle
    forward = {chunk: iter([F(first + i, chunk) for i in range(count)]) for chunk, first in (near, far)}
    backward = {chunk: iter([B(first + i, chunk) for i in range(count)]) for chunk, first in (near, far)}
    a, b = near[0], far[0]
    put_off: list[Instruction] = []

    def split(chunk: int) -> Instruction:
        whole = next(backward[chunk])
        put_off.append(W(whole.micro_batch, chunk))
        return I(whole.micro_batch, chunk)

    for _ in range(2 * behind):  # 1
        yield next(forward[a])
    for _ in range(r + 1):  # 2
        yield next(forward[a])
        yield next(forward[b])
    for _ in range(behind):  # 3
        yield split(b)
        yield put_off.pop(0)
        yield next(forward[b])
    for turn in range(count - 2 * ranks + r + 1):  # 4
        if turn == 0 and behind == 0:  # in the middle the two would wait for each other
            yield next(forward[a])
            yield next(backward[b])
        else:
            yield Overlap(next(forward[a]), next(backward[b]))
        yield Overlap(next(forward[b]), next(backward[a]))
    for _ in range(behind):  # 5
        yield next(backward[b])
        yield Overlap(next(forward[b]), next(backward[a]))
    for turn in range(2 * (r + 1)):  # 6: whole backwards, then halves
        chunk = a if turn % 2 else b
        yield split(chunk) if turn > r else next(backward[chunk])
    for _ in range(behind):  # 7
        yield put_off.pop(0)
        yield split(a)
    yield from put_off  # 8
