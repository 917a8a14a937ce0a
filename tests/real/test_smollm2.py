"""A real model, SmolLM2-135M: it speaks, it is what transformers makes of the same file, and layouts do not change it."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from real.gguf_weights import GGUF, MISSING, gguf_file
from shoal.axes.tensor.run import TensorLayers
from shoal.axes.tensor2d.run import Tensor2DLayers
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.launch.pool import Pool
from shoal.mesh import Mesh
from shoal.model.decoder import Decoder
from shoal.model.layers import Layers
from shoal.spec.build import build
from shoal.spec.inventory import inventory
from shoal.spec.model import ModelSpec
from shoal.spec.presets import MODELS

FILE = gguf_file()
pytestmark = pytest.mark.skipif(FILE is None, reason=MISSING)

SPEC = build(ModelSpec, MODELS["smollm2-135m"], "model")
LAYOUTS = {"tp=3": 3, "tp=9": 9, "tp=3x3": 9}  # ranks
THEIR_ROPE = 3e-6  # transformers' angles are float32 whatever the model's dtype
TEXT = """The Moon is the only natural satellite of the Earth. It orbits at an average distance of 384,400 kilometres,
about 30 times the diameter of the Earth, and its gravity is the main cause of the tides of the oceans."""
CONTINUATIONS = {
    "The capital of France is": " Paris.",
    "One, two, three, four,": " five, six, seven",
    "import numpy as": " np\nimport matplotlib.pyplot as plt",
}


@pytest.fixture(scope="module")
def ranks():
    with Pool(9) as pool:
        yield pool


@pytest.fixture(scope="module")
def model_file() -> GGUF:
    assert FILE is not None
    return GGUF(FILE)


@pytest.fixture(scope="module")
def folder(model_file):
    """Every parameter whole, a file each, of which ranks read what they keep: 540 MB, gone with the last test."""
    with tempfile.TemporaryDirectory(prefix="smollm2-") as name:
        folder = Path(name)
        for name, array in model_file.weights(SPEC):
            np.save(folder / f"{name}.npy", array)
        yield folder


@pytest.fixture(scope="module")
def tokens(model_file) -> torch.Tensor:
    """Three sequences of 8 tokens, so that three rows of a grid each have one."""
    return torch.tensor(model_file.tokenizer().encode(TEXT).ids[:24]).view(3, 8)


def layers_of(layout: str, rank: int, world: int) -> Layers:
    """This rank's layers of a layout."""
    mesh = Mesh({"tp": world, "grid": 3 if "x" in layout else 1}, ("tp",))
    here = World(mesh, rank, Ledger())
    if "x" in layout:
        return Tensor2DLayers(SPEC, here.group("row"), here.group("column"), here.group("tp"))
    return TensorLayers(SPEC, here.group("tp"))


def filled(layers: Layers, folder: Path, dtype: torch.dtype) -> Decoder:
    """The decoder with this rank's pieces of the weights."""
    decoder = Decoder(SPEC, dtype, layers=layers)
    parameters = dict(decoder.named_parameters())
    for piece in layers.pieces(inventory(SPEC)):
        name = piece.parameter.name
        own = parameters.pop(name).detach().zero_().numpy()
        assert own.shape == piece.shape
        piece.take(np.load(folder / f"{name}.npy", mmap_mode="r"), own)
    assert not parameters
    return decoder


@torch.no_grad()
def logits(rank, world, layout, folder, tokens):
    """(scores (b, s, V) in float64, elements of the weights that this rank keeps)."""
    decoder = filled(layers_of(layout, rank, world), folder, torch.float64)
    return decoder(tokens), sum(parameter.numel() for parameter in decoder.parameters())


def difference(rank, world, layout, folder, tokens):
    """(how far this rank's scores are from one process's, elements that it keeps)."""
    scores, kept = logits(rank, world, layout, folder, tokens)
    return error(scores.numpy(), np.load(folder / "logits.npy")), kept


@pytest.fixture(scope="module")
def whole(ranks, folder, tokens):
    """What one process computes, as `logits`; the scores lie in the folder too."""
    [(scores, elements)] = ranks.run(logits, 1, "tp=1", folder, tokens)
    np.save(folder / "logits.npy", scores)
    return scores, elements


def error(ours, truth) -> float:
    return float(np.linalg.norm(ours - truth) / np.linalg.norm(truth))


def test_is_what_transformers_makes_of_the_same_file(monkeypatch, model_file, whole, tokens):
    """Their names, their order of rows: of ours there is nothing in the truth."""
    import transformers  # here, because every rank loads this file
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    monkeypatch.setattr("gguf.GGUFReader", lambda _: model_file.reader)  # to read the header again would take seconds
    sizes = {
        "num_hidden_layers": SPEC.layers,
        "hidden_size": SPEC.hidden,
        "intermediate_size": SPEC.ffn,
        "num_attention_heads": SPEC.heads,
        "num_key_value_heads": SPEC.kv_heads,
        "head_dim": SPEC.head_size,
        "vocab_size": SPEC.vocab,
        "max_position_embeddings": SPEC.positions_max,
        "rope_theta": SPEC.rope.theta,
        "tie_word_embeddings": SPEC.tied,
    }
    rope = {"rope_type": "default", "rope_theta": SPEC.rope.theta}
    config = transformers.LlamaConfig(**sizes, rms_norm_eps=SPEC.norm_eps, rope_parameters=rope)
    theirs = transformers.LlamaForCausalLM(config)
    said = load_gguf_checkpoint(FILE, return_tensors=True, model_to_load=theirs)
    assert {name: said["config"][name] for name in sizes} == sizes, "the preset is not the file's model"
    missing, unknown = theirs.load_state_dict(said["tensors"], strict=False)
    assert (missing, unknown) == (["lm_head.weight"], [])  # tied
    with torch.no_grad():
        truth = theirs.double()(tokens).logits.numpy()
    assert error(whole[0], truth) < THEIR_ROPE


def test_continues_a_text_with_sense(model_file, folder):
    decoder = filled(TensorLayers(SPEC, World.single().group("tp")), folder, torch.float32)
    tokenizer = model_file.tokenizer()
    for start, wanted in CONTINUATIONS.items():
        ids = tokenizer.encode(start).ids
        with torch.no_grad():
            for _ in tokenizer.encode(wanted).ids:
                ids.append(int(decoder.next_logits(torch.tensor([ids])).argmax()))
        assert tokenizer.decode(ids) == start + wanted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_logits_of_one_process(ranks, whole, folder, tokens, layout):
    """9 heads, 3 KV heads and 1536 columns: over 9 ranks KV heads have copies, and MLP and vocabulary are padded."""
    world, share = LAYOUTS[layout], whole[1] / LAYOUTS[layout]
    for off, kept in ranks.run(difference, world, layout, folder, tokens):
        assert off < 1e-10
        assert share < kept < 1.15 * share
