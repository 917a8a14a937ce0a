"""The checker: it accepts every schedule there is, and names the instruction at fault in every kind of broken one."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.axes.pipeline.check import check, check_programs
from shoal.axes.pipeline.communication import Exchange, Message, arrivals, departures, programs
from shoal.axes.pipeline.schedules.instruction import (
    B,
    F,
    I,
    Instruction,
    Overlap,
    Place,
    Schedule,
    U,
    W,
    one_chunk_per_rank,
)
from shoal.axes.pipeline.schedules.registry import make, names, needs
from shoal.spec.errors import RequestError

EVERY = st.tuples(st.sampled_from(names()), st.integers(1, 8), st.integers(1, 20), st.sampled_from([None, 2, 3]))


def made(name, p, m, v=None):
    """The schedule nearest to what was drawn that can be."""
    recipe = needs(name)
    p += recipe.even and p % 2
    m = max(m + (recipe.even and m % 2), recipe.rounds * p)
    return make(name, p, m, v if recipe.least_v is not None else None)


@settings(max_examples=150, deadline=None)
@given(EVERY)
def test_every_schedule_is_sound(drawn):
    schedule = made(*drawn)
    check(schedule)
    check(schedule, "tagged")


@settings(max_examples=100, deadline=None)
@given(EVERY, st.randoms(use_true_random=False))
def test_any_missing_or_repeated_instruction_is_named(drawn, random):
    schedule = made(*drawn)
    rank = random.randrange(schedule.ranks)
    step = random.choice([x for x in schedule.orders[rank] if isinstance(x, Overlap) or x.kind != "U"])
    position = schedule.orders[rank].index(step)
    with pytest.raises(ValueError, match=f"rank {rank}"):
        check(with_order(schedule, rank, lambda order: order[:position] + order[position + 1 :]))
    with pytest.raises(ValueError, match=rf"rank {rank}, position {position + 1}, {step}: it stands at .* {position}"):
        check(with_order(schedule, rank, lambda order: [*order[:position], step, *order[position:]]))


@settings(max_examples=100, deadline=None)
@given(EVERY, st.randoms(use_true_random=False))
def test_a_backward_before_its_forward_is_refused(drawn, random):
    """Whatever is no forward and is moved ahead of all else needs something that is not there."""
    schedule = made(*drawn)
    rank = random.randrange(schedule.ranks)
    step = random.choice([x for x in schedule.orders[rank] if isinstance(x, Overlap) or x.kind in "BIW"])
    broken = with_order(schedule, rank, lambda order: [step, *(x for x in order if x != step)])
    with pytest.raises(ValueError, match=rf"rank {rank}, position 0, {step} waits for rank"):
        check(broken, "tagged")


def with_order(schedule, rank, change):
    orders = list(map(list, schedule.orders))
    orders[rank] = change(orders[rank])
    return replace(schedule, orders=orders)


def two(first, second, versions="flush", micro_batches=1):
    return Schedule("two", [first, second], one_chunk_per_rank(2), [0] * micro_batches, versions)


WHOLE = [F(0), B(0)]


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        (two(WHOLE, [F(0)]), r"rank 1 has no B, and no I, for micro-batch 0 in chunk 0 \(stage 1\)"),
        (two(WHOLE, [B(0)]), r"rank 1 has no F for micro-batch 0"),
        (two(WHOLE, [F(0), I(0)]), r"rank 1, position 1, I0 has no W for micro-batch 0"),
        (two(WHOLE, [F(0), W(0)]), r"rank 1 has no B, and no I,"),
        (two(WHOLE, [F(0), B(0), W(0)]), r"rank 1, position 2, W0 repeats a part of its B"),
        (two(WHOLE, [F(0), I(0), B(0), W(0)]), r"rank 1, position 1, I0 repeats a part of its B"),
        (two(WHOLE, [F(0), W(0), I(0)]), r"rank 1, position 1, W0 waits for rank 1, position 2, I0"),
        (two(WHOLE, [*WHOLE, F(1)]), r"rank 1, position 2, F1: there is no micro-batch 1, but 1"),
        (two(WHOLE, [*WHOLE, F(0, 1)]), r"rank 1, position 2, F0.1: the rank has no chunk 1, but 1"),
        (two(WHOLE, [*WHOLE, Instruction("X", 0)]), r"rank 1, position 2, X0: X is no instruction"),
        (two(WHOLE, [*WHOLE, U(0)]), r"rank 1, position 2, U0: weights change in mid-step"),
        (two([*WHOLE, U(0)], WHOLE, "stash"), r"rank 1, position 1, B0 has no U after it"),
        (two([*WHOLE, U(0)], [F(0), U(0), B(0)], "stash"), r"rank 1, position 2, B0 has no U after it"),
        (two([*WHOLE, U(0)], [U(0), F(0), B(0), U(0)], "stash"), r"rank 1, position 3, U0: it stands at position 0"),
        (two([Overlap(B(0), F(0))], WHOLE), r"rank 0, position 0, B0&F0 does not join a forward to a backward"),
        (two([Overlap(F(0), B(0))], WHOLE), r"rank 0, position 0, F0&B0 waits for"),
        (two(WHOLE, WHOLE, micro_batches=0), r"at least one rank, one stage and one micro-batch"),
        (Schedule("x", [WHOLE], [[Place(0, 0), Place(1, 0)]], [0]), r"place 1.0 is not among 1 ranks"),
        (Schedule("x", [WHOLE], [[Place(0, 1)]], [0]), r"place 0.1 is not among 1 ranks with chunks numbered from 0"),
        (Schedule("x", [WHOLE], [[Place(0, 0)] * 2], [0]), r"chunk 0 of rank 0 holds 2 stages"),
        (
            Schedule("x", [WHOLE], [[Place(0, 0)], [Place(0, 1), Place(0, 2)]], [0]),
            r"route 1 has 2 stages, route 0 has 1",
        ),
        (Schedule("x", [WHOLE], [[Place(0, 0)]], [1]), r"micro-batch 0 takes route 1 of 1"),
        (
            Schedule("x", [[F(0, 1), B(0, 1)]], [[Place(0, 0)], [Place(0, 1)]], [0]),
            r"F0.1: .* does not come through chunk 1",
        ),
    ],
)
def test_a_broken_schedule_is_refused_with_the_instruction_at_fault(schedule, fault):
    with pytest.raises(ValueError, match=fault):
        check(schedule)


def test_ranks_that_wait_for_each_other_are_named_round_the_circle():
    """Rank 0 wants its first backward before it has sent the second forward, which rank 1 wants before that backward."""
    broken = two([F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)], micro_batches=2)
    circle = (
        "the orders wait in a circle: rank 0, position 1, B0 waits for rank 1, position 2, B0; "
        "rank 1, position 1, F1 waits for rank 0, position 2, F1"
    )
    for communication in ("tagged", "ordered"):
        with pytest.raises(ValueError) as refused:
            check(broken, communication)
        assert str(refused.value) == circle


def test_forwards_alone():
    evaluation = Schedule("evaluation", [[F(0), F(1)]] * 2, one_chunk_per_rank(2), [0, 0])
    check(evaluation, forward_only=True)
    with pytest.raises(ValueError, match="no B"):
        check(evaluation)
    with pytest.raises(ValueError, match=r"rank 1, position 1, B0: B is no instruction of an evaluation"):
        check(two([F(0)], [F(0), B(0)]), forward_only=True)


def read(program):
    """A program in short: >f0 sends output 0, <b0 receives gradient 0; brackets hold one exchange."""
    words = []
    for action in program:
        if isinstance(action, Exchange):
            ends = [(">", x) for x in action.sends] + [("<", x) for x in action.receives]
            words.append("[" + " ".join(f"{end}{x.phase[0]}{x.micro_batch}" for end, x in ends) + "]")
        else:
            words.append(str(action))
    return " ".join(words)


def test_programs_post_sends_at_once_and_receives_ahead():
    """Derived by hand from the rule. Last stage of gpipe: each receive moves while the forward before it runs."""
    first, last = programs(make("gpipe", 2, 3))
    assert read(first) == "F0 [>f0] F1 [>f1] F2 [>f2] [<b0] [<b1] B0 [<b2] B1 B2"
    assert read(last) == "[<f0] [<f1] F0 [<f2] F1 F2 B0 [>b0] B1 [>b1] B2 [>b2]"
    assert [read(program) for program in programs(make("1f1b", 3, 3))] == [
        "F0 [>f0] F1 [>f1] F2 [>f2] [<b0] [<b1] B0 [<b2] B1 B2",
        "[<f0] F0 [>f0 <f1] F1 [>f1 <f2] [<b0] B0 [>b0] F2 [>f2 <b1] B1 [>b1] [<b2] B2 [>b2]",
        "[<f0] F0 [<f1] B0 [>b0] F1 B1 [>b1 <f2] F2 B2 [>b2]",
    ]


def test_chunks_of_one_rank_send_nothing():
    for name in ("zb-v", "dualpipe-v"):
        assert read(programs(make(name, 1, 2))[0]) == " ".join(map(str, make(name, 1, 2).orders[0]))
        for program in programs(make(name, 4, 8)):
            for action in program:
                if isinstance(action, Exchange):
                    assert all(x.sender.rank != x.receiver.rank for x in action.sends + action.receives)


@settings(max_examples=60, deadline=None)
@given(EVERY)
def test_a_message_for_every_border_and_micro_batch(drawn):
    """Counted from the routes alone: stages next to each other on different ranks, there and back."""
    schedule = made(*drawn)
    borders = Counter(
        (phase, i)
        for i, number in enumerate(schedule.route_of)
        for phase in ("forward", "backward")
        for a, b in zip(schedule.routes[number], schedule.routes[number][1:], strict=False)
        if a.rank != b.rank
    )
    actions = [action for program in programs(schedule) for action in program if isinstance(action, Exchange)]
    for end in ("sends", "receives"):
        assert Counter((x.phase, x.micro_batch) for action in actions for x in getattr(action, end)) == borders


def naive_programs(schedule):
    """Sends right after, receives right before, one message at a time: what deadlocks without a global order."""
    return [
        tuple(
            action
            for step in schedule.orders[rank]
            for action in (
                *(Exchange((), (x,)) for x in arrivals(schedule, rank, step)),
                step,
                *(Exchange((x,), ()) for x in departures(schedule, rank, step)),
            )
        )
        for rank in range(schedule.ranks)
    ]


def test_messages_posted_where_they_are_needed_deadlock_in_order():
    """1F1B's known fault: both neighbours want to send first. gpipe's go one way at a time and get through."""
    check_programs(make("gpipe", 4, 8), naive_programs(make("gpipe", 4, 8)))
    for name in ("1f1b", "zb-h1", "zb-h2", "dualpipe"):
        schedule = make(name, 4, 8)
        check(schedule, "tagged")  # the orders are sound, the messages are at fault
        with pytest.raises(ValueError, match=r"deadlock: rank \d, position \d+, .* no other end takes part in the"):
            check_programs(schedule, naive_programs(schedule))
    both_ways = make("zb-v", 4, 8)  # here two ranks do not even agree on the order of their messages
    with pytest.raises(ValueError, match=r"rank 0 sends the output .* where rank 1 receives the gradient"):
        check_programs(both_ways, naive_programs(both_ways))


def changed(program, change):
    """A program with its first exchange that `change` answers replaced by that answer."""
    for place, action in enumerate(program):
        if isinstance(action, Exchange) and (answer := change(action)) is not None:
            return (*program[:place], *answer, *program[place + 1 :])
    raise AssertionError("nothing to change")


def test_broken_programs_are_refused():
    schedule = make("1f1b", 2, 4)
    good = programs(schedule)
    check_programs(schedule, good)
    first, last = good

    def refuse(broken, why):
        with pytest.raises(ValueError, match=why):
            check_programs(schedule, broken)

    without = changed(last, lambda x: [] if x.receives else None)
    refuse([first, without], r"rank 1, position 0, F0 needs the output of micro-batch 0 from 0.0 to 1.0, which is not")
    refuse(
        [changed(first, lambda x: [] if x.sends else None), last], r"rank 0 does not send the output of micro-batch 0"
    )
    refuse([changed(first, lambda x: [x, x] if x.sends else None), last], r"rank 0 sends .* twice")
    refuse([first, changed(last, lambda x: [x, x] if x.receives else None)], r"rank 1 receives .* twice")
    refuse([(first[1], first[0], *first[2:]), last], r"rank 0 sends the output of micro-batch 0 .* before it is made")
    refuse([first[:-1], last], r"rank 0, position 7, B3 is not in the rank's program")
    refuse([(*first, first[0]), last], r"rank 0 runs F0 as step 8, which is not its order")
    stray = Exchange((), (Message("forward", 9, Place(0, 0), Place(1, 0)),))
    refuse([first, (*last, stray)], r"rank 0 sends None where rank 1 receives the output of micro-batch 9")

    both = [x for x in first if isinstance(x, Exchange) and x.sends][:2]
    swapped = Exchange(both[1].sends, both[0].receives), Exchange(both[0].sends, both[1].receives)
    late = changed(first, lambda x: [] if x == both[0] else None)
    late = changed(late, lambda x: swapped if x == both[1] else None)
    refuse(
        [late, last], r"rank 0 sends the output of micro-batch 1 .* where rank 1 receives the output of micro-batch 0"
    )


def test_made_refuses_nothing_by_accident():
    """The helper above draws from all schedules: none may be out of its reach."""
    for name in names():
        assert made(name, 3, 5).name in name
    with pytest.raises(RequestError):
        made("none", 3, 5)
