"""The independent truth for training mixtures of experts: a decoder of plain torch operations around `moe_reference`'s loop.

It knows shoal's names of weights, their first values and the tokens of a trial, and nothing of shoal's layers, losses,
statistics, layouts and optimizer.
"""

from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F

from moe_reference import choose, swiglu, token_by_token
from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.spec.job import Job
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec
from shoal.train.schedule import learning_rate
from shoal.verify.compare import Record
from shoal.verify.trial import MadeUpBatches


def loss_of(model: ModelSpec, weights: dict, tokens: torch.Tensor, targets: torch.Tensor):
    """(sum of cross-entropies, sum of auxiliary losses, by layer how often each expert was chosen, dropped choices)."""
    x = weights["embedding.weight"][tokens]
    auxiliary, loads, dropped = x.new_zeros(()), {}, 0
    for layer in range(model.layers):
        own = {name.removeprefix(f"blocks.{layer}."): w for name, w in weights.items() if f"blocks.{layer}." in name}
        x = x + attention(model, own, norm(model, x, own["attention_norm.weight"]))
        normed = norm(model, x, own["mlp_norm.weight"])
        mlp = {name.removeprefix("mlp."): weight for name, weight in own.items()}
        if not (model.moe and model.moe.at(layer)):
            flat = [swiglu(row, mlp["gate_up.weight"], mlp["down.weight"]) for row in normed.flatten(0, 1)]
            x = x + torch.stack(flat).view(x.shape)
            continue
        y, share, chosen = token_by_token(model.moe, mlp, normed, targets >= 0)
        x, auxiliary = x + y, auxiliary + share
        loads[layer] = choices(model.moe, mlp, normed.detach())
        dropped += sum(expert is None for row in chosen for token in row for expert in token)
    logits = norm(model, x, weights["head.norm.weight"]) @ weights["head.weight"].t()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return loss, auxiliary, loads, dropped


def norm(model, x, weight):
    return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weight


def attention(model, weights, x):
    """Causal, grouped heads, rope in half-split pairs, written out."""
    b, s, _ = x.shape
    a, g, d = model.heads, model.kv_heads, model.head_size
    q, k, v = (x @ weights["attention.qkv.weight"].t()).view(b, s, a + 2 * g, d).split((a, g, g), dim=2)
    angles = torch.arange(s, dtype=x.dtype)[:, None] * model.rope.theta ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turned(x):
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    k, v = (each.repeat_interleave(a // g, 2) for each in (turned(k), v))
    scores = torch.einsum("bqhd,bkhd->bhqk", turned(q), k) / d**0.5
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf)
    y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return y.reshape(b, s, a * d) @ weights["attention.out.weight"].t()


def choices(moe, weights, x):
    """How often each expert is chosen, also where it had no capacity left."""
    used = Counter()
    for row in x.flatten(0, 1):
        logits = weights["router.weight"].detach() @ row
        scores = torch.softmax(logits, 0) if moe.router == "softmax" else torch.sigmoid(logits)
        used.update(choose(moe, scores, weights.get("router.bias")))
    return [used[expert] for expert in range(moe.experts)]


def plain_training(job: Job, steps: int) -> tuple[Record, list[tuple[dict[int, list[int]], int]]]:
    """`steps` steps on one process, and by step the loads by layer and the dropped choices.

    The micro-batches of the job's layout matter only to what is balanced over a micro-batch.
    """
    torch.set_num_threads(1)
    model, train = job.model, job.train
    fresh = Decoder(model, torch.float64)
    initialise(fresh, model, train.seed)
    weights = {name: w.detach().clone().requires_grad_() for name, w in fresh.named_parameters()}
    biases = {name: bias.clone() for name, bias in fresh.named_buffers()}
    groups = [{"params": [w for w in weights.values() if w.dim() > 1], "weight_decay": train.weight_decay}]
    groups.append({"params": [w for w in weights.values() if w.dim() < 2], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, betas=(train.beta1, train.beta2), eps=train.eps, foreach=False)
    losses, norms, gradients, seen = [], [], [], []
    by_micro_batch = model.moe and model.moe.balance == "micro_batch"
    alone = Layout(micro_batches=job.layout.micro_batches if by_micro_batch else 1)
    for step in range(steps):
        batches = MadeUpBatches(Job(model, alone, job.machine, job.data, train), 0).batch(step)
        valid = sum(int((batch.targets >= 0).sum()) for batch in batches)
        optimizer.zero_grad()
        total, loads, dropped = 0.0, Counter(), 0
        for batch in batches:
            tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
            loss, auxiliary, chosen, lost = loss_of(model, weights | biases, tokens, targets)
            ((loss + auxiliary) / valid).backward()
            total += float((loss + auxiliary).detach() / valid)
            loads.update({(layer, e): n for layer, counts in chosen.items() for e, n in enumerate(counts)})
            dropped += lost
        losses.append(total)
        gradients.append({name: w.grad.numpy().copy() for name, w in weights.items()})
        norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), train.clip).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        optimizer.step()
        by_layer = {layer: [loads[layer, e] for e in range(model.moe.experts)] for layer in model.mixtures}
        for name, bias in biases.items():
            counts = np.array(by_layer[int(name.split(".")[1])])
            bias += model.moe.bias_rate * torch.from_numpy(np.sign(counts.mean() - counts))
        seen.append((by_layer, dropped))
    kept = {name: w.detach().numpy() for name, w in weights.items()}
    return Record(losses, norms, gradients, kept, [], {name: bias.numpy() for name, bias in biases.items()}), seen
