"""Schedules as lists: what each rank does in which order, where stages live, what a layout must be, and the CSV form."""

import subprocess
import sys
from itertools import pairwise

import pytest

from shoal.axes.pipeline.check import check
from shoal.axes.pipeline.partition import even, runs
from shoal.axes.pipeline.schedules.files import from_csv, load, to_csv
from shoal.axes.pipeline.schedules.instruction import B, F, Overlap, Place, Schedule, one_chunk_per_rank
from shoal.axes.pipeline.schedules.interleaved import interleaved
from shoal.axes.pipeline.schedules.pipedream import pipedream
from shoal.axes.pipeline.schedules.registry import BUILT_IN, Recipe, make, names, needs
from shoal.spec.errors import RequestError


def written(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_orders_of_the_simple_schedules():
    assert written(make("naive", 2, 2)) == ["F0 B0 F1 B1"] * 2
    assert written(make("gpipe", 2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert written(make("1f1b", 3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert written(make("breadth-first", 2, 2, 2)) == ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"] * 2
    assert written(make("zb-h1", 2, 3)) == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
    assert written(make("zb-h2", 2, 3)) == ["F0 F1 F2 I0 W0 I1 W1 I2 W2", "F0 I0 F1 I1 F2 I2 W0 W1 W2"]
    assert written(make("pipedream", 2, 3)) == ["F0 F1 B0 U0 F2 B1 U1 B2 U2", "F0 B0 U0 F1 B1 U1 F2 B2 U2"]
    assert written(make("pipedream-2bw", 2, 3)) == ["F0 F1 B0 F2 B1 U1 B2 U2", "F0 B0 F1 B1 U1 F2 B2 U2"]


def test_1f1b_has_three_phases():
    """PP-6: stage s warms up with min(p - 1 - s, m) forwards, then pairs, then drains."""
    for p, m in [(4, 8), (4, 2), (8, 32), (1, 3)]:
        for s, order in enumerate(make("1f1b", p, m).orders):
            warm_up = min(p - 1 - s, m)
            kinds = "".join(x.kind for x in order)
            assert kinds == "F" * warm_up + "FB" * (m - warm_up) + "B" * warm_up


def test_interleaved_order_and_warm_up():
    assert written(make("interleaved", 2, 2, 2)) == [
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ]
    for p, m, v in [(4, 8, 2), (8, 32, 4), (2, 4, 3)]:  # PP-8: 2 (p - 1 - d) + (v - 1) p forwards before the first pair
        for d, order in enumerate(make("interleaved", p, m, v).orders):
            first = next(place for place, x in enumerate(order) if x.kind == "B")
            assert first - 1 == min(2 * (p - 1 - d) + (v - 1) * p, m * v - 1)


def test_interleaved_groups_hold_at_least_p():
    forwards = [x.micro_batch for x in make("interleaved", 4, 10, 2).instructions(0) if x.kind == "F"]
    assert forwards == [0, 1, 2, 3, 4] * 2 + [5, 6, 7, 8, 9] * 2


def test_dualpipe_is_the_published_order():
    """Written out from the original program's eight phases, p = 4 and m = 8 (goldens/verify.py makes the same)."""
    assert written(make("dualpipe", 4, 8)) == [
        "F0 F1 F2 F4.1 I4.1 W4.1 F5.1 F3&B5.1 F6.1&B0 B6.1 F7.1&B1 B7.1 I2 W2 I3 W3",
        "F0 F4.1 F1 F5.1 F2 B4.1 F6.1&B0 F3&B5.1 F7.1&B1 B6.1 B2 I7.1 I3 W7.1 W3",
        "F4.1 F0 F5.1 F1 F6.1 B0 F2&B4.1 F7.1&B1 F3&B5.1 B2 B6.1 I3 I7.1 W3 W7.1",
        "F4.1 F5.1 F6.1 F0 I0 W0 F1 F7.1&B1 F2&B4.1 B2 F3&B5.1 B3 I6.1 W6.1 I7.1 W7.1",
    ]


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 20), (6, 12)])
def test_dualpipe_has_eight_phases(p, m):
    """PP-10, counted: what each rank does between the first instruction and the last."""
    half, schedule = p // 2, make("dualpipe", p, m)
    for r, order in enumerate(schedule.orders):
        near = min(r, p - 1 - r)
        behind = half - near - 1
        middle = behind == 0
        overlaps = sum(isinstance(step, Overlap) for step in order)
        assert overlaps == 2 * (m // 2 - p + near + 1) - middle + behind  # phases 4 and 5
        singles = [step for step in order if not isinstance(step, Overlap)]
        forwards = sum(step.kind == "F" for step in singles)
        assert forwards == 2 * behind + 2 * (near + 1) + behind + middle  # phases 1, 2, 3, and 4 in the middle
        assert sum(step.kind == "W" for step in singles) == behind + behind + near + 1  # phases 3, 7, 8
        assert [step.kind for step in order[len(order) - near - 1 :]] == ["W"] * (near + 1)


def test_where_chunks_live():
    looped = make("interleaved", 4, 8, 2)
    layers = runs(even(16, looped.stages))
    held = [[layer + 1 for c in range(2) for layer in layers[looped.stage_of(d, c)]] for d in range(4)]
    assert held == [[1, 2, 9, 10], [3, 4, 11, 12], [5, 6, 13, 14], [7, 8, 15, 16]]  # PP-8, as 000 has it
    two = make("interleaved", 2, 4, 2)
    layers = runs(even(16, two.stages))
    held = [[layer + 1 for c in range(2) for layer in layers[two.stage_of(d, c)]] for d in range(2)]
    assert held == [[1, 2, 3, 4, 9, 10, 11, 12], [5, 6, 7, 8, 13, 14, 15, 16]]  # as 003 has it

    folded = make("zb-v", 3, 6)
    assert [folded.stage_of(2, 0), folded.stage_of(2, 1), folded.stage_of(0, 1)] == [2, 3, 5]
    assert folded.next(2, 0, 0) == Place(2, 1) and folded.previous(0, 1, 0) == Place(1, 1)
    assert folded.next(0, 1, 0) is None and folded.previous(0, 0, 0) is None

    both = make("dualpipe", 4, 8)
    assert (both.stages, both.ranks, both.micro_batches, both.chunks(1)) == (4, 4, 8, 2)
    assert both.stage_of(1, 0) == 1 and both.stage_of(1, 1) == 2
    assert both.next(1, 1, 7) == Place(0, 1) and both.next(1, 0, 0) == Place(2, 0)


def test_2bw_refuses_groups_too_small_for_two_versions():
    assert pipedream(4, 8, "2bw", group=3).versions == "2bw"
    with pytest.raises(ValueError, match=r"groups of 2 .* 3 would do"):
        pipedream(4, 8, "2bw", group=2)


REFUSED = [
    ("dualpipe", 3, 8, None, "layout.pp", "2 or 4 would do"),
    ("dualpipe", 1, 8, None, "layout.pp", "2 would do"),
    ("dualpipe", 4, 6, None, "layout.micro_batches", "8 would do"),
    ("dualpipe", 4, 9, None, "layout.micro_batches", "8 or 10 would do"),
    ("dualpipe-v", 4, 7, None, "layout.micro_batches", "8 would do"),
    ("dualpipe-v", 4, 8, 1, "layout.v", "2 would do"),
    ("zb-v", 4, 8, 1, "layout.v", "2 would do"),
    ("zb-v", 4, 8, 3, "layout.v", "2 would do"),
    ("interleaved", 4, 8, 1, "layout.v", "2 would do"),
    ("1f1b", 4, 8, 2, "layout.v", "1 would do"),
    ("dualpipe", 4, 8, 2, "layout.v", "1 would do"),
    ("1f2b", 4, 8, None, "layout.schedule", "did you mean 1f1b?"),
]


@pytest.mark.parametrize(("name", "p", "m", "v", "field", "would_do"), REFUSED)
def test_what_a_schedule_cannot_do_is_refused_with_what_would_do(name, p, m, v, field, would_do):
    with pytest.raises(RequestError) as refused:
        make(name, p, m, v)
    assert refused.value.field == field and would_do in str(refused.value) and "\n" not in str(refused.value)


def test_every_schedule_takes_the_default_micro_batches():
    """Layout's default is 2 pp micro-batches, which every schedule must take; and few or odd ones but for DualPipe's."""
    for name in names():
        for p in (2, 4, 8):
            check(make(name, p, 2 * p))
        if not needs(name).rounds:
            for m in (1, 3, 5):
                check(make(name, 4, m))


def test_a_schedule_of_ones_own():
    def backwards_first(p, m):
        return Schedule("mine", [[x for i in range(m) for x in (F(i), B(i))]] * p, one_chunk_per_rank(p), [0] * m)

    known = {**BUILT_IN, "mine": Recipe(backwards_first)}
    assert make("mine", 2, 2, known=known).name == "mine"
    with pytest.raises(RequestError):
        make("mine", 2, 2)
    with pytest.raises(TypeError):
        BUILT_IN["mine"] = known["mine"]


@pytest.mark.parametrize("name", names())
def test_csv_gives_a_schedule_back(name, tmp_path):
    schedule = make(name, 4, 8)
    assert from_csv(to_csv(schedule)) == schedule
    (tmp_path / "mine.csv").write_text(to_csv(schedule))
    path = str(tmp_path / "mine.csv")
    assert make(path, 4, 8) == schedule
    for p, m, field in ((2, 8, "layout.pp"), (4, 6, "layout.micro_batches")):
        with pytest.raises(RequestError, match="would do") as refused:
            make(path, p, m)
        assert refused.value.field == field
    with pytest.raises(RequestError) as refused:
        make(path, 4, 8, 7)
    assert refused.value.field == "layout.v"


GOOD = "schedule,mine\nversions,flush\nroute,0.0,1.0\nmicro-batches,0,0\nrank,F0,B0,F1,B1\nrank,F0,B0,F1,B1\n"


def test_csv_as_spreadsheets_leave_it():
    loose = GOOD.replace("\n", ",,\r\n").replace("F1", " F1.0 ") + ",,,\r\n\r\n"
    assert from_csv(loose) == from_csv(GOOD)


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("rank,F0,B0,F1,B1\nrank", "rank,F0,X0,F1,B1\nrank", "mine.csv, row 5, cell 3: X0 is no step; F0, B0"),
        ("rank,F0,B0,F1,B1\nrank", "rank,F0,,B0,F1,B1\nrank", "mine.csv, row 5, cell 3"),
        ("B1\nrank", "F-1\nrank", "row 5, cell 5: F-1"),
        ("F1,B1\nrank", "F1&B1&B0\nrank", "row 5, cell 4"),
        ("F1,B1\nrank", "F1&F0\nrank", "row 5, cell 4: F1&F0 does not join a forward to a backward"),
        ("F1,B1\nrank", "B1&F0\nrank", "row 5, cell 4"),
        ("1.0", "1", "row 3, cell 3: 1 is no place; 0.0"),
        ("batches,0,0", "batches,0,b", "row 4, cell 3: b is no number of a route; 0 would do"),
        ("flush", "often", "row 2, cell 2: often is not one of flush, stash, vertical, 2bw; flush would do"),
        ("versions,", "version,", "row 2, cell 1: version does not say what the row holds"),
        ("route,0.0,1.0\n", "", "has no row route with values; route,0.0,1.0 would do"),
        ("schedule,mine\n", "schedule\n", "has no row schedule"),
        ("rank,F0,B0,F1,B1\nrank", "rank,B0,F0,F1,B1\nrank", "mine.csv: .*rank 0, position 0, B0"),
        ("micro-batches,0,0", "micro-batches,0,0,0", "mine.csv: rank 0 has no F for micro-batch 2"),
        ("micro-batches,0,0", "micro-batches,0,1", "mine.csv: micro-batch 1 takes route 1 of 1"),
        ("F1,B1\nrank", "F9,B1\nrank", "mine.csv: rank 0, position 2, F9: there is no micro-batch 9"),
        ("route,", "micro-batches,0,0\nroute,", "row 5, cell 1: micro-batches stands in an earlier row already"),
        ("schedule,mine", 'schedule,"mine', "mine.csv has no row versions"),
    ],
)
def test_a_broken_file_names_file_row_and_cell(tmp_path, old, new, where):
    assert old in GOOD
    file = tmp_path / "mine.csv"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(RequestError, match=where) as refused:
        load(file)
    assert refused.value.field == "layout.schedule" and "\n" not in str(refused.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "mine.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.csv").mkdir()
    for name, why in (("none.csv", "No such file"), ("folder.csv", "directory"), ("mine.csv", "not UTF-8")):
        with pytest.raises(RequestError, match=why):
            load(tmp_path / name)


def test_groups_by_hand():
    schedule = interleaved(4, 6, 2, groups=[4, 2])
    check(schedule)
    chunks = [x.chunk for x in schedule.instructions(3) if x.kind == "F"]
    assert chunks == [0] * 4 + [1] * 4 + [0] * 2 + [1] * 2
    assert all(a <= b for a, b in pairwise(x.micro_batch for x in schedule.orders[0][:4]))


def test_csv_as_a_spreadsheet_leaves_it(tmp_path):
    """With a byte order mark, rows padded to equal lengths, and Windows' ends of lines."""
    schedule = make("1f1b", 2, 3)
    rows = to_csv(schedule).splitlines()
    padded = "".join(row + "," * (max(map(len, rows)) - len(row)) + "\r\n" for row in rows)
    (tmp_path / "mine.csv").write_bytes(b"\xef\xbb\xbf" + padded.encode())
    assert make(str(tmp_path / "mine.csv"), 2, 3) == schedule


@pytest.mark.parametrize("groups", [[4, 3], [4, 4, 4], [8, 0], [9, -1]])
def test_groups_that_are_not_all_micro_batches_are_refused(groups):
    with pytest.raises(ValueError, match=r"groups .* are not 8 micro-batches; 4-4 would do"):
        interleaved(4, 8, 2, groups)


def test_a_schedule_is_called_what_it_was_asked_for():
    for name in names():
        assert make(name, 4, 8).name == name


def test_what_the_room_offers_is_enough_to_write_check_and_time_a_schedule():
    """Without torch, and by the names one would look for first."""
    program = """
import sys
from shoal.axes.pipeline import B, F, Recipe, BUILT_IN, Schedule, check, make, one_chunk_per_rank, peaks, simulate
from shoal.axes.pipeline import from_csv, stage_times, to_csv
def mine(p, m):
    return Schedule("mine", [[x for i in range(m) for x in (F(i), B(i))]] * p, one_chunk_per_rank(p), [0] * m)
schedule = make("mine", 4, 8, known={**BUILT_IN, "mine": Recipe(mine)})
check(schedule)
assert simulate(schedule, stage_times(schedule, 1, 2)).makespan == 96 and peaks(schedule) == [1] * 4
assert from_csv(to_csv(schedule)) == schedule and "torch" not in sys.modules
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=120)
    assert ended.returncode == 0
