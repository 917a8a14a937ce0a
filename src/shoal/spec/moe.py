"""The mixture of experts a person asks for: how many experts, how tokens choose them, how their load is balanced. No torch."""

from dataclasses import dataclass
from typing import Literal

from shoal.spec.errors import RequestError, alternatives, divisors
from shoal.spec.fields import check_fields, derived, described, resolve


@dataclass(frozen=True)
class MoESpec:
    """The feed-forward of a mixture-of-experts layer: E SwiGLU experts, of which every token uses top_k, and shared ones.

    Token t scores expert i with s_ti = softmax_i or sigmoid of its logits, chooses by s_ti + bias_i, and weighs what the
    chosen compute by s_ti (normalised over the chosen or not) times `scaling`. Raises RequestError.
    """

    experts: int = described(8, "routed experts of a layer", low=1)
    top_k: int = described(2, "experts that a token uses", low=1)
    expert_ffn: int = described(256, "width of one expert's MLP", low=1)
    shared_experts: int = described(0, "experts that every token uses beside the routed ones", low=0)
    shared_ffn: int = derived("width of one shared expert's MLP; none = expert_ffn", low=1)
    shared_gate: bool = described(False, "a token weighs the shared experts by a sigmoid of its own (Qwen2-MoE)")
    router: Literal["softmax", "sigmoid"] = described("softmax", "how logits become scores")
    normalised: bool = described(True, "weights of a token's experts are divided by their sum")
    scaling: float = described(1.0, "factor on the weights of routed experts", above=0)
    groups: int = described(1, "groups of experts, of which a token uses only some (DeepSeek)", low=1)
    groups_kept: int = derived("groups that a token may choose experts from; none = all", low=1)
    group_score: Literal["top2", "max"] = described(
        "top2", "what a group is chosen by: the sum of its two best scores (DeepSeek-V3) or its best (DeepSeek-V2)"
    )
    bias: bool = described(False, "a bias on the choice, moved towards even load instead of trained (DeepSeek-V3)")
    bias_rate: float = described(0.001, "how far a step moves the bias of an expert", low=0)
    aux_loss: float = described(0.0, "coefficient of the load-balance loss, which is 1 at uniform load", low=0)
    z_loss: float = described(0.0, "coefficient of the mean squared log-sum-exp of the logits (ST-MoE)", low=0)
    balance: Literal["sequence", "micro_batch"] = described(
        "sequence",
        "the tokens over which load-balance loss and capacity are taken: a sequence, or all ranks' micro-batch",
    )
    capacity: float = described(
        0.0, "tokens an expert takes, over the mean; what is beyond is dropped; 0 drops nothing", low=0
    )
    first_dense: int = described(0, "leading layers that keep a dense MLP", low=0)
    every: int = described(1, "of the others every n-th layer has experts, counted from the first layer of all", low=1)

    def __post_init__(self) -> None:
        check_fields(self, "model.moe")
        resolve(self, shared_ffn=self.expert_ffn, groups_kept=self.groups)
        self._check_groups()
        within = self.experts // self.groups * self.groups_kept
        if self.top_k > within:
            of = "" if self.groups_kept == self.groups else f" of {self.groups_kept} groups"
            raise RequestError(
                "model.moe.top_k", f"model.moe.top_k = {self.top_k} exceeds the {within} experts{of}; {within} would do"
            )
        if self.top_k == 1 and self.normalised:
            raise RequestError(
                "model.moe.normalised",
                "model.moe.normalised = true makes the one weight of top_k = 1 always 1, so that the router learns nothing; "
                "false would do",
            )
        if self.shared_gate and not self.shared_experts:
            raise RequestError(
                "model.moe.shared_gate",
                "model.moe.shared_gate = true has no shared experts to weigh; shared_experts = 1 would do",
            )

    def _check_groups(self) -> None:
        size, rest = divmod(self.experts, self.groups)
        if rest:
            would = alternatives(divisors(self.experts), self.groups)
            raise RequestError(
                "model.moe.groups",
                f"model.moe.groups = {self.groups} does not divide the {self.experts} experts; {would} would",
            )
        if self.groups_kept > self.groups:
            raise RequestError(
                "model.moe.groups_kept",
                f"model.moe.groups_kept = {self.groups_kept} exceeds groups = {self.groups}; {self.groups} would do",
            )
        if self.limited and self.group_score == "top2" and size < 2:
            raise RequestError(
                "model.moe.group_score",
                "model.moe.group_score = top2 needs two experts in a group, and a group has one; max would do",
            )

    @property
    def limited(self) -> bool:
        """Whether a token may choose from some groups only."""
        return self.groups_kept < self.groups

    @property
    def shared_width(self) -> int:
        """Width of all shared experts together: they are one MLP; 0 without."""
        return self.shared_experts * self.shared_ffn

    @property
    def losses(self) -> bool:
        """Whether there are auxiliary losses."""
        return self.aux_loss > 0 or self.z_loss > 0

    def at(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, has experts."""
        return layer >= self.first_dense and (layer + 1) % self.every == 0

    def check_ranks(self, ep: int, space: int = 0) -> None:
        """Raises RequestError when `ep` ranks cannot hold equally many experts (spec EP-1).

        space: ranks that they are carved out of, of which there may be more; what would do divides these, if anything does.
        """
        if self.experts % ep:
            fitting = [size for size in divisors(self.experts) if space % size == 0]
            would = alternatives(fitting if len(fitting) > 1 else divisors(self.experts), ep)
            raise RequestError(
                "layout.ep", f"layout.ep = {ep} does not divide the model's {self.experts} experts; {would} would"
            )
