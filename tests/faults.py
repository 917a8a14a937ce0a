"""Faults that a layout may have, put into the running code: tests show that they are found."""

from shoal.axes.piece import counted_runs
from shoal.axes.shares import Shares

SUM = Shares.sum


def sum_of_all_but(axis):
    """In place of Shares.sum: gradients that ranks along `axis` share stay partial."""

    def sums(self):
        self._partial = [(group, views) for group, views in self._partial if group.axis != axis]
        SUM(self)

    return sums


def counted_by_all(spans, pieces, elsewhere):
    """In place of axes.piece.counted_runs: what several ranks keep counts on each of them."""
    return counted_runs(spans, pieces, set())
