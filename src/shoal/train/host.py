"""How a training process uses its host's memory."""

import torch

LARGEST = 2**25 - 2**16  # bytes: just below the largest block that glibc can learn to keep (32 MiB)


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, lets the C library keep the blocks that activations free, instead of giving each back to the system.

    glibc maps blocks above a threshold afresh each time, and the system clears every page of them again: a tenth to a
    fifth of a small decoder's step. It raises the threshold to the size of the largest mapped block that was freed, so
    one is freed here (mallopt(3), M_MMAP_THRESHOLD). Other C libraries lose nothing by it.
    """
    if device.type == "cpu":
        block = torch.empty(LARGEST, dtype=torch.uint8)
        del block
