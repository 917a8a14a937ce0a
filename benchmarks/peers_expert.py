"""Expert parallelism on 2 ranks of this machine: against replicated experts, and against dispatch as a first version has it.

The peer is the same decoder in plain torch modules under DDP. Its experts lie apart as shoal's do; for each expert of a
rank in turn the ranks exchange the tokens that chose it, counts and then rows, compute, and send the results back, each
with torch's differentiable all-to-all. All start from the same weights and train on the same tokens with torch's fused
AdamW, without auxiliary losses and without drops.

    python benchmarks/peers_expert.py [--rounds 15] [--experts 32] [--top_k 4] [--ffn 128] [--json]
"""

from harness import Contender, main
from training import adamw, averaged_step, job_of, trainer_of

RANKS, SEQUENCE, BATCH = 2, 256, 8
TOKENS = SEQUENCE * BATCH
REPLICATED, PEER, REPLICATED_PEER = "shoal dp=2", "torch, all-to-all per expert", "torch DDP, replicated experts"
CONTENDERS = {
    REPLICATED_PEER: Contender(RANKS, TOKENS),
    REPLICATED: Contender(RANKS, TOKENS, (REPLICATED_PEER,)),
    PEER: Contender(RANKS, TOKENS),
    "shoal ep=2": Contender(RANKS, TOKENS, (REPLICATED, PEER)),
    "shoal ep=2,dedup": Contender(RANKS, TOKENS, ("shoal ep=2", PEER)),
}


def job(layout, options):
    from shoal.spec.model import ModelSpec
    from shoal.spec.moe import MoESpec

    moe = MoESpec(experts=options.experts, top_k=options.top_k, expert_ffn=options.ffn, normalised=options.top_k > 1)
    model = ModelSpec(layers=4, hidden=256, heads=4, vocab=257, moe=moe)
    return job_of(model, layout, SEQUENCE, BATCH)


def stepper(name, rank, options):
    if name.startswith("shoal"):
        asked = job(name.removeprefix("shoal "), options)
        trainer = trainer_of(asked, rank)
        return lambda step: trainer.step(step).loss
    return peer(rank, job("dp=2", options), apart=name == PEER)


def peer(rank, asked, apart):
    """The plain decoder; apart: each rank has half of the experts, else all."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.nn.functional import all_to_all_single
    from torch.nn.parallel import DistributedDataParallel

    from shoal.model.decoder import Decoder
    from shoal.model.init import initialise
    from shoal.verify.trial import MadeUpBatches
    from single import Plain

    moe, hidden = asked.model.moe, asked.model.hidden
    here = moe.experts // RANKS if apart else moe.experts

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(hidden, moe.expert_ffn, bias=False)
            self.up = nn.Linear(hidden, moe.expert_ffn, bias=False)
            self.down = nn.Linear(moe.expert_ffn, hidden, bias=False)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(hidden, moe.experts, bias=False)
            self.experts = nn.ModuleList(Expert() for _ in range(here))

        def forward(self, x):
            tokens = x.flatten(0, 1)
            weights, chosen = F.softmax(self.router(tokens), dim=-1).topk(moe.top_k, dim=-1)
            if moe.normalised:
                weights = weights / weights.sum(-1, keepdim=True)
            y = torch.zeros_like(tokens)
            for number, expert in enumerate(self.experts):
                rows = [torch.where(chosen == r * here + number) for r in range(RANKS if apart else 1)]
                token = torch.cat([found[0] for found in rows])
                place = torch.cat([found[1] for found in rows])
                if apart:
                    answers = exchanged(tokens[token], expert, [len(found[0]) for found in rows])
                else:
                    answers = expert(tokens[token])
                y = y.index_add(0, token, answers * weights[token, place, None])
            return y.view(x.shape)

    def exchanged(rows, expert, counts):
        leaving = torch.tensor(counts)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving)
        arriving = arriving.tolist()
        received = all_to_all_single(rows.new_empty(sum(arriving), hidden), rows, arriving, counts)
        return all_to_all_single(torch.empty_like(rows), expert(received), counts, arriving)

    whole = Decoder(asked.model)
    initialise(whole, asked.model, asked.train.seed)
    model = Plain(asked.model, SEQUENCE)
    with torch.no_grad():
        model.embedding.weight.copy_(whole.embedding.weight)
        model.head.weight.copy_(whole.head.weight)
        for theirs, ours in zip(model.blocks, whole.blocks.values(), strict=True):
            for linear, part in zip((theirs.q, theirs.k, theirs.v), ours.attention.qkv.weight.chunk(3), strict=True):
                linear.weight.copy_(part)
            theirs.out.weight.copy_(ours.attention.out.weight)
            del theirs.gate, theirs.up, theirs.down
            theirs.mlp = Mixture()
            theirs.mlp.router.weight.copy_(ours.mlp.router.weight)
            for number, expert in enumerate(theirs.mlp.experts):
                which = number + rank * here if apart else number
                for linear, part in zip(
                    (expert.gate, expert.up), ours.mlp.experts.gate_up[which].chunk(2), strict=True
                ):
                    linear.weight.copy_(part)
                expert.down.weight.copy_(ours.mlp.experts.down[which])
            theirs.forward = block_forward.__get__(theirs)
    own = [parameter for name, parameter in model.named_parameters() if apart and ".experts." in name]
    if apart:
        names = {id(parameter) for parameter in own}
        ignored = [name for name, parameter in model.named_parameters() if id(parameter) in names]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(model, asked.train)

    def loss_of(tokens, targets):
        return parallel(tokens, targets) * (targets >= 0).sum()  # the plain model has the mean

    def corrected():
        for parameter in own:  # which have the gradients of both ranks' tokens
            parameter.grad /= RANKS

    return averaged_step(MadeUpBatches(asked, rank), loss_of, optimizer, RANKS, corrected)


def block_forward(self, x, cos, sin):
    """A plain block's forward with its mixture in the MLP's place."""
    import torch.nn.functional as F

    from single import turned

    y = self.attention_norm(x)
    q, k, v = (linear(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for linear in (self.q, self.k, self.v))
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + self.out(y.transpose(1, 2).flatten(2))
    return x + self.mlp(self.mlp_norm(x))


def options(parser):
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top_k", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=128, help="width of an expert")


if __name__ == "__main__":
    main(__doc__, CONTENDERS, stepper, options)
