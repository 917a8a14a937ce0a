"""Every layout of the matrix computes, sends, keeps and orders what was planned. `-m "not matrix"` leaves most of them out."""

import json

import pytest

from shoal.cli.main import main
from shoal.plan.memory import CATEGORIES
from shoal.verify.matrix import ALL, CORE, NAMES, SETS, Entry, matrix
from shoal.verify.verify import small_job, verify

WHOLE = [pytest.param(entry, marks=[] if entry.core else [pytest.mark.matrix]) for entry in matrix(ALL)]


@pytest.mark.parametrize("entry", WHOLE, ids=lambda entry: entry.layout)
def test_a_layout_is_as_planned(entry, pool):
    verdict = verify(small_job(entry.asked()), steps=2, pool=pool)
    assert verdict.failures == []
    assert verdict.rows and all(row.ok for row in verdict.rows)
    every = {(rank, category) for rank in range(entry.ranks) for category in CATEGORIES}
    assert {(row.rank, row.category) for row in verdict.memory} == every and all(row.ok for row in verdict.memory)
    assert bool(verdict.schedule) == (entry.asked().layout.pp > 1)


def test_the_matrix_has_every_axis_and_pair_of_axes():
    entries = matrix(ALL)
    assert len(entries) >= 60 and max(entry.ranks for entry in entries) == 16
    assert len({(entry.layout, str(entry.job)) for entry in entries}) == len(entries)
    assert 0 < len(matrix(CORE)) < 15 and set(NAMES) == {CORE, ALL, *SETS}

    def axes(entry):
        layout = entry.asked().layout
        sizes = {"dp": layout.dp, "tp": layout.tp_size, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep}
        return {axis for axis, size in sizes.items() if size > 1}

    met = [axes(entry) for entry in entries]
    names = ("dp", "tp", "pp", "cp", "ep")
    assert [
        pair for pair in zip(names, names[1:] + names[:1], strict=True) if not any(met_ >= {*pair} for met_ in met)
    ] == []
    assert not [(a, b) for a in names for b in names if not any({a, b} <= axes_ for axes_ in met)]
    for zero in range(4):
        for axis in ("tp", "pp", "cp", "ep"):
            assert any(e.asked().layout.zero == zero and axis in axes(e) for e in entries), (
                f"no entry has {axis} with zero={zero}"
            )


def test_the_command_proves_one_after_the_other_and_goes_on_after_a_failure(monkeypatch, capsys):
    padded = Entry("cp=2", {"data": {"packing": "packed", "pad": True, "sequence": 13}})
    monkeypatch.setitem(SETS, "data", (Entry("dp=2", {}), Entry("pp=3,schedule=dualpipe", {}), padded))
    assert main(["verify", "--matrix", "data", "--steps", "1", "--json"]) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert not document["ok"] and document["matrix"] == "data"
    layouts = {row["layout"]: row for row in document["layouts"]}
    assert [row["ok"] for row in document["layouts"]] == [True, False, True]
    assert list(layouts) == ["dp=2", "pp=3,schedule=dualpipe", "cp=2"]
    assert "layout.pp = 3" in layouts["pp=3,schedule=dualpipe"]["failures"][0]
    assert (
        "memory within 0.00%" in captured.err
        and "1/3 ok" in captured.err
        and "2/3 DIFFERS" in captured.err
        and "2 of 3 layouts" in captured.err
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--matrix", "everything"], "is not one of core, all, data"),
        (["--matrix", "core", "--layout", "dp=2"], "--matrix core brings its own jobs"),
        (["--matrix", "core", "--model.layers", "3"], "--model.layers beside it would do nothing"),
    ],
)
def test_what_would_be_lost_beside_a_matrix_is_refused(words, line, capsys):
    assert main(["verify", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and line in error


def test_the_list_of_refusals_is_printed(capsys):
    assert main(["verify", "--refusals"]) == 0
    assert "layout.hsdp with zero = 0: there are no shards to replicate" in capsys.readouterr().out
