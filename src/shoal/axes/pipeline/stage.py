"""A stage of a pipeline: which part of the model it is. No torch."""

from dataclasses import dataclass

from shoal.axes.recompute.cost import Mode, mode_of


@dataclass(frozen=True)
class Stage:
    """Some layers of a decoder in order; first: with the embedding, last: with the last norm and the head.

    recompute: the layout's, whose number counts from the stage's first layer.
    """

    layers: range
    first: bool
    last: bool
    recompute: str | int = "none"

    def units(self) -> list[str]:
        """The inventory's units of this stage, in its order."""
        ends = ["embedding"] if self.first else [], ["head"] if self.last else []
        return [*ends[0], *(f"blocks.{layer}" for layer in self.layers), *ends[1]]

    def mode(self, layer: int) -> Mode:
        """What is computed again in backward of one of its layers."""
        return mode_of(self.recompute, self.layers.index(layer))

    def full(self) -> list[int]:
        """The layers that are computed again as a whole."""
        return [layer for layer in self.layers if self.mode(layer) == "full"]
