"""Plans: what texts mean, what they choose, and what is refused."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero3d.errors import ConfigError
from zero3d.tensor.plan import ARGUMENTS, OTHER_NAMES, Chosen, Style, choose, parse

PATHS = ["blocks", "blocks.0", "blocks.0.up", "blocks.0.down", "blocks.10", "blocks.10.up", "head", "head.weight"]
NAMES = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8)


@st.composite
def styles(draw: st.DrawFn) -> Style:
    name = draw(st.sampled_from(sorted(ARGUMENTS)))
    least, most = ARGUMENTS[name]
    kinds = NAMES if name in ("divide", "regroup") else st.integers(1, 512).map(str)
    return Style(name, tuple(draw(st.lists(kinds, min_size=least, max_size=min(most, 4)))))


@given(st.lists(styles(), min_size=1, max_size=4))
def test_what_is_written_is_read(written: list[Style]) -> None:
    assert parse(" + ".join(map(str, written)), "here") == tuple(written)
    assert parse("+".join(map(str, written)).replace(", ", ","), "here") == tuple(written)


@pytest.mark.parametrize(("theirs", "ours"), OTHER_NAMES.items())
def test_names_of_transformers_mean_the_same(theirs: str, ours: str) -> None:
    assert parse(theirs, "here") == (Style(ours),)


def test_numbers_are_read_in_order() -> None:
    (style,) = parse("qkv( 8 ,2 )", "here")
    assert style.numbers == (8, 2)
    assert parse("gather + divide(num_heads, split_size)", "x")[1].arguments == ("num_heads", "split_size")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("colwize", "Did you mean colwise?"),
        ("gather + rowwize", "Did you mean rowwise?"),
        ("qwertz", "Styles: colwise, kv"),
        ("", "Styles:"),
        ("colwise rowwise", ""),
        ("colwise(", "Did you mean colwise?"),
        ("colwise(8", "Did you mean colwise?"),
        ("colwise +", "Styles:"),
        ("colwise(0)", "0 to 1 arguments, whole numbers from 1"),
        ("colwise(8, 8)", "0 to 1 arguments"),
        ("colwise(-8)", ""),
        ("colwise(heads)", "whole numbers from 1"),
        ("qkv", "qkv takes 2 arguments, whole numbers from 1"),
        ("qkv(8)", "qkv takes 2 arguments"),
        ("rowwise(8)", "rowwise takes no arguments."),
        ("divide", "divide takes 1 to 99 arguments, names"),
    ],
)
def test_what_is_no_style_is_refused_by_the_pattern_that_has_it(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=r'"blocks\.\*\.up" has the style') as caught:
        parse(text, "blocks.*.up")
    assert hint in caught.value.hint
    assert caught.value.hint.endswith((".", "?"))


def test_patterns_choose_by_whole_paths_in_the_order_of_the_model() -> None:
    chosen = choose({"head": "vocab", "blocks.*.up": "colwise"}, PATHS, {})
    assert [(one.path, str(one.styles[0])) for one in chosen] == [
        ("blocks.0.up", "colwise"),
        ("blocks.10.up", "colwise"),
        ("head", "vocab"),
    ]


def test_later_patterns_count_before_earlier_and_the_users_before_the_models() -> None:
    plan = {"blocks.*.up": "colwise", "blocks.10.*": "rowwise", "head": "vocab"}
    found = {one.path: str(one.styles[0]) for one in choose(plan, PATHS, {"*.up": "kv"})}
    assert found == {"blocks.0.up": "kv", "blocks.10.up": "kv", "head": "vocab"}
    found = {one.path: str(one.styles[0]) for one in choose(plan, PATHS, {})}
    assert found == {"blocks.0.up": "colwise", "blocks.10.up": "rowwise", "head": "vocab"}


def test_nothing_is_said_of_what_lies_in_a_module_that_stays_whole() -> None:
    chosen = choose({"blocks.*.up": "colwise", "head.weight": "colwise"}, PATHS, {"blocks.0": "replicate"})
    assert [one.path for one in chosen] == ["blocks.10.up", "head.weight"]
    # blocks.1 is no prefix of blocks.10 by its modules.
    assert Chosen("blocks.1", ()).holds("blocks.1.up") and not Chosen("blocks.1", ()).holds("blocks.10.up")


def test_a_pattern_of_the_users_that_matches_nothing_is_refused_and_the_models_is_not() -> None:
    assert choose({"blocks.*.gate": "colwise"}, PATHS, {}) == []
    with pytest.raises(ConfigError, match=r'no module matches "blocks\.\*\.upp"') as caught:
        choose({}, PATHS, {"blocks.*.upp": "colwise"})
    assert "blocks.0.up" in caught.value.hint
    with pytest.raises(ConfigError, match='no module matches "zzz"') as caught:
        choose({}, PATHS, {"zzz": "colwise"})
    assert "named_modules" in caught.value.hint


@given(st.dictionaries(st.sampled_from(["*", "blocks.*", "*.up", "head", "head.*", "no.*"]), styles().map(str)))
def test_each_path_is_chosen_at_most_once_and_as_the_model_orders_them(plan: dict[str, str]) -> None:
    chosen = [one.path for one in choose(plan, PATHS, {})]
    assert chosen == [path for path in PATHS if path in chosen]
