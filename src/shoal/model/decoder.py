"""The decoder: embedding, blocks, norm and head; parameters are named, shaped and ordered as in spec/inventory.py."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shoal.axes.context.run import ContextAttention, View
from shoal.axes.expert.run import MixtureOfExperts
from shoal.axes.pipeline.stage import Stage
from shoal.axes.tensor.run import TensorLayers
from shoal.comm.world import World
from shoal.kernels.dropout import DropoutKey, dropped
from shoal.model.attention import visible
from shoal.model.batch import Batch, Setting
from shoal.model.block import Block
from shoal.model.layers import Layers
from shoal.model.moe import Tokens
from shoal.model.rope import rotation
from shoal.spec.model import ModelSpec
from shoal.spec.moe import MoESpec


class Decoder(nn.Module):
    """A decoder, dense or with mixtures of experts. Its weights are memory as found until `initialise` or a checkpoint fills them.

    layers: this rank's pieces of the layers, by default whole ones; then every rank of their group calls the decoder
    with the same tokens and gets the same loss. crossing: attention across context ranks, which have parts of the
    sequence; None where the sequence is whole. mixture: makes a layer's mixture of experts, by default a whole one.
    stages: the parts of the model that this rank of a pipeline holds, by
    default all; `chunk` runs one of them.

    Everywhere: tokens int64 (b, s); positions int64 (b, s), the place of each token, by default 0 to s - 1; documents
    int64 (b, s), where tokens see only tokens of the same number; dropout None switches dropout off.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layers: Layers | None = None,
        crossing: ContextAttention | None = None,
        stages: Sequence[Stage] | None = None,
        mixture: Callable[[int, MoESpec], MixtureOfExperts] = MixtureOfExperts,
    ):
        super().__init__()
        self.spec = spec
        self.layers = layers or TensorLayers(spec, World.single(device=device).group("tp"))
        self.crossing = crossing
        self.stages = [Stage(range(spec.layers), first=True, last=True)] if stages is None else list(stages)
        first, last = (any(getattr(stage, end) for stage in self.stages) for end in ("first", "last"))
        modes = {layer: stage.mode(layer) for stage in self.stages for layer in stage.layers}
        with torch.device("meta"):  # torch's layers would spend seconds on random weights that are replaced anyway
            self.embedding = self.layers.embedding() if first or (last and spec.tied) else None
            if self.embedding is not None and not first and spec.positions == "learned":
                self.embedding.register_parameter("positions", None)  # only the head's matrix is wanted here
            self.blocks = nn.ModuleDict(
                {
                    str(layer): Block(
                        spec,
                        self.layers,
                        crossing,
                        modes[layer],
                        mixture(spec.hidden, spec.moe) if spec.moe and spec.moe.at(layer) else None,
                    )
                    for layer in sorted(modes)
                }
            )
            self.head = self.layers.head() if last else None
        _give_memory(self, dtype, device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        dropout: DropoutKey | None = None,
    ) -> Tensor:
        """Scores of every next token: (b, s, V) in the model's dtype."""
        return self.run(Batch(tokens, None, positions, documents, dropout))

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        dropout: DropoutKey | None = None,
    ) -> Tensor:
        """Sum of the cross-entropies in nats over targets (b, s) that are not -100; a float32 or float64 scalar.

        Logits never exist whole; 0 with zero gradients when no target counts. Auxiliary losses of experts are no part of
        the value: their backward rides along, from 1, as if they were added; `Batch` has a seed for whoever scales.
        """
        return self.run(Batch(tokens, targets, positions, documents, dropout))

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Scores of the one token that follows each row: (b, V). For a whole model on one rank."""
        (stage,) = self.stages
        assert self.head is not None
        x = self.through(None, Batch(tokens), stage)
        return self.head(x[:, -1], self._tied())

    def units(self) -> list[tuple[str, nn.Module]]:
        """The inventory's units that this rank holds in forward order, each with the module whose parameters it has."""
        units: list[tuple[str, nn.Module | None]] = [("embedding", self.embedding)]
        units += [(f"blocks.{layer}", block) for layer, block in self.blocks.items()]
        units.append(("head", self.head))
        return [(name, module) for name, module in units if module is not None]

    def chunk(self, number: int) -> "Chunk":
        """The stage number `number` of those that this rank holds, as a pipeline runs it."""
        return Chunk(self, self.stages[number])

    def compile_blocks(self) -> None:
        """Compiles each block and the last norm in place; equal blocks share one compilation, and names stay."""
        for block in self.blocks.values():
            block.compile()
        if self.head is not None and isinstance(self.head.norm, nn.Module):
            self.head.norm.compile()

    def through(self, x: Tensor | None, batch: Batch, stage: Stage) -> Tensor:
        """What a stage's embedding, if it is the first, and blocks make of x: (b, s, h) or this rank's part of it."""
        setting = self._setting(batch)
        if stage.first:
            x = self._embedded(batch, setting)
        assert x is not None, "only the first stage has an embedding"
        for layer in stage.layers:
            with self.layers.ledger.at(layer=layer):
                block = self.blocks[str(layer)]
                x = block(x, setting.turn, setting.seen, setting.sites(layer), setting.routing)
        return x

    def finished(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """What the last stage makes of the blocks' output: logits (b, s, V), or with targets (b, s) the sum of losses."""
        assert self.head is not None
        return self.head(x, self._tied(), targets)

    def run(self, batch: Batch) -> Tensor:
        """The whole model on a batch: logits (b, s, V), or with targets the sum of losses, see `loss`."""
        (stage,) = self.stages
        return self.finished(self.through(None, batch, stage), batch.targets)

    def _embedded(self, batch: Batch, setting: Setting) -> Tensor:
        assert self.embedding is not None
        x = self.embedding(batch.tokens, _positions(batch))
        if setting.noise is not None:
            x = dropped(x, self.spec.dropout, setting.noise[0][0], setting.noise[1])
        return x

    def _setting(self, batch: Batch) -> Setting:
        spec, layers = self.spec, self.layers
        documents = None if batch.documents is None else layers.own_samples(batch.documents)
        turn = noise = None
        if spec.positions == "rope":
            accurate = torch.promote_types(next(self.parameters()).dtype, torch.float32)
            turn = rotation(spec.rope, spec.head_size, layers.own_samples(_positions(batch)), accurate)
        if batch.dropout is not None and spec.dropout:
            noise = layers.noise_key(batch.dropout).noise(1 + 2 * spec.layers, layers.width)
        sequence = batch.tokens.shape[1]
        seen: Tensor | View | None
        if self.crossing is None:
            seen = visible(sequence, spec.window, documents, batch.tokens.device)
        else:
            whole = sequence * self.crossing.group.size
            seen = self.crossing.view(whole, causal=True, window=spec.window, documents=documents)
        return Setting(turn, seen, noise, self._routing(batch) if spec.moe else None)

    def _routing(self, batch: Batch) -> Tokens:
        order, tokens = batch.order, batch.tokens
        if order is None:
            order = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
        counted = None if batch.targets is None else self.layers.own_tokens(batch.targets >= 0)
        seed = torch.tensor(batch.seed, dtype=torch.float64, device=tokens.device)
        return Tokens(counted, self.layers.own_tokens(order), seed)

    def _tied(self) -> Tensor | None:
        if not self.spec.tied:
            return None
        assert self.embedding is not None
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return weight


def _give_memory(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Puts new tensors, memory as found, in the place of all parameters and buffers, which fake ones could not leave."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(torch.empty_like(parameter, dtype=dtype, device=device)))
        for name, buffer in list(part.named_buffers(recurse=False)):
            accurate = torch.promote_types(dtype, buffer.dtype)  # steps of a routing bias would vanish in 16 bit
            setattr(part, name, torch.empty_like(buffer, dtype=accurate, device=device))


class Chunk(nn.Module):
    """One stage of a decoder, for a pipeline: (what the stage before gave, or None; the micro-batch) -> what the next one
    gets, (b, s, h) or this rank's part of it; from the last stage the sum of losses.

    Its modules are the decoder's.
    """

    def __init__(self, decoder: Decoder, stage: Stage):
        super().__init__()
        self.stage = stage
        self.parts = nn.ModuleList(decoder.blocks[str(layer)] for layer in stage.layers)
        if stage.first and decoder.embedding is not None:
            self.parts.append(decoder.embedding)
        if stage.last and decoder.head is not None:
            self.parts.append(decoder.head)
        self._run, self._finish = decoder.through, decoder.finished  # methods, so the decoder is no submodule

    def forward(self, x: Tensor | None, batch: Batch) -> Tensor:
        x = self._run(x, batch, self.stage)
        return self._finish(x, batch.targets) if self.stage.last else x


def _positions(batch: Batch) -> Tensor:
    if batch.positions is not None:
        return batch.positions
    return torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
