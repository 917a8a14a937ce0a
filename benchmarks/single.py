"""How fast and how large is shoal's decoder on one process, next to the same model in plain torch modules?

Both take training steps (forward, loss, backward, fused AdamW) on the same tokens from the same weights. Each runs in a
process of its own, as in real life, where neither inherits the other's heap; they step in turns, so that whatever else
the machine does meets both, and the median over rounds is compared.

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


def trainer(kind: str, compiled: bool, spec: ModelSpec, args: argparse.Namespace) -> Callable[[], float]:
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


def work(kind: str, mode: str, spec: ModelSpec, args: argparse.Namespace) -> None:
    """The child's side: one step for every line read; prints its seconds, its loss and the peak memory so far, bytes.

    Memory counts from before the model is built, so torch itself is not in it, but a compiler that runs is.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = trainer(kind, mode == "compiled", spec, args)
    for _ in sys.stdin:
        started = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - started
        memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        print(json.dumps([seconds, loss, memory]), flush=True)


class Child:
    """A process that trains one kind of model, step by step on request."""

    def __init__(self, kind: str, mode: str):
        command = [sys.executable, __file__, *sys.argv[1:], "--work", kind, mode]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> tuple[float, float, int]:
        """Seconds, loss and peak memory in bytes."""
        assert self.process.stdin and self.process.stdout
        print(file=self.process.stdin, flush=True)
        seconds, loss, memory = json.loads(self.process.stdout.readline())
        return seconds, loss, memory

    def end(self) -> None:
        self.process.communicate()


def compare(mode: str, args: argparse.Namespace) -> dict:
    """Both kinds over interleaved rounds. ratio: median over rounds of plain's time over shoal's; above 1, shoal is faster."""
    children = {kind: Child(kind, mode) for kind in ("shoal", "plain")}
    taken: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in children}
    for turn in range(args.warmup + args.rounds):
        for kind in children if turn % 2 else reversed(children):
            taken[kind].append(children[kind].step())
    for child in children.values():
        child.end()
    timed = {kind: [seconds for seconds, _, _ in steps[args.warmup :]] for kind, steps in taken.items()}
    losses = [[loss for _, loss, _ in steps] for steps in taken.values()]
    return {
        "mode": mode,
        "tokens_per_s": {kind: args.batch * args.sequence / statistics.median(timed[kind]) for kind in timed},
        "ratio": statistics.median(b / a for a, b in zip(timed["shoal"], timed["plain"], strict=True)),
        "peak_memory": {kind: steps[-1][2] for kind, steps in taken.items()},
        "loss_difference": max(abs(a - b) for a, b in zip(*losses, strict=True)),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("hidden", 256), ("heads", 4), ("kv-heads", 4), ("vocab", 257)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("batch", 8), ("sequence", 256), ("rounds", 15), ("warmup", 3), ("threads", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--compile", action="store_true", help="also with torch.compile")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    spec = ModelSpec(layers=args.layers, hidden=args.hidden, heads=args.heads, kv_heads=args.kv_heads, vocab=args.vocab)
    if args.work:
        work(*args.work, spec, args)
        return
    results = [compare(mode, args) for mode in (("eager", "compiled") if args.compile else ("eager",))]
    if args.json:
        print(json.dumps({"parameters": parameter_count(spec), "results": results}))
        return
    print(
        f"{parameter_count(spec) / 1e6:.1f} million parameters, {args.batch} x {args.sequence} tokens, {args.dtype}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"{'':10}{'shoal':>12}{'plain torch':>14}")
    for result in results:
        shoal, plain = (result["tokens_per_s"][kind] for kind in ("shoal", "plain"))
        print(
            f"{result['mode']:10}{shoal:12,.0f}{plain:14,.0f}  tokens/s; shoal is {result['ratio']:.3f} times as fast"
        )
        shoal, plain = (result["peak_memory"][kind] / 2**20 for kind in ("shoal", "plain"))
        print(f"{'':10}{shoal:12,.0f}{plain:14,.0f}  MiB at most; shoal takes {shoal / plain:.3f} of plain's")


if __name__ == "__main__":
    main()
