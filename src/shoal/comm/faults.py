"""What a person reads when ranks did not come: who was lost, where, who waited for whom, and where everybody was. No torch."""

from collections.abc import Iterable, Mapping, Sequence

from shoal.comm.whereabouts import SAVE, LastCall, Record

SHOWN = 16  # lines about ranks at most
IN_FIRST_LINE = 2  # kinds of waits


def explain(
    records: Sequence[Record],
    dead: Mapping[int, str],
    now: float | None = None,
    stacks: Mapping[int, Sequence[str]] | None = None,
) -> str:
    """The report of a run that broke: one line that says what happened, and then a line for each rank.

    dead: how ranks were lost that did not just lose a peer or wait in vain, by rank: "was killed by SIGKILL". now: the
    time until which waits are counted, seconds since 1970; by default until the first rank gave up. stacks: the
    innermost lines of Python that a rank was in.
    """
    run = _Run(records, dead)
    if now is None:
        now = min((record.ended_at for record in records if record.ended_at), default=0.0)
    return "\n".join([_headline(run), *_lines(run, now, stacks or {})])


class _Run:
    """The records by rank, and who waits for whom."""

    def __init__(self, records: Sequence[Record], dead: Mapping[int, str]):
        self.dead = dict(sorted(dead.items()))
        self.at = {record.rank: record for record in records}
        self.ranks = sorted(self.at.keys() | set(self.dead) | set(range(max((r.world for r in records), default=0))))
        self.waits_for = {rank: self._waits_for(rank) for rank in self.ranks if rank not in self.dead}

    def waits(self, rank: int) -> LastCall | None:
        """The call in which a rank stands still."""
        return self.at[rank].waits if rank in self.at else None

    def missing(self, call: LastCall) -> list[int]:
        """The ranks of a call that have not come to it; a message's other end is not known to have come."""
        if call.peer is not None:
            return [call.peer]
        return [rank for rank in call.ranks if not self._has_come(rank, call)]

    def late(self) -> list[int]:
        """Ranks that others wait for, be it by way of third ones, and that wait for nobody."""
        wanted = {rank for awaited in self.waits_for.values() for rank in awaited}
        return [rank for rank in self.ranks if rank in wanted and rank not in self.dead and self.waits(rank) is None]

    def waiting_for(self, lost: Iterable[int]) -> list[int]:
        """Ranks that wait for one of `lost` themselves."""
        return [rank for rank, awaited in self.waits_for.items() if not awaited.isdisjoint(lost)]

    def _waits_for(self, rank: int) -> set[int]:
        call = self.waits(rank)
        if call is None:
            return set()
        # a rank that came and was then lost leaves the others in their call
        return {*self.missing(call), *(self.dead.keys() & set(call.ranks if call.peer is None else ()))} - {rank}

    def _has_come(self, rank: int, call: LastCall) -> bool:
        record = self.at.get(rank)
        if record is None or (call.op == SAVE and record.writing):
            return False
        return record.times(call.axis, call.ranks) >= call.number


def _headline(run: _Run) -> str:
    waiting = {rank: call for rank in run.ranks if rank not in run.dead and (call := run.waits(rank))}
    if run.dead:
        lost = list(run.dead)
        said = "; ".join(f"rank {rank} {words} {_place(run, rank)}" for rank, words in list(run.dead.items())[:SHOWN])
        return f"{said}; {_waiters(run, lost) or 'no rank waited for it yet'}"
    if late := run.late():
        who = f"{_ranks(late)} did not come"
        where = "; ".join(f"{_it(late, rank)} was {_place(run, rank)}" for rank in late[:IN_FIRST_LINE])
        return f"{who}: {where}, in no call to others; {_waiters(run, late)}"
    if different := _different(run, waiting):
        return different
    if any(run.waits_for.values()):
        chain = _circle(run)
        return "ranks wait for each other: " + "; ".join(
            f"rank {rank} in {_call(waiting[rank])} for {_ranks(sorted(run.waits_for[rank]))}" for rank in chain
        )
    if waiting:
        calls = _kinds(waiting)
        return "; ".join(f"all had come to {name}, which did not end in time: {_ranks(who)}" for name, who in calls)
    return "no rank waited for another"


def _waiters(run: _Run, lost: Sequence[int]) -> str:
    """Who waited for the lost ranks, and in what."""
    direct = run.waiting_for(lost)
    kinds = _kinds({rank: call for rank in direct if (call := run.waits(rank))})
    it = "it" if len(lost) == 1 else "them"
    said = [f"{_ranks(who)} waited for {it} in {name}" for name, who in kinds[:IN_FIRST_LINE]]
    if rest := sum(len(who) for _, who in kinds[IN_FIRST_LINE:]):
        said.append(f"{rest} more waited for {it} elsewhere")
    return ", ".join(said)


def _different(run: _Run, waiting: Mapping[int, LastCall]) -> str:
    """Ranks that came to the same call of a group with different things in mind."""
    for rank, call in waiting.items():
        for other, theirs in waiting.items():
            same = call.peer is None and theirs.peer is None
            same = same and (call.axis, call.ranks, call.number) == (theirs.axis, theirs.ranks, theirs.number)
            if same and call.op != theirs.op:
                return (
                    f"ranks called different things: call {call.number} over {call.axis} was {call.op} on rank {rank} "
                    f"and {theirs.op} on rank {other}"
                )
    return ""


def _circle(run: _Run) -> list[int]:
    """Ranks each of which waits for the next, and the last for the first."""
    path = [next(rank for rank, awaited in run.waits_for.items() if awaited)]
    while (following := min(run.waits_for[path[-1]])) not in path:
        path.append(following)
    return path[path.index(following) :]


def _kinds(waiting: Mapping[int, LastCall]) -> list[tuple[str, list[int]]]:
    """The ranks in each call, by its name, the calls with most ranks first."""
    kinds: dict[str, list[int]] = {}
    for rank, call in waiting.items():
        kinds.setdefault(_call(call), []).append(rank)
    return sorted(kinds.items(), key=lambda kind: -len(kind[1]))


def _lines(run: _Run, now: float, stacks: Mapping[int, Sequence[str]]) -> list[str]:
    """A line for each rank, or where there are many, for each kind of what they say: those to look at first come first."""
    first = [*run.dead, *(rank for rank in run.late() if rank not in run.dead)]
    order = run.ranks if len(run.ranks) <= SHOWN else [*first, *(rank for rank in run.ranks if rank not in first)]
    kinds: dict[str, list[int]] = {}
    for rank in order:
        alone = len(run.ranks) <= SHOWN or rank in first
        kinds.setdefault(str(rank) if alone else _kind(run, rank), []).append(rank)
    lines = []
    for who in list(kinds.values())[:SHOWN]:
        more = f" (and {len(who) - 1} more like rank {who[0]})" if len(who) > 1 else ""
        lines += [f"  rank {who[0]}{_host(run, who[0])}: {_line(run, who[0], now)}{more}"]
        lines += [f"      {frame}" for frame in stacks.get(who[0], ()) if who[0] in first]
    if rest := sum(map(len, list(kinds.values())[SHOWN:])):
        lines.append(f"  and {rest} more ranks elsewhere")
    return lines


def _line(run: _Run, rank: int, now: float) -> str:
    """Where a rank was, in a line."""
    if rank not in run.at:
        return run.dead.get(rank, "") + (", and left no record" if rank in run.dead else "left no record")
    record, call = run.at[rank], run.waits(rank)
    parts = [run.dead[rank] + " " + _where(record) if rank in run.dead else _where(record)]
    lasted = f" for {now - record.since:.1f} s" if now - record.since >= 0.1 and rank not in run.dead else ""
    if call is not None:
        parts.append(f"in {_call(call)}{_among(call)}{lasted}")
        missing = run.missing(call) if call.peer is None else []
        if missing:
            parts.append(f"{_ranks(missing)} had not {'done its part' if call.op == SAVE else 'come'}")
    else:
        after = f", the last was {_call(record.call)}" if record.call else ""
        parts.append(f"in no call to others{lasted}{after}")
    return "; ".join(parts)


def _kind(run: _Run, rank: int) -> str:
    """What ranks have in common that are shown in one line."""
    if rank not in run.at:
        return "no record"
    record, call = run.at[rank], run.waits(rank)
    return repr((_where(record), call and (call.op, call.number, call.axis, call.peer is None), record.ended))


def _place(run: _Run, rank: int) -> str:
    """Where a lost rank was, for the first line."""
    if rank not in run.at:
        return "before it wrote down where it was"
    call = run.waits(rank)
    return _where(run.at[rank]) + (f", in {_call(call)}" if call else "")


def _where(record: Record) -> str:
    """The step and what it was in of it."""
    if record.step is None:
        parts = ["at the end of the run" if record.at_the_end else "at the start of the run"]
        parts += [record.phase] if record.phase != "setup" else []
    else:
        parts = [f"in step {record.step}", "between phases" if record.phase == "setup" else record.phase]
    parts += [f"layer {record.layer}"] if record.layer is not None else []
    parts += [f"micro-batch {record.micro_batch}"] if record.micro_batch is not None else []
    if record.saving is not None:
        doing = "writing its part of" if record.writing else "saving"
        parts += [f"{doing} the checkpoint after {record.saving} steps"]
    return ", ".join(parts)


def _call(call: LastCall) -> str:
    """A call by name: "all_reduce 17 over dp"."""
    peer = "" if call.peer is None else f" {'from' if call.op == 'receive' else 'to'} rank {call.peer}"
    return f"{call.op} {call.number}{peer} over {call.axis}"


def _among(call: LastCall) -> str:
    return "" if call.peer is not None else f" among {_ranks(call.ranks)}"


def _host(run: _Run, rank: int) -> str:
    """Where it helps, the machine."""
    hosts = {record.host for record in run.at.values()}
    return f" on {run.at[rank].host}" if rank in run.at and len(hosts) > 1 else ""


def _it(ranks: Sequence[int], rank: int) -> str:
    return "it" if len(ranks) == 1 else f"rank {rank}"


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1 and 3", "ranks 0 to 7"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = list(map(str, ranks[:SHOWN]))
    if rest := len(ranks) - len(shown):
        return f"ranks {', '.join(shown)} and {rest} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
