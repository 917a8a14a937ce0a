"""`shoal`, with ranks that SIGKILL ends: `torchrun ... killed_rank.py KILLS ARGUMENTS-OF-SHOAL`.

KILLS: rank:step of each attempt in turn, as torchrun counts them, such as 0:1,1:7; attempts beyond live. A rank dies when the
step, counted from 0, is computed and nobody else has heard of it. Each attempt's rank 0 says on stderr at which step it began.
"""

import os
import signal
import sys

from shoal.cli.main import main
from shoal.train.trainer import Trainer


def mortal(kills):
    """Trainer.step, up to this attempt's end."""
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    ends = [tuple(map(int, kill.split(":"))) for kill in kills.split(",") if kill]
    whole, begun = Trainer.step, []

    def step(trainer, number, *more):
        if not begun and rank == 0:
            print(f"attempt {attempt} began at step {number}", file=sys.stderr, flush=True)
        begun.append(number)
        result = whole(trainer, number, *more)
        if ends[attempt : attempt + 1] == [(rank, number)]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return step


if __name__ == "__main__":
    Trainer.step = mortal(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
