"""What the fork server loads once, so that ranks start in milliseconds: torch, and what torch.distributed loads late.

One thread per process here: the ranks share the machine's cores, and forking a process that has threads is not safe.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts OpenMP; a rank may raise it with torch.set_num_threads

import torch
import torch._dynamo  # what a function kept out of compilation asks for
import torch.autograd
import torch.distributed
import torch.distributed.distributed_c10d
import torch.distributed.nn

torch.set_num_threads(1)
