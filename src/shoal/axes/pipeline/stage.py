"""A stage of a pipeline: which part of the model it is. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Some layers of a decoder in order; first: with the embedding, last: with the last norm and the head."""

    layers: range
    first: bool
    last: bool

    def units(self) -> list[str]:
        """The inventory's units of this stage, in its order."""
        ends = ["embedding"] if self.first else [], ["head"] if self.last else []
        return [*ends[0], *(f"blocks.{layer}" for layer in self.layers), *ends[1]]
