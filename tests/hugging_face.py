"""Decoders held against Hugging Face's: their tensors under our names, and one comparison of logits, loss and gradients."""

import pytest
import torch
from torch import Tensor, nn

from shoal.model.decoder import Decoder
from shoal.spec.model import ModelSpec

GPT2 = {
    "transformer.wte": "embedding",
    "transformer.wpe.weight": "embedding.positions",
    "transformer.h": "blocks",
    "transformer.ln_f": "head.norm",
    "ln_1": "attention_norm",
    "ln_2": "mlp_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
LLAMA = {
    "model.embed_tokens": "embedding",
    "model.layers": "blocks",
    "model.norm": "head.norm",
    "lm_head": "head",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn": "attention",
    "o_proj": "out",
    "mlp.gate.weight": "mlp.router.weight",
    "gate.e_score_correction_bias": "router.bias",
    "block_sparse_moe": "mlp",
    "experts.gate_up_proj": "experts.gate_up",
    "experts.down_proj": "experts.down",
    "shared_expert_gate": "shared_gate",
    "shared_experts": "shared",
    "shared_expert.": "shared.",
    "down_proj": "down",
}
CONVOLUTIONS = (
    "c_attn.weight",
    "c_proj.weight",
    "c_fc.weight",
)  # of GPT-2: (in, out), where a linear layer has (out, in)


def as_ours(theirs: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Their tensors by our names, with q | k | v and gate | up in one."""
    if spec.positions == "learned":
        return {_renamed(name, GPT2): x.t() if name.endswith(CONVOLUTIONS) else x for name, x in theirs.items()}
    ours = {_renamed(name, LLAMA): tensor for name, tensor in theirs.items()}
    for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv"), (("gate_proj", "up_proj"), "gate_up")):
        for name in [name for name in ours if f".{parts[0]}." in name]:
            pieces = [ours.pop(name.replace(parts[0], part)) for part in parts]
            ours[name.replace(parts[0], whole)] = torch.cat(pieces)
    return ours


def _renamed(name: str, names: dict[str, str]) -> str:
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


def shaken(module: nn.Module) -> nn.Module:
    """Random values everywhere, norms and biases included, so that nothing can be left out unseen."""
    random = torch.Generator().manual_seed(3)
    module = module.double()
    with torch.no_grad():
        for value in (*module.parameters(), *routing_biases(module).values()):
            noise = torch.randn(value.shape, generator=random, dtype=torch.float64)
            value.copy_(1 + 0.3 * noise if value.ndim == 1 else 0.2 * noise)
    return module


def routing_biases(module: nn.Module) -> dict[str, Tensor]:
    """What moves the choice of experts and is not trained."""
    return {name: buffer for name, buffer in module.named_buffers() if "e_score_correction_bias" in name}


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The distance of two tensors over the length of theirs."""
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def check_equal(spec: ModelSpec, theirs: nn.Module, tolerance: float) -> None:
    """Holds logits, loss and the gradient of every parameter against theirs, in float64 with random weights."""
    shaken(theirs)
    ours = Decoder(spec, torch.float64)
    ours.load_state_dict(as_ours(dict(theirs.named_parameters()) | routing_biases(theirs), spec), strict=True)
    text = torch.randint(spec.vocab, (3, 41), generator=torch.Generator().manual_seed(4))
    tokens, targets = text[:, :-1], text[:, 1:]

    their_logits = theirs(input_ids=tokens).logits
    their_loss = nn.functional.cross_entropy(their_logits.flatten(0, 1), targets.flatten(), reduction="sum")
    their_loss.backward()
    loss = ours.loss(tokens, targets)
    loss.backward()

    assert relative(ours(tokens), their_logits) < tolerance
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), rel=tolerance)
    gradients = as_ours({name: parameter.grad for name, parameter in theirs.named_parameters()}, spec)
    errors = {name: relative(parameter.grad, gradients.pop(name)) for name, parameter in ours.named_parameters()}
    assert {name: error for name, error in errors.items() if not error < tolerance} == {}
    assert not gradients
