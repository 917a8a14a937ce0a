"""TOML: what is written reads back, and what cannot be read says where and why."""

import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.spec.build import job_from_tree
from shoal.spec.errors import RequestError
from shoal.spec.job import Job
from shoal.spec.presets import MODELS
from shoal.spec.toml import job_toml, read_toml, write_toml

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
scalars = text | st.booleans() | st.integers() | st.floats(allow_nan=False)
values = scalars | st.lists(scalars | st.lists(scalars, max_size=2), max_size=3)
trees = st.recursive(
    st.dictionaries(text, values, max_size=4), lambda inner: st.dictionaries(text, values | inner, max_size=4)
)


@given(trees)
def test_every_tree_reads_back_as_it_was(tree):
    read = tomllib.loads(write_toml(tree))
    assert read == tree
    assert repr(_sorted(read)) == repr(_sorted(tree))  # == holds 1 for 1.0 and True


def _sorted(tree):
    return {key: _sorted(tree[key]) for key in sorted(tree)} if isinstance(tree, dict) else tree


def test_nan_is_written_as_toml_writes_it():
    assert math.isnan(tomllib.loads(write_toml({"x": math.nan}))["x"])


@given(
    st.fixed_dictionaries(
        {
            "model": st.fixed_dictionaries(
                {},
                optional={
                    "preset": st.sampled_from(sorted(MODELS)),
                    "layers": st.integers(1, 200),
                    "window": st.none() | st.integers(1, 9),
                    "rope": st.fixed_dictionaries({"factor": st.floats(1, 1e6)}),
                    "name": text,
                },
            ),
            "layout": st.sampled_from(["dp=2", "tp=2x2,sp", "pp=4,zero=1,order=pp-tp-dp"]),
            "machine": st.fixed_dictionaries({}, optional={"peak_tflops": st.none() | st.floats(1e-3, 1e6)}),
            "data": st.fixed_dictionaries({}, optional={"path": text, "sequence": st.integers(1, 9999)}),
            "train": st.fixed_dictionaries(
                {},
                optional={
                    "learning_rate": st.floats(0, 10),
                    "seed": st.integers(0, 2**63 - 1),
                    "log": st.lists(st.sampled_from(["tensorboard", "wandb"])),
                },
            ),
        }
    )
)
def test_every_job_survives_its_file(tree):
    job = job_from_tree(tree)
    assert job_from_tree(tomllib.loads(job_toml(job))) == job


def test_a_file_gives_the_job_back(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(job_toml(Job()))
    assert job_from_tree(read_toml(path)) == job_from_tree(read_toml(str(path))) == Job()


def test_a_missing_file_names_its_neighbour(tmp_path):
    (tmp_path / "job.toml").write_text("")
    with pytest.raises(RequestError, match=r"^job = .*jbo.toml does not exist; did you mean .*job.toml\?$"):
        read_toml(tmp_path / "jbo.toml")
    with pytest.raises(RequestError, match=r"^job = nowhere/x.toml does not exist; the path of a TOML file would do$"):
        read_toml("nowhere/x.toml")
    with pytest.raises(RequestError, match=r"^job = .* is a folder; did you mean .*job.toml\?$"):
        read_toml(tmp_path)


@pytest.mark.parametrize(
    "content, why",
    [
        (b"[train]\nsteps = \n", "is not TOML: Invalid value (at line 2, column 9)"),
        (b"[train]\nsteps = 1\nsteps = 2\n", "is not TOML: Cannot overwrite a value (at line 3"),
        (b"x = '\xff'\n", "is not UTF-8 text (byte 5)"),
    ],
)
def test_a_file_that_is_not_toml_says_where(tmp_path, content, why):
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(RequestError) as refused:
        read_toml(path)
    assert why in str(refused.value) and str(refused.value).startswith("job = ")
    assert "\n" not in str(refused.value)
