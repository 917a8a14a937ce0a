"""Context layouts that cannot be: one line with values that would do, exit code 2, before torch loads; and the values do."""

import json
import re
import subprocess
import sys

import pytest

from shoal.cli.main import main

# What is asked for beside `shoal train`; the line; what a person would then try, each in place of the same option.
REFUSED = {
    "a length that zig-zag cannot cut": (
        {"layout": "cp=3"},
        "data.sequence = 256 does not divide into the 6 parts of layout cp=3; 252 or 258 would, or data.pad=true",
        [{"data.sequence": "252"}, {"data.sequence": "258"}, {"data.pad": "true"}],
    ),
    "one that a ring cannot": (
        {"layout": "cp=3,cp_kind=ring"},
        "data.sequence = 256 does not divide into the 3 parts of layout cp=3,cp_kind=ring; 255 or 258 would, or data.pad=true",
        [{"data.sequence": "255"}, {"data.sequence": "258"}, {"data.pad": "true"}],
    ),
    "one that sequence parallelism cannot": (
        {"layout": "tp=2,cp=2,sp,cp_kind=striped", "data.sequence": "102"},
        "data.sequence = 102 does not divide into the 4 parts of layout tp=2,cp=2,sp,cp_kind=striped; "
        "100 or 104 would, or data.pad=true",
        [{"data.sequence": "100"}, {"data.sequence": "104"}, {"data.pad": "true"}],
    ),
    "one that a hybrid cannot": (
        {"layout": "cp=4,ulysses=2", "data.sequence": "255"},
        "data.sequence = 255 does not divide into the 4 parts of layout cp=4,cp_kind=hybrid,ulysses=2; "
        "252 or 256 would, or data.pad=true",
        [{"data.sequence": "252"}, {"data.sequence": "256"}, {"data.pad": "true"}],
    ),
    "one beyond which the model has no positions": (
        {"layout": "cp=8", "data.sequence": "1000", "model.positions_max": "1000"},
        "data.sequence = 1000 does not divide into the 16 parts of layout cp=8; 992 would, or data.pad=true",
        [{"data.sequence": "992"}, {"data.pad": "true"}],
    ),
    "a model with fewer positions than parts": (
        {"layout": "cp=8", "data.sequence": "9", "model.positions_max": "10"},
        "data.sequence = 9 does not divide into the 16 parts of layout cp=8; data.pad=true would",
        [{"data.pad": "true"}],
    ),
    "more ranks than heads": (
        {"layout": "cp=8,cp_kind=ulysses"},
        "layout.cp = 8 cannot share out the 4 heads and 4 KV heads of a tensor rank, which ulysses hands around; "
        "1, 2 or 4 would, or cp_kind=zigzag",
        [{"layout": f"cp={n},cp_kind=ulysses"} for n in (1, 2, 4)] + [{"layout": "cp=8,cp_kind=zigzag"}],
    ),
    "ranks that do not divide the heads, and an odd length": (
        {"layout": "cp=3,cp_kind=ulysses", "data.sequence": "255"},
        "layout.cp = 3 cannot share out the 4 heads and 4 KV heads of a tensor rank, which ulysses hands around; "
        "1 would, or cp_kind=ring",
        [{"layout": "cp=1,cp_kind=ulysses"}, {"layout": "cp=3,cp_kind=ring"}],
    ),
    "heads that tensor ranks have left": (
        {"layout": "cp=4,tp=2,cp_kind=ulysses"},
        "layout.cp = 4 cannot share out the 2 heads and 2 KV heads of a tensor rank, which ulysses hands around; "
        "1 or 2 would, or cp_kind=zigzag",
        [{"layout": f"cp={n},tp=2,cp_kind=ulysses"} for n in (1, 2)] + [{"layout": "cp=4,tp=2,cp_kind=zigzag"}],
    ),
    "KV heads that fit no number of ranks": (
        {"layout": "cp=4,cp_kind=ulysses", "model.heads": "12", "model.kv_heads": "3", "model.hidden": "96"},
        "layout.cp = 4 cannot share out the 12 heads and 3 KV heads of a tensor rank, which ulysses hands around; "
        "1 would, or cp_kind=zigzag",  # 3, 6 and 12 ranks could not cut 256 tokens
        [{"layout": "cp=1,cp_kind=ulysses"}, {"layout": "cp=4,cp_kind=zigzag"}],
    ),
    "heads of a hybrid": (
        {"layout": "cp=6,ulysses=3", "data.sequence": "252"},
        "layout.ulysses = 3 cannot share out the 4 heads and 4 KV heads of a tensor rank, which hybrid hands around; "
        "1 or 2 would",
        [{"layout": f"cp=6,cp_kind=hybrid,ulysses={n}"} for n in (1, 2)],
    ),
    "ulysses that does not divide cp": (
        {"layout": "cp=4,ulysses=3"},
        "layout.ulysses = 3 does not divide cp = 4; 1, 2 or 4 would",
        [{"layout": f"cp=4,ulysses={n}"} for n in (1, 2, 4)],
    ),
    "ulysses without a hybrid": (
        {"layout": "cp=4,cp_kind=ring,ulysses=2"},
        "layout.ulysses = 2 needs cp_kind=hybrid, not ring; layout.ulysses = 1 would do",
        [{"layout": "cp=4,cp_kind=hybrid,ulysses=2"}, {"layout": "cp=4,cp_kind=ring,ulysses=1"}],
    ),
    "a kind that there is not": (
        {"layout": "cp=2,cp_kind=zig-zag"},
        "layout.cp_kind = zig-zag is not one of ring, zigzag, striped, ulysses, allgather, hybrid; did you mean zigzag?",
        [{"layout": "cp=2,cp_kind=zigzag"}],
    ),
}


def words(options):
    return ["train", *(word for name, value in options.items() for word in (f"--{name}", value))]


@pytest.mark.parametrize("kind", REFUSED)
def test_one_line_and_every_value_it_names_does(kind, capsys):
    options, line, others = REFUSED[kind]
    assert main(words(options)) == 2
    output = capsys.readouterr()
    assert output.err == f"shoal: {line}\n" and output.out == ""
    for other in others:
        assert main([*words(options | other), "--dump-config"]) == 0, capsys.readouterr().err
    named = set(re.findall(r"\d+", line[line.rindex(";") :]))
    assert named <= set(re.findall(r"\d+", str(others))), "every value it names was tried"


def test_none_of_them_waits_for_torch():
    """In a fresh process, with --json too: the line is in the document."""
    program = (
        "import json, sys\nfrom shoal.cli.main import main\nfor words in json.loads(sys.argv[1]):\n    main(words)\n"
    )
    program += "assert 'torch' not in sys.modules\n"
    asked = json.dumps([words(options) for options, _, _ in REFUSED.values()])
    done = subprocess.run([sys.executable, "-c", program, asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"shoal: {line}" for _, line, _ in REFUSED.values()]


def test_with_json_the_field_to_change_is_in_the_document(capsys):
    fields = {}
    for kind, (options, line, _) in REFUSED.items():
        assert main([*words(options), "--json"]) == 2
        document = json.loads(capsys.readouterr().out)
        assert document["ok"] is False and document["error"]["message"] == line
        fields[kind] = document["error"]["field"]
    assert all(field == REFUSED[kind][1].split(" ")[0] for kind, field in fields.items())


def test_filled_up_sequences_of_documents_train_as_in_one_process(tmp_path):
    """29 tokens, a prime, on 2 x 2 ranks that cut 32: the same losses, held out too, and the planned transfers."""
    texts = (json.dumps({"text": f"document {number} " * (number % 7 + 1)}) for number in range(100))
    (tmp_path / "a.jsonl").write_text("\n".join(texts))
    ends = {}
    for layout in ("dp=1", "cp=2,tp=2,sp"):
        out = tmp_path / layout
        options = {
            "layout": layout, "model": "tiny", "dtype": "float64", "steps": "3", "train.batch": "4", "train.sample": "0",
            "data.sequence": "29", "data.pad": "true", "data.packing": "packed", "data.path": str(tmp_path / "a.jsonl"),
            "data.cache": str(tmp_path / "cache"), "out": str(out),
        }  # fmt: skip
        command = [sys.executable, "-m", "shoal", *words(options), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        document = json.loads(done.stdout)
        assert done.returncode == 0 and document["ok"], done.stderr
        assert all(row["predicted_bytes"] == row["measured_bytes"] for row in document["transfers"])
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        ends[layout] = [*(line["loss"] for line in lines), document["eval_loss"]]
    one, four = ends.values()
    assert four == pytest.approx(one, rel=1e-10)
