"""Parts of a job held against each other: what does not fit is refused, with sizes that fit."""

import re

import pytest

from shoal.spec.build import job_from_tree
from shoal.spec.errors import RequestError

LLAMA = {"model": {"preset": "llama3.1-8b"}}


@pytest.mark.parametrize(
    "tree, line",
    [
        ({"layout": "dp=3"}, "train.batch = 16 does not divide over dp = 3 x micro_batches = 1; 15 or 18 would"),
        (
            {"layout": "dp=4,micro_batches=8"},
            "train.batch = 16 does not divide over dp = 4 x micro_batches = 8; 32 would",
        ),
        (
            {**LLAMA, "layout": "tp=5"},
            "layout.tp = 5 does not cut the model's 32 heads, 8 KV heads evenly; 1, 2, 4, 8, 16 or 32 would",
        ),
        (
            {**LLAMA, "layout": "tp=3x3", "train": {"batch": 32}},
            "layout.tp = 3x3 does not cut the model's 32 heads, 8 KV heads and hidden 4096 evenly; "
            "1x1, 2x2, 4x4, 8x8, 16x16 or 32x32 would",
        ),
        (
            {"model": {"heads": 12, "kv_heads": 3, "hidden": 96}, "layout": "tp=2"},
            "layout.tp = 2 does not cut the model's 12 heads, 3 KV heads evenly; 1, 3, 6 or 12 would",
        ),
        (
            {"layout": "pp=8", "train": {"batch": 16}},
            "layout.pp = 8 wants 8 layers, the model has 4; at most 4 would do",
        ),
        ({"layout": "pp=2,v=4"}, "layout.v = 4 with pp=2 wants 8 layers, the model has 4; at most 2 would do"),
        ({"data": {"sequence": 4096}}, "data.sequence = 4096 is longer than model.positions_max = 2048; 2048 would do"),
        (
            {"layout": "cp=3"},
            "data.sequence = 256 does not divide into the 6 parts of layout cp=3; 252 or 258 would, or data.pad=true",
        ),
        (
            {"layout": "tp=4,sp", "data": {"sequence": 250}},
            "data.sequence = 250 does not divide into the 4 parts of layout tp=4,sp; 248 or 252 would, or data.pad=true",
        ),
        (
            {"layout": "cp=8,cp_kind=ulysses"},
            "layout.cp = 8 cannot share out the 4 heads and 4 KV heads of a tensor rank, which ulysses hands around; "
            "1, 2 or 4 would, or cp_kind=zigzag",
        ),
        ({"model": {"vocab": 100}}, "model.vocab = 100 is smaller than the byte tokenizer's 257 ids; 257 would do"),
    ],
)
def test_a_job_whose_parts_do_not_fit_is_refused_with_sizes_that_do(tree, line):
    job = job_from_tree(tree)
    with pytest.raises(RequestError) as refused:
        job.check()
    assert str(refused.value) == line
    section, _, leaf = refused.value.field.partition(".")
    given = tree.get(section, {})
    given = dict(pair.partition("=")[::2] for pair in given.split(",")) if isinstance(given, str) else given
    given = {key: value or "true" for key, value in given.items()}
    for size in re.findall(r"[\dx]+", line[line.rindex(";") :].replace("at most", "")):
        job_from_tree({**tree, section: {**given, leaf: size}}).check()


@pytest.mark.parametrize(
    "layout", ["dp=2", "dp=4,micro_batches=4", "tp=4,sp", "tp=2x2", "pp=4", "cp=4", "dp=2,tp=2,pp=2,sp"]
)
def test_common_layouts_fit_the_default_job(layout):
    job = job_from_tree({"layout": layout})
    job.check()
    assert job.micro_batch * job.layout.dp * job.layout.micro_batches == job.train.batch


def test_more_tensor_ranks_than_kv_heads_is_no_error():
    job_from_tree({**LLAMA, "layout": "tp=32"}).check()


def test_a_token_file_brings_its_own_vocabulary():
    job_from_tree({"model": {"vocab": 100}, "data": {"path": "some.tokens"}}).check()
