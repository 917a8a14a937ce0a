"""The independent truth for mixtures of experts: one token after the other, one expert after the other, plain torch."""

import math

import torch

from shoal.spec.moe import MoESpec


def weights_of(spec: MoESpec, hidden: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float64 weights of one layer, whole, by the names of the layer; the routing bias among them."""
    random = torch.Generator().manual_seed(seed)
    e, f, fs = spec.experts, spec.expert_ffn, spec.shared_experts * spec.shared_ffn
    shapes = {"router.weight": (e, hidden), "experts.gate_up": (e, 2 * f, hidden), "experts.down": (e, hidden, f)}
    if fs:
        shapes |= {"shared.gate_up.weight": (2 * fs, hidden), "shared.down.weight": (hidden, fs)}
    if spec.shared_gate:
        shapes["shared_gate.weight"] = (1, hidden)
    if spec.bias:
        shapes["router.bias"] = (e,)
    scale = {"router.bias": 0.1, "router.weight": 0.5}
    return {
        name: torch.randn(shape, generator=random, dtype=torch.float64) * scale.get(name, 0.3)
        for name, shape in shapes.items()
    }


def token_by_token(spec: MoESpec, weights: dict, x: torch.Tensor, counted: torch.Tensor | None = None):
    """(y, auxiliary loss, chosen experts) of x (b, s, h); chosen[b][s] lists experts, None where one was full."""
    scopes = [[(i, j) for j in range(x.shape[1])] for i in range(len(x))]
    if spec.balance == "micro_batch":
        scopes = [[token for scope in scopes for token in scope]]
    rows, chosen, auxiliary = {}, {}, x.new_zeros(())
    for scope in scopes:
        n, used, taken = len(scope), [0] * spec.experts, [0] * spec.experts
        shares, squares = [], []
        for token in scope:
            logits = weights["router.weight"] @ x[token]
            scores = torch.softmax(logits, 0) if spec.router == "softmax" else torch.sigmoid(logits)
            experts = choose(spec, scores, weights.get("router.bias"))
            each = [scores[e] for e in experts]
            if spec.normalised:
                each = [weight / sum(each) for weight in each]
            y = shared(spec, weights, x[token])
            chosen[token] = []
            for expert, weight in zip(experts, each, strict=True):
                used[expert] += 1
                full = spec.capacity and taken[expert] >= math.ceil(spec.capacity * n * spec.top_k / spec.experts)
                chosen[token].append(None if full else expert)
                if not full:
                    taken[expert] += 1
                    gate_up, down = weights["experts.gate_up"][expert], weights["experts.down"][expert]
                    y = y + spec.scaling * weight * swiglu(x[token], gate_up, down)
            rows[token] = y
            shares.append(scores / scores.sum())
            squares.append(torch.logsumexp(logits, 0) ** 2)
        mean_share = sum(shares) / n
        balance = spec.experts * sum(used[e] / (spec.top_k * n) * mean_share[e] for e in range(spec.experts))
        valid = n if counted is None else sum(bool(counted[token]) for token in scope)
        auxiliary = auxiliary + valid * (spec.aux_loss * balance + spec.z_loss * sum(squares) / n)
    y = torch.stack([torch.stack([rows[i, j] for j in range(x.shape[1])]) for i in range(len(x))])
    return y, auxiliary, [[chosen[i, j] for j in range(x.shape[1])] for i in range(len(x))]


def choose(spec: MoESpec, scores: torch.Tensor, bias: torch.Tensor | None) -> list[int]:
    """The experts of one token, by sorting plain numbers."""
    value = (scores if bias is None else scores + bias).tolist()
    size = spec.experts // spec.groups
    groups = [sorted(value[g * size : (g + 1) * size], reverse=True) for g in range(spec.groups)]
    worth = [group[0] if spec.group_score == "max" else sum(group[:2]) for group in groups]
    best = sorted(range(spec.groups), key=lambda g: -worth[g])[: spec.groups_kept]
    return sorted((e for e in range(spec.experts) if e // size in best), key=lambda e: -value[e])[: spec.top_k]


def shared(spec: MoESpec, weights: dict, x: torch.Tensor) -> torch.Tensor:
    """What the shared experts make of one token."""
    if not spec.shared_experts:
        return torch.zeros_like(x)
    y = swiglu(x, weights["shared.gate_up.weight"], weights["shared.down.weight"])
    return torch.sigmoid(weights["shared_gate.weight"][0] @ x) * y if spec.shared_gate else y


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (gate * torch.sigmoid(gate) * up)
