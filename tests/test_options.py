"""Options are read, typed and bounded in one place, whoever gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.coherence.options import CheckOptions
from assay.errors import UsageError
from assay.options import Options, declared_options, fraction, numbers, option, sizes
from assay_lab.options import MODES


@dataclass(frozen=True)
class Cooking(Options):
    VERB, AREA = "cook", "kv"

    dish: str
    _: KW_ONLY
    minutes: int = option(10, "Minutes on the fire.", lo=1, hi=600)
    heat: float = option(0.5, "How hot.", form="fraction")
    spices: tuple[str, ...] = option((), "Spice; may be given again.", flag="spice")
    recipe: Path | None = option(None, "File.")
    salted: bool = option(True, "Without salt.", flag="no-salt")
    course: str = option("main", "Course.", choices=("starter", "main"))
    guests: tuple[int, ...] = option((1,), "Numbers of the guests.", form="numbers")
    verbose: bool = option(False, "Say more.", apart=True)
    secret: int = 3


def test_values_are_given_by_field_or_by_flag() -> None:
    found = Cooking.of(
        {
            "dish": "soup",
            "spice": "salt",
            "no_salt": True,
            "heat": "25%",
            "recipe": "a.txt",
            "guests": "1,4-6",
        }
    )
    assert found == Cooking(
        "soup", spices=("salt",), salted=False, heat=0.25, recipe=Path("a.txt"), guests=(1, 4, 5, 6)
    )
    assert Cooking.of({"dish": "soup", "salted": False}) == Cooking("soup", salted=False)
    assert Cooking.of({"dish": Path("soup"), "spices": ["a", "b"], "heat": 1}) == Cooking(
        "soup", spices=("a", "b"), heat=1.0
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"minute": 3}, "cook: unknown option 'minute', the nearest is 'minutes'"),
        ({"zzz": 3}, "cook: unknown option 'zzz'$"),
        ({"minutes": "3"}, "minutes = '3': not a whole number"),
        ({"minutes": True}, "not a whole number"),
        ({"minutes": 0}, "minutes must be at least 1, got 0"),
        ({"minutes": 601}, "minutes must be at most 600, got 601"),
        ({"heat": "hot"}, "neither a percentage nor a fraction"),
        ({"spice": [3]}, "spice = .* not a text"),
        ({"course": "dessert"}, "unknown course 'dessert'"),
        ({"recipe": 3}, "not a path"),
        ({"guests": "x"}, "no number or range"),
        ({"no_salt": "yes"}, "not true or false"),
    ],
)
def test_what_is_wrong_is_named_with_the_area(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        Cooking.of({"dish": "soup", **wrong})
    assert error.value.finding_id == "kv.usage"


def test_what_is_missing_is_named() -> None:
    with pytest.raises(UsageError, match="cook needs dish"):
        Cooking.of({})
    with pytest.raises(UsageError, match=r"menu\.toml: unknown option"):
        Cooking.of({"dish": "soup", "xyz": 1}, where="menu.toml")


def test_facts_are_plain_and_leave_out_what_is_apart() -> None:
    facts = Cooking("soup", recipe=Path("a"), verbose=True).facts()
    assert facts == Cooking("soup", recipe=Path("a")).facts()
    assert facts["recipe"] == "a" and facts["spices"] == [] and facts["secret"] == 3
    assert Cooking.of(Cooking("soup", minutes=3).facts()).minutes == 3


def test_declarations() -> None:
    declared = declared_options(Cooking)
    assert [name for name, d in declared.items() if d.required] == ["dish"]
    assert (declared["salted"].flag, declared["salted"].inverted) == ("no-salt", True)
    assert declared["heat"].shown_default == "50%"
    assert not declared["secret"].listed


def test_numbers_of_other_kinds_are_refused() -> None:
    with pytest.raises(UsageError):
        Cooking("soup", minutes=float("nan"))  # type: ignore[arg-type]


def test_percentages_and_fractions() -> None:
    assert fraction("1%") == pytest.approx(0.01)
    assert fraction("0.25 %") == pytest.approx(0.0025)
    assert fraction("0.03") == pytest.approx(0.03)
    assert sizes("0.1, 3e-3") == (0.1, 0.003)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0,1,28-29", (0, 1, 28, 29)),
        (" 3 - 4 ,, 3", (3, 4)),
        ("", ()),
        ("007", (7,)),
        ("5-5", (5,)),
    ],
)
def test_lists_of_numbers(text: str, found: tuple[int, ...]) -> None:
    assert numbers(text) == found


@pytest.mark.parametrize(
    "text", ["a", "1-", "-1", "1-2-3", "9-3", "1.5", "0-99999999999", "²", "10000", "1;2"]
)
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no number or range"):
        numbers(text)


@given(st.lists(st.integers(0, 9999), unique=True, max_size=20))
def test_numbers_come_back(values: list[int]) -> None:
    assert numbers(",".join(map(str, values))) == tuple(values)


def test_the_modes_of_codecs_are_those_there_are() -> None:
    pytest.importorskip("torch")
    from assay_lab.kv.hook_plan import Mode

    assert tuple(Mode) == MODES


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("budget", 10**400, "too large for a number"),
        ("budget", float("inf"), "finite"),
        ("budget", float("nan"), "at least"),
        ("budget", -(10**400), "too large for a number"),
        ("samples", 10**400, "at most|too large"),
        ("samples", -(10**400), "at least"),
        ("seed", 10**400, "too large|at most"),
        ("model", "a\0b", "NUL"),
    ],
)
def test_numbers_out_of_any_range_are_one_line(name: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        CheckOptions.of({name: value})
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("read", [fraction, sizes])
@pytest.mark.parametrize("text", ["1e999", "-inf", "nan", "9" * 401])
def test_endless_numbers_in_a_text_are_refused(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"such as"):
        read(text)
