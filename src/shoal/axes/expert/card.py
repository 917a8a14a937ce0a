"""Expert parallelism in six facts (spec EP-1..6)."""

from shoal.axes.card import Card

CARD = Card(
    key="ep",
    name="expert parallelism",
    cuts="experts",
    keeps="E/N experts of every mixture-of-experts layer, and the tokens that use them",
    replicated="router, shared experts, attention: everything outside the experts, unless another axis cuts it",
    moves="tokens: 4 T k h x bytes per element x (N-1)/N per layer on average, less where duplicates are left out",
    primitive="all_to_all",
    when="twice in every mixture-of-experts layer, there and back, forward and backward alike",
    pros=(
        "memory of experts shrinks N-fold",
        "an expert sees N times the tokens, so its matrix products are large enough",
        "gradients of experts are summed over their replicas only",
    ),
    cons=(
        "nothing hides the exchange unless another micro-batch computes meanwhile",
        "the step waits for the most loaded rank",
        "traffic grows with tokens and k",
    ),
    cures=("memory", "compute"),
)
