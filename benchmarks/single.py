"""How fast and how large is shoal's decoder on one process, next to the same model in plain torch modules?

Both take training steps (forward, loss, backward, fused AdamW) on the same tokens from the same weights, in turns, so
that whatever else the machine does meets both; medians are compared. Peak memory is that of a process of its own each.

    python benchmarks/single.py                          # 5 million parameters, 8 x 256 tokens, float32, eager
    python benchmarks/single.py --vocab 8192 --compile   # a vocabulary as tokenizers have, eager and torch.compile
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.spec.inventory import parameter_count
from shoal.spec.model import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class PlainBlock(nn.Module):
    """A Llama block as a textbook writes it: one linear layer per matrix, nothing fused by hand."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        h, f, d = spec.hidden, spec.ffn, spec.head_size
        self.head_size = d
        self.attention_norm = nn.RMSNorm(h, eps=spec.norm_eps)
        self.q = nn.Linear(h, spec.heads * d, bias=False)
        self.k = nn.Linear(h, spec.kv_heads * d, bias=False)
        self.v = nn.Linear(h, spec.kv_heads * d, bias=False)
        self.out = nn.Linear(spec.heads * d, h, bias=False)
        self.mlp_norm = nn.RMSNorm(h, eps=spec.norm_eps)
        self.gate = nn.Linear(h, f, bias=False)
        self.up = nn.Linear(h, f, bias=False)
        self.down = nn.Linear(f, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (linear(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Plain(nn.Module):
    """Embedding, blocks, norm, head, and cross-entropy over whole logits; the rotary tables are computed once."""

    def __init__(self, spec: ModelSpec, sequence: int):
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab, spec.hidden)
        self.blocks = nn.ModuleList(PlainBlock(spec) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        rates = spec.rope.theta ** -(torch.arange(0, spec.head_size, 2) / spec.head_size)
        angles = torch.outer(torch.arange(sequence), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def copy_weights(source: Decoder, spec: ModelSpec, target: Plain) -> None:
    """Gives the plain model the decoder's weights, so that both train the same model."""
    heads = [spec.heads * spec.head_size, *[spec.kv_heads * spec.head_size] * 2]
    state = {}
    for name, weight in source.state_dict().items():
        if name.endswith("attention.qkv.weight"):
            parts = zip("qkv", weight.split(heads), strict=True)
            state |= {name.replace("attention.qkv", part): value for part, value in parts}
        elif name.endswith("mlp.gate_up.weight"):
            parts = zip(("gate", "up"), weight.chunk(2), strict=True)
            state |= {name.replace("mlp.gate_up", part): value for part, value in parts}
        else:
            state[name.replace("attention.out", "out").replace("mlp.down", "down")] = weight
    target.load_state_dict(state, strict=False)


def trainer(kind: str, spec: ModelSpec, args: argparse.Namespace, compiled: bool) -> Callable[[], float]:
    """A function that takes one training step of "shoal" or "plain" and returns its mean loss."""
    dtype = DTYPES[args.dtype]
    random = torch.Generator().manual_seed(0)
    text = torch.randint(spec.vocab, (args.batch, args.sequence + 1), generator=random)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    model: nn.Module = Decoder(spec, dtype)
    initialise(model, spec, seed=0)
    loss_of: Callable[[], Tensor]
    if kind == "plain":
        decoder, model = model, Plain(spec, args.sequence).to(dtype)
        copy_weights(decoder, spec, model)
        run = torch.compile(model) if compiled else model
        loss_of = lambda: run(tokens, targets)  # noqa: E731
    else:
        if compiled:
            model.compile_blocks()
        loss_of = lambda: model.loss(tokens, targets) / targets.numel()  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def compare(spec: ModelSpec, args: argparse.Namespace, compiled: bool) -> dict:
    """Medians of both over interleaved rounds, their ratio (above 1: shoal is faster) and their losses."""
    steps = {kind: trainer(kind, spec, args, compiled) for kind in ("shoal", "plain")}
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    losses: dict[str, list[float]] = {kind: [] for kind in steps}
    for round_ in range(args.warmup + args.rounds):
        for kind in steps if round_ % 2 else reversed(steps):
            started = time.perf_counter()
            losses[kind].append(steps[kind]())
            times[kind].append(time.perf_counter() - started)
    seconds = {kind: statistics.median(taken[args.warmup :]) for kind, taken in times.items()}
    ratios = [plain / shoal for shoal, plain in zip(*(times[kind][args.warmup :] for kind in times), strict=True)]
    return {
        "mode": "compiled" if compiled else "eager",
        "seconds": seconds,
        "tokens_per_s": {kind: args.batch * args.sequence / taken for kind, taken in seconds.items()},
        "ratio": statistics.median(ratios),
        "loss_difference": max(abs(a - b) for a, b in zip(*losses.values(), strict=True)),
    }


def measure_memory(kind: str, spec: ModelSpec, args: argparse.Namespace) -> None:
    """Prints the peak memory in bytes that three eager steps need beyond a process that has imported torch."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = trainer(kind, spec, args, compiled=False)
    for _ in range(3):
        step()
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def peak_memory(kind: str) -> int:
    """Peak memory of three steps, measured in a process of its own with this one's arguments."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", kind]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("hidden", 256), ("heads", 4), ("kv-heads", 4), ("vocab", 257)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("batch", 8), ("sequence", 256), ("rounds", 15), ("warmup", 3), ("threads", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--compile", action="store_true", help="also with torch.compile")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    parser.add_argument("--memory-of", choices=("shoal", "plain"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    spec = ModelSpec(layers=args.layers, hidden=args.hidden, heads=args.heads, kv_heads=args.kv_heads, vocab=args.vocab)
    if args.memory_of:
        measure_memory(args.memory_of, spec, args)
        return
    memory = {kind: peak_memory(kind) for kind in ("shoal", "plain")}
    results = [compare(spec, args, compiled) for compiled in ((False, True) if args.compile else (False,))]
    if args.json:
        print(json.dumps({"parameters": parameter_count(spec), "peak_memory": memory, "results": results}))
        return
    print(
        f"{parameter_count(spec) / 1e6:.1f} million parameters, {args.batch} x {args.sequence} tokens, {args.dtype}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"{'':10}{'shoal':>14}{'plain torch':>14}   shoal is")
    for result in results:
        shoal, plain = (result["tokens_per_s"][kind] for kind in ("shoal", "plain"))
        print(f"{result['mode']:10}{shoal:8.0f} tok/s{plain:8.0f} tok/s   {result['ratio']:.3f} times as fast")
    shoal, plain = (memory[kind] / 2**20 for kind in ("shoal", "plain"))
    print(f"{'memory':10}{shoal:10.0f} MiB{plain:10.0f} MiB   {shoal / plain:.3f} of the size")


if __name__ == "__main__":
    main()
