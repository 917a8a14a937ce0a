"""What a person is told of a mixture of experts that cannot be, and which layers have one."""

import pytest

from shoal.spec.errors import RequestError
from shoal.spec.fields import walk
from shoal.spec.moe import MoESpec


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"top_k": 9}, "top_k", "exceeds the 8 experts; 8 would do"),
        ({"groups": 3}, "groups", "does not divide the 8 experts; 1, 2, 4 or 8 would"),
        ({"groups": 4, "groups_kept": 5}, "groups_kept", "exceeds groups = 4; 4 would do"),
        ({"groups": 4, "groups_kept": 1, "top_k": 3}, "top_k", "exceeds the 2 experts of 1 groups; 2 would do"),
        ({"groups": 8, "groups_kept": 4}, "group_score", "a group has one; max would do"),
        ({"router": "softmx"}, "router", "did you mean softmax?"),
        ({"router": "hash"}, "router", "is not one of softmax, sigmoid"),
        ({"balance": "rank"}, "balance", "is not one of sequence, micro_batch"),
        ({"experts": 0}, "experts", "must be at least 1"),
        ({"capacity": -1.0}, "capacity", "must be at least 0"),
        ({"every": 0}, "every", "must be at least 1"),
        ({"scaling": 0.0}, "scaling", "must be more than 0"),
        ({"aux_loss": float("nan")}, "aux_loss", "is not a finite number"),
        ({"shared_gate": True}, "shared_gate", "shared_experts = 1 would do"),
        ({"top_k": 1}, "normalised", "so that the router learns nothing; false would do"),
    ],
)  # fmt: skip
def test_errors_name_the_field_and_what_would_do(changes, field, words):
    with pytest.raises(RequestError) as error:
        MoESpec(**changes)
    assert error.value.field == f"model.moe.{field}"
    assert words in str(error.value) and "\n" not in str(error.value)


def test_experts_must_divide_among_ranks():
    with pytest.raises(RequestError) as error:
        MoESpec(experts=12).check_ranks(8)
    assert error.value.field == "layout.ep"
    assert str(error.value) == "layout.ep = 8 does not divide the model's 12 experts; 1, 2, 3, 4, 6 or 12 would"
    MoESpec(experts=12).check_ranks(4)
    with pytest.raises(RequestError, match=r"12 experts; 1, 2 or 4 would$"):
        MoESpec(experts=12).check_ranks(8, space=8)  # 3 expert ranks cannot be carved out of 8


def test_derived_fields_are_filled_in():
    spec = MoESpec(expert_ffn=24, groups=4, shared_experts=2)
    assert (spec.shared_ffn, spec.groups_kept, spec.limited, spec.shared_width) == (24, 4, False, 48)
    assert MoESpec(groups=4, groups_kept=2).limited and MoESpec().shared_width == 0


def test_which_layers_have_experts():
    def layers(**changes):
        return [layer for layer in range(8) if MoESpec(**changes).at(layer)]

    assert layers() == list(range(8))
    assert layers(first_dense=3) == [3, 4, 5, 6, 7]
    assert layers(every=2) == [1, 3, 5, 7]
    assert layers(every=3, first_dense=3) == [5]


def test_every_field_says_what_it_is():
    assert all(field.help and field.type for field in walk(MoESpec, "model.moe"))
