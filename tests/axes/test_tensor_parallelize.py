"""`parallelize` on modules that are not ours: numbers of the whole module, planned transfers, refusals that change nothing."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from shoal.axes.tensor import parallelize
from shoal.axes.tensor.cost import Axis, Shape, embedding_transfers, linear_transfers
from shoal.comm.ledger import Ledger
from shoal.comm.world import Group, World
from shoal.mesh import Mesh
from shoal.spec.errors import RequestError
from shoal.transfer import Transfer

VOCAB, HEAD = 32, 4


class Plain(nn.Module):
    """Every style once, every linear layer with a bias; a norm over runs of 4 features between a column and a row layer."""

    def __init__(self, tied: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8, padding_idx=3)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.between = nn.RMSNorm(HEAD)
        self.wide, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.between(self.up(x).unflatten(-1, (-1, HEAD))).flatten(-2)
        x = x + self.down(nn.functional.gelu(y))
        x = x + self.narrow(torch.tanh(self.wide(x)))
        return self.head(x)


PLAIN = {
    "embed": "vocabulary",
    "up": "column",
    "down": "row",
    "between": "between",
    "wide": "column, gathered",
    "narrow": "row, split",
    "head": "column, gathered",
}
HUGGING_FACE = {
    "model.embed_tokens": "vocabulary",
    "*.[qkv]_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    "lm_head": "column, gathered",
}
HEADS = {"*.[qkvo]_proj": HEAD}
GROUPED = "llama, grouped and tied"
CASES = {  # the module's kind, what it is built with, styles, units
    "plain": ("plain", {"tied": False}, PLAIN, {}),
    "plain, tied": ("plain", {"tied": True}, PLAIN, {}),
    "llama": ("Llama", {"num_key_value_heads": 4}, HUGGING_FACE, HEADS),
    GROUPED: ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}, HUGGING_FACE, HEADS),
    "llama, ends whole": (
        "Llama",
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {pattern: style for pattern, style in HUGGING_FACE.items() if "*" in pattern},
        HEADS,
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 4}, HUGGING_FACE | {"*.[qk]_norm": "between"}, HEADS),
}


def built(kind: str, options: dict) -> nn.Module:
    """The whole module: the same random float64 values, norms and biases included, wherever it is built."""
    if kind == "plain":
        module: nn.Module = Plain(**options)
    else:
        import transformers

        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = getattr(transformers, f"{kind}Config")(
            **{"tie_word_embeddings": False} | options | sizes, vocab_size=VOCAB, head_dim=HEAD, pad_token_id=3
        )
        module = getattr(transformers, f"{kind}ForCausalLM")(config)
    random = torch.Generator().manual_seed(1)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.4 * noise)
    return module


def result(module: nn.Module):
    """(scores, the gradient of every parameter) after two backwards, which add up."""
    random = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (3, 7), generator=random)
    tokens[0, :2] = 3  # the id that is padding
    coefficients = torch.randn(3, 7, VOCAB, generator=random, dtype=torch.float64)
    for _ in range(2):
        scores = module(tokens)
        scores = getattr(scores, "logits", scores)
        (scores * coefficients).sum().backward()
    return scores, {name: parameter.grad for name, parameter in module.named_parameters()}


def tensor_group(rank: int, world: int) -> Group:
    return World(Mesh({"tp": world}, ("tp",)), rank, Ledger()).group("tp")


def alone(*layers: str):
    """A fault: these layers forget the other ranks."""

    def fault(module, world):
        for name in layers:
            layer = module.get_submodule(name)
            layer.group = layer.group.alone()

    return fault


def bias_everywhere(module, world):
    """A fault: the bias of the row layer added by every rank before the sum."""
    module.down.bias.data *= world


def nothing(module, world):
    pass


FAULTS = {  # the fault, and a few of the gradients it spoils, all of them if "scores" are wrong
    "row layer without its sum": (alone("down"), {"scores"}),
    "column layer without its sum": (alone("up"), {"embed.weight"}),
    "bias t times": (bias_everywhere, {"scores"}),
    "norm between without its sum": (nothing, {"between.weight"}),
}


def cut(rank, world, case, fault=None):
    """This rank's part of the result, and what it keeps."""
    kind, options, styles, units = CASES[case]
    module = built(kind, options)
    if fault == "norm between without its sum":
        styles = {name: style for name, style in styles.items() if style != "between"}
    pieces = parallelize(module, styles, tensor_group(rank, world), units)
    if fault is not None:
        FAULTS[fault][0](module, world)
    return *result(module), pieces


def wrong(case, ranks) -> set[str]:
    """What differs from the whole module by more than 1e-10 (relative L2) on some rank."""
    kind, options, *_ = CASES[case]
    scores, gradients = result(built(kind, options))
    off = set()
    for rank_scores, rank_gradients, pieces in ranks:
        if not error(rank_scores, scores) < 1e-10:
            off.add("scores")
        assert list(pieces) == list(rank_gradients) == list(gradients)
        for name, piece in pieces.items():
            part = np.zeros(piece.shape)
            piece.take(gradients[name].numpy(), part)
            if not error(rank_gradients[name], part) < 1e-10:
                off.add(name)
    return off


def error(ours, truth) -> float:
    ours, truth = np.asarray(ours), truth.detach().numpy() if isinstance(truth, torch.Tensor) else truth
    return float(np.linalg.norm(ours - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize(
    ("case", "world"), [(case, world) for case in CASES for world in (2, 4) if (case, world) != (GROUPED, 4)]
)
def test_computes_what_the_whole_module_computes(pool, case, world):
    ranks = pool.run(cut, world, case)
    assert wrong(case, ranks) == set()
    for name, piece in ranks[0][2].items():
        kept = np.zeros(piece.parameter.shape)
        for *_, pieces in ranks:
            part = np.zeros(piece.parameter.shape)
            pieces[name].put(np.ones(pieces[name].shape), part)
            kept += part
        by_all = piece.parameter.cut is None
        assert (kept == (world if by_all else 1)).all(), f"{name}: some values are lost, or kept twice"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(pool, fault):
    off = wrong("plain", pool.run(cut, 2, "plain", fault))
    assert FAULTS[fault][1] <= off


def layers_of(kind: str) -> tuple[nn.Sequential, dict[str, str], int, int]:
    """(layers, styles, features of X, features of Y) of one arrangement; what is not cut divides by nothing."""
    if kind == "pair":
        return nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 5)), {"0": "column", "1": "row"}, 7, 5
    features = (7, 12) if kind.startswith("column") else (12, 5)
    return nn.Sequential(nn.Linear(*features)), {"0": kind}, *features


def linear_layers(rank, world, kinds, dtype):
    """Per kind: the ledger after forward and backward of one layer, or of a pair."""
    answers = []
    for kind in kinds:
        group = tensor_group(rank, world)
        layers, styles, features, _ = layers_of(kind)
        layers.to(dtype)
        parallelize(layers, styles, group)
        here = features // world if kind == "row" else features
        x = torch.ones(3, 1, here, dtype=dtype).transpose(0, 1).requires_grad_()
        with group.ledger.at(phase="forward"):
            y = layers(x)
        y.sum().backward()
        answers.append(group.ledger.transfers())
    return answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_five_arrangements_send_what_is_planned(pool, world, dtype):
    """Spec TP-4, with sizes that ranks do not divide where they need not."""
    kinds = ("column", "column, gathered", "row", "row, split", "pair")
    for rank, answers in enumerate(pool.run(linear_layers, world, kinds, dtype)):
        for kind, transfers in zip(kinds, answers, strict=True):
            _, _, inputs, outputs = layers_of(kind)
            planned = list(linear_transfers(kind, 3 * inputs, 3 * outputs, world, rank, dtype.itemsize))
            assert transfers == planned, f"{kind} on rank {rank}"
            assert bool(transfers) == (world > 1)


def plain_ledger(rank, world):
    group = tensor_group(rank, world)
    module = built("plain", {"tied": False})
    parallelize(module, PLAIN, group)
    with group.ledger.at(phase="forward"):
        scores = module(torch.arange(10).view(2, 5))
    scores.sum().backward()
    return group.ledger.transfers()


def test_a_whole_module_sends_the_sum_of_its_layers(pool):
    world, tokens, width = 4, 10, 8
    for rank, transfers in enumerate(pool.run(plain_ledger, world)):
        axis = Axis(world, rank)
        planned = [
            *embedding_transfers(Shape(2, 5, 8, width), axis, 0),
            *linear_transfers("pair", tokens * 8, tokens * 8, world, rank, width),
            *linear_transfers("column, gathered", tokens * 8, tokens * 12, world, rank, width),
            *linear_transfers("row, split", tokens * 12, tokens * 8, world, rank, width),
            *linear_transfers("column, gathered", tokens * 8, tokens * VOCAB, world, rank, width),
            axis.moves("backward", "all_reduce", HEAD, width),  # the norm between
        ]
        assert sums(transfers) == sums(planned)


def sums(transfers: list[Transfer]) -> dict[tuple[str, str], tuple[int, int, int]]:
    total: dict[tuple[str, str], tuple[int, int, int]] = {}
    for t in transfers:
        sent, received, calls = total.get((t.phase, t.op), (0, 0, 0))
        total[t.phase, t.op] = sent + t.sent, received + t.received, calls + t.calls
    return total


def of(ranks: int, index: int = 0) -> Group:
    """A group that only says who is in it."""
    return Group("tp", tuple(range(ranks)), index, Ledger(), torch.device("cpu"))


def hooked() -> Plain:
    module = Plain(tied=False)
    module.up.register_forward_hook(lambda *_: None)
    return module


def twice() -> Plain:
    module = Plain(tied=False)
    parallelize(module, {"up": "column"}, of(2))
    return module


def plain(tied: bool = False) -> Plain:
    return Plain(tied)


def sparse() -> nn.ModuleDict:
    return nn.ModuleDict({"table": nn.Embedding(8, 4, sparse=True)})


REFUSALS = [  # the module, styles, units, ranks, the field, the line
    (plain, {"*.upp": "column"}, {}, 2, "styles", 'styles: "*.upp" matches no submodule; "up" would do'),
    (
        nn.GELU,
        {"up": "column"},
        {},
        2,
        "styles",
        'styles: "up" matches no submodule; it has no linear layer or embedding',
    ),
    (plain, {"up": "colum"}, {}, 2, "up", 'up = "colum": there is no such style; "column" would do'),
    (
        plain,
        {"between": "column"},
        {},
        2,
        "between",
        'between = "column": that cuts an nn.Linear, not a layer of type RMSNorm; a pattern without it would do',
    ),
    (
        plain,
        {"embed": "row"},
        {},
        2,
        "embed",
        'embed = "row": that cuts an nn.Linear, not a layer of type Embedding; "vocabulary" would do',
    ),
    (
        twice,
        {"up": "column"},
        {},
        2,
        "up",
        'up = "column": that cuts an nn.Linear, not a layer of type ColumnLinear; a pattern without it would do',
    ),
    (
        hooked,
        {"up": "column"},
        {},
        2,
        "up",
        'up = "column": it has hooks, which would be lost; hooks that are registered afterwards would do',
    ),
    (
        sparse,
        {"table": "vocabulary"},
        {},
        2,
        "table",
        'table = "vocabulary": a cut embedding knows no sparse = True; sparse = False would do',
    ),
    (
        plain,
        {"u*": "column", "up": "row"},
        {},
        2,
        "styles",
        'styles: up is "column" by "u*" and "row" by "up"; patterns that do not overlap would do',
    ),
    (
        plain,
        {"narrow": "row"},
        {},
        5,
        "narrow",
        "narrow has 12 inputs, which 5 ranks do not divide; 1, 2, 3, 4, 6 or 12 ranks would",
    ),
    (
        plain,
        {"embed": "vocabulary"},
        {},
        3,
        "embed",
        "embed has 32 ids, which 3 ranks do not divide; 1, 2, 4, 8, 16 or 32 ranks would",
    ),
    (
        plain,
        {"up": "column"},
        {"up": 8},
        4,
        "up",
        "up has 2 units of 8 outputs, which 4 ranks do not divide; 1 or 2 ranks would",
    ),
    (
        plain,
        {"up": "column"},
        {"up": 3},
        2,
        "up",
        "up has 16 outputs, no whole number of units of 3; 1, 2, 4, 8 or 16 would do",
    ),
    (plain, {"up": "column"}, {"upp": 4}, 2, "units", 'units: "upp" matches no submodule; "up" would do'),
    (
        lambda: plain(tied=True),
        {"embed": "vocabulary", "up": "column"},
        {},
        2,
        "head.weight",
        "head.weight is tied to embed.weight, but not cut like it; styles for both that cut the same dim "
        '("vocabulary" and "column, gathered"), or for neither, would do',
    ),
    (
        lambda: nn.ModuleDict({"box": plain()}),
        {"box": "between", "box.up": "column"},
        {},
        2,
        "box",
        'box = "between" holds box.up, which is cut; a pattern without it would do',
    ),
]


@pytest.mark.parametrize(("make", "styles", "units", "ranks", "field", "line"), REFUSALS, ids=[r[-1] for r in REFUSALS])
def test_what_cannot_be_cut_is_refused_in_one_line_and_nothing_changes(make, styles, units, ranks, field, line):
    module = make()
    possible = isinstance(module, Plain) and module.down.in_features % ranks == 0
    fine = {"down": "row"} if possible else {}  # what comes first must not be cut either
    before = {name: (layer, type(layer)) for name, layer in module.named_modules(remove_duplicate=False)}
    values = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RequestError) as refusal:
        parallelize(module, fine | styles, of(ranks), units)
    assert isinstance(refusal.value, ValueError)
    assert (refusal.value.field, str(refusal.value)) == (field, line)
    assert before == {name: (layer, type(layer)) for name, layer in module.named_modules(remove_duplicate=False)}
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    assert not any(parameter._backward_hooks for parameter in module.parameters())


def test_a_block_that_reads_weights_past_its_layers_is_refused():
    """In eval() torch's encoder layer computes from linear1.weight and linear2.weight itself: a sum would be missing."""
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    before = dict(block.named_modules())
    with pytest.raises(
        RequestError, match=r"linear1 = \"column\": nn.TransformerEncoderLayer reads its layers' weights"
    ):
        parallelize(block, {"linear1": "column", "linear2": "row"}, World.single().group("tp"))
    assert dict(block.named_modules()) == before


def misused(rank, world, case):
    """What ids outside the table come to, and a copy."""
    kind, options, styles, units = CASES[case]
    module = built(kind, options)
    parallelize(module, styles, tensor_group(rank, world), units)
    said = []
    for wrong_id in (-1, VOCAB):
        with pytest.raises(RuntimeError) as caught:
            module(torch.tensor([[0, wrong_id]]))
        said.append(str(caught.value))
    with pytest.raises(TypeError) as refused:
        deepcopy(module)
    return [*said, str(refused.value)]


def test_ids_outside_the_table_and_copies_are_refused(pool):
    """No rank has such ids, so that their sum would be zero; a copy would lack the hooks that sum gradients."""
    for said in pool.run(misused, 2, "plain"):
        assert all(f"token ids must lie from 0 to {VOCAB - 1}" in words for words in said[:2])
        assert "cannot be copied; a second one that is made and cut alike, with load_state_dict, would do" in said[2]


def test_more_ranks_than_kv_heads_are_refused():
    """Their features would divide, half a head each."""
    kind, options, styles, units = CASES[GROUPED]
    with pytest.raises(
        RequestError, match="k_proj has 2 units of 4 outputs, which 4 ranks do not divide; 1 or 2 ranks"
    ):
        parallelize(built(kind, options), styles, of(4), units)


def test_a_layer_in_two_places_stays_one():
    shared = nn.Linear(4, 4)
    module = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    pieces = parallelize(module, {"b.0": "column"}, of(2))
    assert module["a"] is module["b"][0] is not shared
    assert list(pieces) == ["a.weight", "a.bias"]
    assert module["a"].weight.shape == (2, 4)


def test_parameters_stay_the_same_objects_as_they_were():
    module = Plain(tied=True).eval()
    module.up.weight.requires_grad_(False)
    module.down.weight.grad = torch.ones(8, 16)
    module.down.bias.grad = torch.ones(8)
    before, whole = list(module.parameters()), module.down.weight.detach().clone()
    parallelize(module, PLAIN, of(2, index=1))
    assert [id(parameter) for parameter in module.parameters()] == [id(parameter) for parameter in before]
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.down.weight, whole[:, 8:])
    assert (module.down.weight.grad is None, module.down.bias.grad is None) == (True, False)
    assert not module.up.weight.requires_grad
    assert not any(layer.training for layer in module.modules())


def test_a_module_without_memory_is_cut_and_filled_afterwards():
    whole = Plain(tied=False)
    with torch.device("meta"):
        module = Plain(tied=False)
    pieces = parallelize(module, PLAIN, of(4, index=2))
    module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            pieces[name].take(whole.get_parameter(name), parameter)
    assert torch.equal(module.up.weight, whole.up.weight[8:12])
    assert torch.equal(module.narrow.weight, whole.narrow.weight[:, 6:9])
    assert torch.equal(module.narrow.bias, whole.narrow.bias)
