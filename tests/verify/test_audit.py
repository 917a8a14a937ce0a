"""The audit of transfers names what differs, on which rank."""

from shoal.transfer import Transfer
from shoal.verify.audit import audit


def transfer(sent, received, calls=1, op="all_reduce"):
    return Transfer("backward", "dp", op, sent, received, calls)


def test_equal_transfers_in_other_portions_are_equal():
    rows = audit([[transfer(10, 12), transfer(5, 5)]], [[transfer(15, 17, calls=2)]])
    assert [row.ok for row in rows] == [True]
    assert rows[0].as_dict()["predicted_bytes"] == 15


def test_a_byte_too_many_names_the_rank():
    (row,) = audit([[transfer(10, 10)], [transfer(10, 10)]], [[transfer(10, 10)], [transfer(11, 10)]])
    assert not row.ok
    assert row.difference() == "backward all_reduce over dp: rank 1 planned 10 bytes sent, measured 11"


def test_what_only_one_side_knows_differs():
    unplanned, unmeasured = audit([[transfer(1, 1, op="broadcast")]], [[transfer(1, 1)]])
    assert not unplanned.ok and not unmeasured.ok
