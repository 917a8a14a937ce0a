"""Text from a model, token by token, each from a forward over the whole context: for a look, not for serving."""

from collections.abc import Sequence

import torch

from shoal.model.decoder import Decoder


@torch.no_grad()
def sample(model: Decoder, prompt: Sequence[int], count: int, temperature: float = 1.0, seed: int = 0) -> list[int]:
    """`count` token ids that continue `prompt` (one id at least); temperature 0 takes the most probable each time.

    The context is the last positions_max tokens. The same seed draws the same text on every device.
    """
    assert prompt, "a model needs one token at least to continue from"
    random = torch.Generator().manual_seed(seed)
    ids, device = list(prompt), next(model.parameters()).device
    for _ in range(count):
        context = torch.tensor([ids[-model.spec.positions_max :]], device=device)
        scores = model.next_logits(context)[0].double().cpu()
        if temperature:
            chosen = torch.multinomial((scores / temperature).softmax(dim=-1), 1, generator=random)
        else:
            chosen = scores.argmax()
        ids.append(int(chosen))
    return ids[len(prompt) :]
