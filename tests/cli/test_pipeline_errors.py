"""Pipelines on the command line: what cannot be is one line and exit code 2 before any rank starts; what can be trains."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from shoal.axes.pipeline.schedules.files import to_csv
from shoal.axes.pipeline.schedules.registry import make
from shoal.cli.main import main

HEAD = "versions,flush\nroute,0.0,1.0\nmicro-batches,0,0\n"
FILES = {
    "good": f"schedule,mine\n{HEAD}rank,F0,F1,B0,B1\nrank,F0,B0,F1,B1\n",
    "incomplete": f"schedule,mine\n{HEAD}rank,F0,F1,B0,B1\nrank,F0,B0,F1\n",
    "twice": f"schedule,mine\n{HEAD}rank,F0,F1,B0,B0\nrank,F0,B0,F1,B1\n",
    "backwards first": f"schedule,mine\n{HEAD}rank,B0,F0,F1,B1\nrank,F0,B0,F1,B1\n",
    "circle": f"schedule,mine\n{HEAD}rank,F0,B0,F1,B1\nrank,F1,B1,F0,B0\n",
    "no step": f"schedule,mine\n{HEAD}rank,F0,F1,Q0,B1\nrank,F0,B0,F1,B1\n",
    "no row": "schedule,mine\nversions,flush\nroute,0.0,1.0\nrank,F0,B0\nrank,F0,B0\n",
    "idle rank": "schedule,mine\nversions,flush\nroute,0.0\nmicro-batches,0,0\nrank,F0,B0,F1,B1\nrank\n",
    "copies side by side": "schedule,mine\nversions,flush\nroute,0.0,1.0\nroute,0.1,1.1\nmicro-batches,0,1\n"
    "rank,F0,F1.1,B0,B1.1\nrank,F0,B0,F1.1,B1.1\n",
    "uneven routes": "schedule,mine\nversions,flush\nroute,0.0,1.0\nroute,1.1,0.1\nmicro-batches,0,0\n"
    "rank,F0,F1,B0,B1\nrank,F0,B0,F1,B1\n",
    "copies with ends apart": "schedule,mine\nversions,flush\nroute,0.0,2.0,3.0,1.0\nroute,3.1,1.1,0.1,2.1\n"
    "micro-batches,0,1\nrank,F0,F1.1,B1.1,B0\nrank,F1.1,F0,B0,B1.1\nrank,F0,F1.1,B1.1,B0\nrank,F1.1,F0,B0,B1.1\n",
    "ends inside": "schedule,mine\nversions,flush\nroute,1.0,0.0,2.0\nmicro-batches,0\nrank,F0,B0\nrank,F0,B0\nrank,F0,B0\n",
}
FOR_TWO = "pp=2,micro_batches=2,schedule="
PP, V, M = "layout.pp", "layout.v", "layout.micro_batches"
SCHEDULE, STAGES = "layout.schedule", "layout.stages"
BOTH = {  # of train and verify: what is asked for; the field at fault; what the line says
    "unknown schedule": ("pp=2,schedule=1f2b", SCHEDULE, "1f2b is not one of naive, gpipe, 1f1b"),
    "odd ranks for dualpipe": ("pp=3,schedule=dualpipe", PP, "pp = 3, but dualpipe .* even number; 2 or 4 would do"),
    "odd micro-batches for dualpipe": ("pp=2,schedule=dualpipe,micro_batches=5", M, "4 or 6 would do"),
    "few micro-batches for dualpipe": ("pp=4,schedule=dualpipe,micro_batches=4", M, "at least 8 .* 8 would do"),
    "few micro-batches for dualpipe-v": ("pp=2,schedule=dualpipe-v,micro_batches=3", M, "at least 4 .* 4 would do"),
    "chunks for 1f1b": ("pp=2,v=2", V, "v = 2, but 1f1b has 1 chunk per rank; 1 would do"),
    "chunks for zb-v": ("pp=2,schedule=zb-v,v=3", V, "zb-v has 2 chunks per rank; 2 would do"),
    "one chunk for interleaved": ("pp=2,schedule=interleaved,v=1", V, "interleaved wants at least 2 .* 2 would do"),
    "no pipeline to order": ("dp=2,schedule=gpipe", SCHEDULE, "gpipe with pp = 1: there are no stages to order; pp=2"),
    "no pipeline to cut": ("dp=2,stages=1-1", STAGES, "no pipeline to cut layers for; pp=2 or no stages would do"),
    "no pipeline in chunks": (
        "dp=2,v=2",
        V,
        "with pp = 1: there are no stages to cut into chunks; pp=2,schedule=interleaved or v=1 would do",
    ),
    "too few stages": ("pp=2,stages=6", STAGES, "stages = 6 has 1 stage, the pipeline 2; 3-3 would do"),
    "an empty stage": ("pp=2,stages=6-0", STAGES, "stages = 6-0 is not a list of numbers of layers; 3-3 would do"),
    "no file": ("pp=2,schedule=nowhere.csv", SCHEDULE, "nowhere.csv cannot be read: No such file"),
    "a file for other ranks": ("pp=4,micro_batches=2,schedule={good}", PP, "pp = 4, but .* has 2 ranks; 2 would do"),
    "a file for other micro-batches": ("pp=2,schedule={good}", M, "good.csv has 2 micro-batches; 2 would do"),
    "a file for other chunks": (f"v=2,{FOR_TWO}{{good}}", V, "good.csv has 2 stages on 2 ranks; 1 would do"),
    "a backward missing": (f"{FOR_TWO}{{incomplete}}", SCHEDULE, "rank 1 has no B, and no I, for micro-batch 1"),
    "a backward twice": (f"{FOR_TWO}{{twice}}", SCHEDULE, "rank 0, position 3, B0: it stands at position 2 already"),
    "a backward too early": (f"{FOR_TWO}{{backwards first}}", SCHEDULE, "rank 0, position 0, B0 waits for"),
    "orders in a circle": (f"{FOR_TWO}{{circle}}", SCHEDULE, "circle.csv: .* rank 0, position 1, B0 waits for rank 1"),
    "a step that is none": (f"{FOR_TWO}{{no step}}", SCHEDULE, "no step.csv, row 5, cell 4: Q0 is no step; F0, B0"),
    "a row missing": (f"{FOR_TWO}{{no row}}", SCHEDULE, "no row.csv has no row micro-batches"),
    "a rank without a stage": (f"{FOR_TWO}{{idle rank}}", SCHEDULE, "gives rank 1 no stage"),
    "copies on one rank": (f"{FOR_TWO}{{copies side by side}}", SCHEDULE, "mirror image; one route would do"),
    "unequal copies": (f"{FOR_TWO}{{uneven routes}}", SCHEDULE, "half of the micro-batches"),
    "tied ends of copies apart": (
        "pp=4,micro_batches=2,schedule={copies with ends apart}",
        SCHEDULE,
        "the ends of a tied model at 0.0 and 1.0; both on one rank, or on ranks 0 and 3, would do",
    ),
    "tied ends inside": (
        "pp=3,micro_batches=1,schedule={ends inside}",
        SCHEDULE,
        "the ends of a tied model at 1.0 and 2.0; both on one rank, or on ranks 0 and 2, would do",
    ),
}
TRAIN = {  # of train alone: verify makes its model for the layout
    "more stages than layers": ("pp=8", PP, "8 stages want as many layers, the model has 6; at most 6 stages would do"),
    "more chunks than layers": ("pp=2,schedule=interleaved,v=4", PP, "8 stages want as many layers, .* at most 6"),
    "stages of too many layers": ("pp=2,stages=3-4", STAGES, "3-4 adds up to 7 layers, not 6; 3-3 would do"),
    "more micro-batches than samples": ("pp=2,micro_batches=32", "train.batch", "batch = 16 does not divide"),
}
REFUSED = {
    f"{command}, {name}": (command, *case)
    for command, cases in (("train", BOTH | TRAIN), ("verify", BOTH))
    for name, case in cases.items()
}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    paths = {name: folder / f"{name}.csv" for name in FILES}
    for name, path in paths.items():
        path.write_text(FILES[name])
    return paths


def words_of(request, files, out):
    command, layout, *_ = REFUSED[request]
    words = [command, "--layout", layout.format(**files)]
    words += ["--model.tied"] if "tied" in request else []
    return words if command == "verify" else [*words, "--out", str(out)]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_pipeline_that_cannot_be_is_one_line_and_exit_code_2(tmp_path, files, kind, capsys):
    *_, field, message = REFUSED[kind]
    assert main([*words_of(kind, files, tmp_path / "out"), "--json"]) == 2
    output = capsys.readouterr()
    assert json.loads(output.out)["error"]["field"] == field
    assert output.err.count("\n") == 1 and output.err.startswith("shoal: ")
    assert re.search(message, output.err), output.err
    assert list(tmp_path.iterdir()) == []


def test_it_is_refused_before_torch_is_loaded(tmp_path, files):
    """So without a rank, at once."""
    requests = [words_of(request, files, tmp_path / "out") for request in REFUSED]
    program = (
        "import sys\nfrom shoal.cli.main import main\n"
        f"for words in {requests!r}:\n    assert main(words) == 2 and 'torch' not in sys.modules, words\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr.count("\n") == len(requests), done.stderr


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """train(layout) -> (metrics, weights) of a run in a folder where mine.csv lies."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a text\n" for n in range(400)))
    (tmp_path / "mine.csv").write_text(to_csv(make("zb-v", 2, 4)))

    def run(layout):
        words = ["train", "--model", "tiny", "--model.layers", "4", "--model.tied", "--data.path", "text.txt",
                 "--data.cache", "cache", "--out", layout, "--steps", "3", "--data.sequence", "32", "--train.batch", "8",
                 "--train.sample", "0", "--dtype", "float64", "--layout", layout, "--json"]  # fmt: skip
        assert main(words) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["ok"] and all(row["ok"] for row in document["transfers"])
        lines = [json.loads(line) for line in (tmp_path / layout / "metrics.jsonl").read_text().splitlines()]
        return lines, load_file(tmp_path / layout / "model.safetensors")

    return run


def test_a_schedule_from_a_file_trains(train):
    """An order and places of one's own, in a file of the folder one is in, which alone says how many chunks there are."""
    lines, weights = train("pp=2,schedule=mine.csv")
    wanted, wanted_weights = train("dp=1")
    for name in ("loss", "grad_norm", "tokens", "eval_loss"):
        found = [line[name] for line in lines if name in line]
        np.testing.assert_allclose(found, [line[name] for line in wanted if name in line], rtol=1e-10)
    assert weights.keys() == wanted_weights.keys()
    for name, weight in wanted_weights.items():
        assert np.linalg.norm(weights[name] - weight) <= 1e-10 * np.linalg.norm(weight), name
