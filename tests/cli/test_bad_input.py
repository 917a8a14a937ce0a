"""Whatever is wrong with a request: one line that names the field and what would do, exit code 2, nothing written."""

import json
import re
import socket
import subprocess
import sys

import pytest

from shoal.cli.main import main

REFUSED = {
    "no such command": (["trian"], "trian is not a command of shoal; train"),
    "unknown option": (["train", "--model.hiden", "3"], "--model.hiden is not an option of shoal train; did you mean --model.hidden?"),
    "unknown field in the job": (["train", "{job}"], "train.stepps is not a field of train; did you mean train.steps?"),
    "unknown section": (["train", "{sections}"], "is not a section of a job"),
    "not TOML": (["train", "{broken}"], "is not TOML"),
    "missing job": (["train", "nowhere.toml"], "job = nowhere.toml does not exist"),
    "preset in the wrong place": (["train", "{preset}", "--model.layers", "2"], "model"),
    "misspelt preset": (["train", "--model", "tinny"], "model.preset = tinny is unknown; tiny would do"),
    "misspelt machine": (["train", "--machine", "h1000"], "did you mean h100?"),
    "misspelt choice": (["train", "--dtype", "float23"], "train.dtype = float23 is not one of"),
    "no number": (["train", "--steps", "ten"], "train.steps = ten"),
    "a number out of range": (["train", "--train.learning_rate", "-1"], "train.learning_rate = -1"),
    "nan": (["train", "--train.learning_rate", "nan"], "train.learning_rate = nan is not a finite number"),
    "layout with an unknown key": (["train", "--layout", "dq=2"], "dq is not a field of layout; did you mean layout.dp?"),
    "layout without a value": (["train", "--layout", "dp"], "layout.dp has no value"),
    "experts of a dense model": (["train", "--layout", "ep=2", "--model", "tiny"], "layout.ep = 2 without experts in the model: there is nothing to spread; ep=1 or model.preset=moe-tiny would do"),
    "batch that does not divide": (["train", "--layout", "dp=3"], "train.batch = 16 does not divide over dp = 3"),
    "sequence too long": (["train", "--data.sequence", "5000"], "data.sequence = 5000 is longer than model.positions_max = 1024"),
    "heads that do not divide": (["train", "--model.heads", "7"], "model.heads = 7 does not divide model.hidden = 256"),
    "missing corpus": (["train", "--data.path", "nowhere.txt"], "data.path = nowhere.txt does not exist"),
    "empty corpus": (["train", "--data.path", "{empty}"], "holds no text"),
    "corpus too short": (["train", "--data.path", "{short}"], "data.sequence = 256 is too long for the corpus of 6 tokens; 2 would do"),
    "corrupt token file": (["train", "--data.path", "{corrupt}"], "is no sound token file"),
    "vocabulary too small": (["train", "--model.vocab", "100"], "model.vocab = 100 is smaller than the byte tokenizer's 257 ids; 257 would do"),
    "vocabulary below the token file's": (["train", "--model.vocab", "100", "--data.path", "{tokens}"], "model.vocab = 100 is smaller than the tokenizer's 257"),
    "missing tokenizer": (["train", "--data.tokenizer", "nowhere.json"], "data.tokenizer = nowhere.json cannot be read"),
    "out that cannot be written": (["train", "--data.path", "{text}", "--out", "/dev/null/run"], "train.out = /dev/null/run cannot be written"),
    "cache that cannot be written": (["train", "--data.path", "{text}", "--data.cache", "/dev/null/c"], "data.cache = /dev/null/c cannot be written"),
    "port in use": (["train", "--layout", "dp=2", "--data.path", "{text}", "--machine.port", "{port}"], "machine.port = {port} is in use on this machine; 0 takes any free port"),
    "no GPU": (["train", "--data.path", "{text}", "--machine.device", "cuda"], "machine.device = cuda"),
    "tokenize without a target": (["tokenize", "{text}"], "--out"),
    "tokenize to another kind of file": (["tokenize", "{text}", "--out", "{folder}/a.bin"], "a.tokens would do"),
    "tokenize nothing": (["tokenize", "{empty}", "--out", "{folder}/a.tokens"], "holds no text"),
    "tokenize to nowhere": (["tokenize", "{text}", "--out", "/dev/null/a.tokens"], "out = /dev/null cannot be written"),
    "verify more expert ranks than divide": (["verify", "--layout", "ep=3"], "layout.ep = 3 does not divide the model's 8 experts; 1, 2, 4 or 8 would"),
    "verify no steps": (["verify", "--steps", "0"], "--steps 0 is not a number of steps"),
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    contents = {
        "job": ("job.toml", "[train]\nstepps = 3\n"),
        "sections": ("sections.toml", "[trian]\nsteps = 3\n"),
        "broken": ("broken.toml", "[train\n"),
        "preset": ("preset.toml", 'model = "tiny"\n'),
        "empty": ("empty.txt", ""),
        "short": ("short.txt", "short"),
        "text": ("text.txt", "a text that is long enough " * 100),
        "corrupt": ("corrupt.tokens", "garbage"),
    }
    paths = {}
    for key, (name, content) in contents.items():
        (folder / name).write_text(content)
        paths[key] = str(folder / name)
    assert main(["tokenize", paths["text"], "--out", str(folder / "good.tokens")]) == 0
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield paths | {
            "tokens": str(folder / "good.tokens"),
            "port": taken.getsockname()[1],
            "folder": str(tmp_path / "made"),
        }


@pytest.mark.parametrize("kind", REFUSED)
def test_a_wrong_request_is_one_line_and_exit_code_2(tmp_path, files, kind, capsys, monkeypatch):
    words, message = REFUSED[kind]
    words = [word.format(**files) for word in words]
    if words[0] == "train":
        if "--out" not in words:
            words += ["--out", str(tmp_path / "out")]
        if "--data.cache" not in words:
            words += ["--data.cache", str(tmp_path / "cache")]
    before = set(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and output.err.startswith("shoal: ")
    assert message.format(**files) in output.err
    written = {path for path in set(tmp_path.rglob("*")) - before if path.is_file() and path.suffix != ".tokens"}
    assert not written


def test_with_json_the_refusal_is_a_document_too(capsys):
    assert main(["train", "--dtype", "float23", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False and document["error"]["field"] == "train.dtype"
    assert document["error"]["message"].startswith("train.dtype = float23 is not one of")


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["verify", "--help"], ["tokenize", "--help"], ["--version"]]
)
def test_help_is_there(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0 and capsys.readouterr().out


def test_help_tells_every_field_of_a_job_with_its_default(capsys):
    from shoal.spec.build import fields_of
    from shoal.spec.job import Job

    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = re.sub(r"[\s-]", "", capsys.readouterr().out)  # argparse breaks lines at spaces and hyphens
    for field in fields_of(Job):
        assert re.sub(r"[\s-]", "", f"--{field.name}") in text and re.sub(r"[\s-]", "", field.help) in text, field.name


def test_what_needs_no_torch_answers_without_it():
    """A refusal, help and --dump-config come at once."""
    program = (
        "import sys\nfrom shoal.cli.main import main\n"
        "main(['train', '--layout', 'dp=2', '--dump-config'])\nmain(['train', '--dtype', 'float23'])\n"
        "main(['verify', '--layout', 'dp=2,dedup'])\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ODD = {
    "layout as a number": ("layout = 2\n", "layout"),
    "layout as a list": ('layout = ["dp=2"]\n', "layout"),
    "a null byte in out": ('[train]\nout = "a\\u0000b"\n', "train.out = "),
    "a null byte in cache": ('[data]\ncache = "a\\u0000b"\n', "data.cache = "),
    "a table where a number belongs": ("[train.steps]\nn = 2\n", "train.steps"),
    "a list where a word belongs": ("[train]\ndtype = [1]\n", "train.dtype"),
    "a date": ("[train]\nsteps = 2026-01-01\n", "train.steps"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("command", ["train", "verify"])
def test_odd_toml_is_one_line_too(tmp_path, kind, command, capsys):
    content, field = ODD[kind]
    (tmp_path / "job.toml").write_text(content)
    assert main([command, str(tmp_path / "job.toml")]) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and output.err.startswith(f"shoal: {field}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--layout", ""], "--layout is empty"),
        (["train", "--layout", " , "], "--layout is empty"),
        (["train", "--machine.timeout_s", "1e300"], "machine.timeout_s = 1e+300 must be"),
        (["train", "--machine.threads", "1000000000000"], "machine.threads = 1000000000000 must be"),
        (["train", "--machine.device", "cuda", "--out", "nothing"], "machine.device = cuda"),
        (["train", "--layout", "dp=4,hsdp=2"], "layout.hsdp = 2 with zero = 0: there are no shards to replicate"),
        (["verify", "--layout", "dp=4,zero=2,hsdp=3"], "layout.hsdp = 3 does not divide dp = 4"),
        (["verify", "--machine.device", "cuda"], "machine.device = cuda"),
        (["verify", "--steps", "²"], "--steps ² is not a number of steps"),
        (["verify", "--steps", ""], "--steps  is not a number of steps"),
        (
            ["train", "--train.reduce_dtype", "float32"],
            "train.reduce_dtype = float32 without bfloat16 weights under ZeRO",
        ),
    ],
)
def test_more_wrong_requests(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_request_too_large_for_memory_is_one_line(capsys, tmp_path):
    """A batch whose numbers alone take 8 TB."""
    words = [
        "train",
        "--data.path",
        str(tmp_path / "t.txt"),
        "--data.cache",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    (tmp_path / "t.txt").write_text("text " * 2000)
    assert main([*words, "--train.batch", "1000000000000", "--model", "tiny"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "memory does not hold the request" in error


def test_dump_config_with_json_is_a_document(capsys):
    assert main(["train", "--layout", "dp=2", "--dump-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["dp"] == 2


def test_verify_takes_a_job_that_train_takes(tmp_path, capsys):
    (tmp_path / "job.toml").write_text("[model]\nlayers = 2\nhidden = 96\nheads = 3\n")
    assert main(["train", str(tmp_path / "job.toml"), "--dump-config"]) == 0
    assert main(["verify", str(tmp_path / "job.toml"), "--dump-config"]) == 0
