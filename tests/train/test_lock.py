"""The lock keeps others out while its holder lives, and no longer."""

import os
import signal
import subprocess
import sys
import time

from shoal.train.data.lock import locked

HOLD = "import sys, time\nfrom pathlib import Path\nfrom shoal.train.data.lock import locked\n" + (
    "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
)
COUNT = "import sys\nfrom pathlib import Path\nfrom shoal.train.data.lock import locked\n" + (
    "lock, counter = map(Path, sys.argv[1:])\n"
    "for _ in range(200):\n"
    "    with locked(lock):\n"
    "        counter.write_text(str(int(counter.read_text()) + 1))\n"
)


def test_no_two_hold_it_at_once(tmp_path):
    """Four processes count in one file without a lock of its own; each lost turn would be missing."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    arguments = [sys.executable, "-c", COUNT, str(tmp_path / "lock"), str(counter)]
    started = [subprocess.Popen(arguments) for _ in range(4)]
    assert [process.wait(timeout=60) for process in started] == [0] * 4
    assert counter.read_text() == "800"
    assert list(tmp_path.iterdir()) == [counter]


def test_a_killed_holder_lets_go(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    started = time.monotonic()
    with locked(tmp_path / "lock"):
        assert time.monotonic() - started < 5
    assert list(tmp_path.iterdir()) == []
