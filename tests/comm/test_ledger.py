"""The ledger: where a record lands, what it sums, what it costs."""

import timeit

from shoal.comm.ledger import Ledger
from shoal.transfer import Transfer


def test_records_land_at_the_current_place_and_sum_up():
    ledger = Ledger()
    ledger.record("dp", "broadcast", 1, 2)
    with ledger.at(phase="forward", micro_batch=3):
        for layer in (0, 1):
            with ledger.at(layer=layer):
                ledger.record("tp", "all_reduce", 10, 20)
                ledger.record("tp", "all_reduce", 100, 200)
        ledger.record("tp", "all_reduce", 5, 5)
        with ledger.at(phase="backward", layer=7, micro_batch=None):
            ledger.record("tp", "all_reduce", 6, 7)
    ledger.record("dp", "broadcast", 1, 2)
    assert set(ledger.transfers()) == {
        Transfer("setup", "dp", "broadcast", 2, 4, 2),
        Transfer("forward", "tp", "all_reduce", 110, 220, 2, 0, 3),
        Transfer("forward", "tp", "all_reduce", 110, 220, 2, 1, 3),
        Transfer("forward", "tp", "all_reduce", 5, 5, 1, None, 3),
        Transfer("backward", "tp", "all_reduce", 6, 7, 1, 7, None),
    }
    assert ledger.total() == Transfer("*", "*", "*", 233, 456, 8)
    assert ledger.total(phase="forward", op="all_reduce") == Transfer("forward", "*", "all_reduce", 225, 445, 5)
    assert ledger.total(axis="pp") == Transfer("*", "pp", "*", 0, 0, 0)


def test_the_place_returns_after_an_error():
    ledger = Ledger()
    try:
        with ledger.at(phase="forward", layer=1):
            raise KeyError
    except KeyError:
        ledger.record("dp", "barrier", 0, 0)
    assert ledger.transfers() == [Transfer("setup", "dp", "barrier", 0, 0)]


def test_clear_forgets_what_was_and_counts_on():
    ledger = Ledger(trace=True)
    with ledger.at(phase="forward"):
        ledger.record("dp", "send", 4, 0)
        ledger.clear()
        assert ledger.transfers() == [] and ledger.events == []
        ledger.record("dp", "send", 8, 0)
    assert ledger.transfers() == ledger.events == [Transfer("forward", "dp", "send", 8, 0)]


def test_the_trace_keeps_order_and_single_calls():
    ledger = Ledger(trace=True)
    for op in ("send", "receive", "send"):
        ledger.record("pp", op, 1, 1)
    assert [event.op for event in ledger.events] == ["send", "receive", "send"]
    assert Ledger().events is None


def test_a_disabled_ledger_records_nothing():
    ledger = Ledger(enabled=False, trace=True)
    with ledger.at(phase="forward"):
        ledger.record("dp", "send", 4, 0)
    assert ledger.transfers() == ledger.events == []


def test_a_record_costs_microseconds():
    ledger = Ledger()
    calls = 10_000
    best = min(timeit.repeat(lambda: ledger.record("dp", "all_reduce", 10, 10), number=calls, repeat=5)) / calls
    assert best < 5e-6
