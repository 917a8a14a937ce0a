"""What a person sees: a bar that fits a terminal, and few plain lines without control characters elsewhere."""

import io
import itertools
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from shoal.spec.job import Job, TrainSpec
from shoal.spec.machine import Machine
from shoal.train.display import Display


def line(step, **more):
    return {"step": step, "loss": 2.5, "tokens_per_s": 1234.5, "utilisation": None, "skipped": 0, **more}


def shown(job, stream, **last):
    with Display(job, stream) as display:
        for step in range(job.train.steps - 1):
            display.step(line(step))
        display.step(line(job.train.steps - 1, **last))


def plain(job, **last):
    stream = io.StringIO()
    shown(job, stream, **last)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", stream.getvalue()), "control characters"
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("force", [None, "1"])
def test_plain_lines_where_there_is_no_terminal(monkeypatch, force):
    """Also where FORCE_COLOR, as set by many a CI, makes rich take a file for a terminal."""
    if force:
        monkeypatch.setenv("FORCE_COLOR", force)
    about, first, *others, last = plain(Job(), eval_loss=3.0, skipped=2)
    assert about == "utilisation is unknown: no machine.name with a known peak; machine.peak_tflops sets one"
    assert first.startswith("step 1/200  loss 2.500  1,234 tokens/s  utilisation unknown  ")
    assert last == "step 200/200  loss 2.500  1,234 tokens/s  utilisation unknown  held out 3.000  2 skipped  0 s left"
    assert 15 <= len(others) <= 25


@pytest.mark.parametrize("steps", [1, 2, 19, 39, 41, 1000, 99_999])
@pytest.mark.parametrize("log_every", [1, 7, 1000])
def test_a_run_of_any_length_takes_few_lines_and_shows_its_first_and_last(steps, log_every):
    lines = plain(Job(train=TrainSpec(steps=steps, log_every=log_every)))[1:]
    done = [int(re.match(r"step (\d+)/", text)[1]) for text in lines]
    assert done[0] == 1 and done[-1] == steps and len(done) <= 22
    assert all(later - one >= log_every for one, later in itertools.pairwise(done[1:-1]))


def test_every_evaluation_is_shown():
    stream = io.StringIO()
    with Display(Job(), stream) as display:
        for step in range(100):
            display.step(line(step, **({"eval_loss": 3.0} if step in (12, 37) else {})))
    assert [text[:11] for text in stream.getvalue().splitlines() if "held out" in text] == [
        "step 13/200",
        "step 38/200",
    ]


def test_utilisation_is_told_against_a_named_peak():
    known = replace(Job(train=TrainSpec(steps=1)), machine=Machine(name="h100"))
    (only,) = plain(known, utilisation=0.234)
    assert "  23.4% of h100's 67 TFLOP/s float32  " in only


def test_ranks_that_are_not_active_show_nothing():
    stream = io.StringIO()
    with Display(Job(), stream, active=False) as display:
        display.step(line(0))
        display.note("a note")
    assert stream.getvalue() == ""


class Terminal:
    """A pseudo-terminal: `stream` is a run's side of it, `seen` what came out at the other side."""

    def __init__(self):
        self.screen, run = pty.openpty()
        self.stream = os.fdopen(run, "w")

    def seen(self):
        self.stream.close()
        content = b""
        try:
            while block := os.read(self.screen, 65536):
                content += block
        except OSError:  # how Linux tells the end
            pass
        os.close(self.screen)
        return content.decode()


def test_a_terminal_shows_bar_figures_and_notes_on_eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Display(Job(train=TrainSpec(steps=10, log_every=4)), terminal.stream) as display:
        for step in range(10):
            display.step(line(step, skipped=3))
        display.note("a [red]note")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.seen()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 88  # the explanation of `unknown` is printed once, whole
    assert "a [red]note" in lines
    bar = [text for text in lines if text.startswith("training")][-1]
    assert "━━━━━━━━━━" in bar and "10/10" in bar and bar.endswith("left")
    assert "loss 2.500  1,234 tokens/s  utilisation unknown  3 skipped" in lines


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    shown(Job(train=TrainSpec(steps=3)), terminal.stream)
    seen = terminal.seen()
    assert "\x1b" not in seen and "step 3/3" in seen


def test_display_and_metrics_need_no_torch():
    program = (
        "import sys, shoal.train.display, shoal.train.metrics, shoal.train.data.corpus, shoal.train.data.batches\n"
    )
    program += "print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_peak_memory_is_this_process_own_in_bytes_and_stays_when_memory_is_freed():
    """Started by a process that holds 300 MB, whose peak Linux hands on through exec as the child's ru_maxrss."""
    program = (
        "from shoal.train.display import peak_memory\n"
        "before = peak_memory('cpu')\n"
        "block = bytearray(b'x') * 200_000_000\n"
        "del block\n"
        "print(before, peak_memory('cpu') - before)\n"
    )
    held = bytearray(b"x") * 300_000_000
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    before, grown = map(int, printed.split())
    assert 5_000_000 < before < 200_000_000 < len(held) and 190_000_000 < grown < 250_000_000
