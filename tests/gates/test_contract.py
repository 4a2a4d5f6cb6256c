"""The contract file: what it may hold, and that everything else is refused in one line that says
where and what.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import AssayError, UsageError
from assay.fidelity.plan import Plan
from assay.gates.contract import SECTIONS, contract_of, contract_reference, read_contract

DOCS = Path(__file__).parents[2] / "docs" / "gate.md"
SERVER = {"server": "http://localhost:8000"}


def refused(data: dict[str, Any]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        contract_of(data)
    assert "\n" not in caught.value.message
    return caught.value


def test_a_full_contract_gives_each_verb_its_own_options() -> None:
    contract = contract_of(
        tomllib.loads("""
        [subject]
        name = "qwen"
        server = "http://localhost:8000"
        model = "qwen"
        checkpoint = "./qwen"
        logs = ["a.log", "b.log"]
        engine = "hf:./qwen-int4"
        api_key_env = "KEY"
        [reference]
        engine = "hf:./qwen"
        identity = "identity.json"
        [identity]
        [determinism]
        [verify]
        values = true
        serve-args = "vllm serve ./qwen"
        [spec]
        min_acceptance = "60%"
        [check]
        probe = ["france", "story"]
        no_throughput = true
        [tools]
        min_schema_valid = 0.9
        [compare]
        windows = 16
        margin_ppl = "2%"
        """),
        server="http://localhost:8000",
        api_key_env="KEY",
    )
    assert list(contract.sections) == list(SECTIONS)
    identity, determinism = (contract.sections[name] for name in ("identity", "determinism"))
    assert (str(identity.identity), identity.determinism) == ("identity.json", False)
    assert (determinism.identity, determinism.determinism, determinism.model) == (
        None,
        True,
        "qwen",
    )
    check, tools, compare = (contract.sections[name] for name in ("check", "tools", "compare"))
    assert (check.only, check.throughput, check.model) == (("france", "story"), False, "qwen")
    assert (tools.suite, tools.api_key_env) == ("tools", "KEY")
    assert isinstance(compare, Plan)
    assert (compare.windows, compare.margin_ppl) == (16, 0.02)
    assert compare.candidates[0].startswith("hf:./qwen-int4")
    assert contract.sections["verify"].serve_args == "vllm serve ./qwen"
    assert contract.limits("spec") == {"min_acceptance": 0.6}
    assert contract.limits("tools") == {"min_schema_valid": 0.9}
    assert contract.limits("compare") == {}


def test_limits_are_no_part_of_what_is_measured() -> None:
    """A limit may change without that a check compares no more with its reference."""
    plain, bound = (
        contract_of({"subject": SERVER, "check": given}) for given in ({}, {"min_tokens_per_s": 30})
    )
    assert plain.sections["check"].facts() == bound.sections["check"].facts()


def test_the_pack_is_an_engine_and_the_server_the_candidate() -> None:
    for reference, spec in (
        ({"pack": "a.pack"}, "pack:a.pack"),
        ({"pack": "a.pack", "key": "k"}, "pack:a.pack?key=k"),
        ({"pack": "a.pack", "key": "k", "head": "./m"}, "pack:a.pack?head=m&key=k"),
    ):
        assert (
            contract_of({"subject": SERVER, "reference": reference, "check": {}}).reference == spec
        )
    data = {"subject": SERVER, "reference": {"engine": "hf:./m"}, "compare": {}}
    assert contract_of(data).sections["compare"].candidates == ("http://localhost:8000",)
    assert contract_of(data, server="http://other:1").sections["compare"].candidates == (
        "http://other:1",
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "asks for nothing"),
        ({"subject": SERVER}, "asks for nothing"),
        ({"chek": {}}, "unknown section [chek], the nearest is [check]"),
        ({"check": 3}, "check must be a section"),
        ({"check": [{}]}, "check must be a section"),
        ({"check": {}}, "[check] has nothing to examine: [subject] names no server"),
        ({"verify": {}}, "names no checkpoint"),
        ({"spec": {}}, "names no logs and no server"),
        ({"subject": {"serve": "x"}, "check": {}}, "[subject]: unknown option 'serve', the nearest is 'server'"),  # noqa: E501
        ({"subject": {"server": 8000}, "check": {}}, "server = 8000: not a text"),
        ({"subject": SERVER, "check": {"sampels": 3}}, "[check]: unknown option 'sampels', the nearest is 'samples'"),  # noqa: E501
        ({"subject": SERVER, "check": {"samples": "3"}}, "samples = '3': not a whole number"),
        ({"subject": SERVER, "check": {"samples": True}}, "samples = True: not a whole number"),
        ({"subject": SERVER, "check": {"samples": 0}}, "samples must be at least 1"),
        ({"subject": SERVER, "check": {"probe": ["fcat"]}}, "unknown probe 'fcat'"),
        ({"subject": SERVER, "check": {"suite": "tools"}}, "[check]: suite"),
        ({"subject": SERVER, "check": {"model": "x"}}, "[check]: model: the gate gives it"),
        ({"subject": SERVER, "check": {"api-key-env": "x"}}, "api_key_env: the gate gives it"),
        ({"subject": SERVER, "check": {"min_tokens_per_s": "30 tok/s"}}, "not a number"),
        ({"subject": SERVER, "check": {"min_tokens_per_s": -1}}, "at least 0"),
        ({"subject": SERVER, "check": {"min_tokens_per_s": float("nan")}}, "at least 0"),
        ({"subject": SERVER, "tools": {"min_right": "many"}}, "neither a percentage nor a fraction"),  # noqa: E501
        ({"subject": SERVER, "tools": {"min_right": 90}}, "at most 1"),
        ({"subject": SERVER, "tools": {"probe": "fact"}}, "has no place in a contract"),
        ({"subject": SERVER, "spec": {"follow": True}}, "follow: it has no place in a contract"),
        ({"subject": SERVER, "compare": {}}, "[compare] needs a reference"),
        ({"reference": {"engine": "hf:a"}, "compare": {}}, "names no engine and no server"),
        ({"subject": SERVER, "reference": {"engine": "hf:a"}, "compare": {"windws": 1}}, "nearest is 'windows'"),  # noqa: E501
        ({"subject": SERVER, "reference": {"engine": "hf:a"}, "compare": {"reference": "hf:b"}}, "the gate gives it"),  # noqa: E501
        ({"subject": SERVER, "reference": {"engine": "hf:a", "pack": "b"}, "compare": {}}, "an engine and a pack"),  # noqa: E501
        ({"subject": SERVER, "reference": {"engine": "hf:a"}, "compare": {"margin_ppl": "5%"}}, "must satisfy"),  # noqa: E501
        ({"subject": SERVER, "reference": {"engine": "hf:a", "key": "k"}, "compare": {}}, "belong to a pack"),  # noqa: E501
        ({"subject": SERVER, "identity": {}}, "[identity] needs a reference"),
        ({"subject": SERVER, "determinism": {"samples": 3}}, "[determinism] takes no keys, and has samples"),  # noqa: E501
        ({"subject": SERVER, "check": {"identity": "x.json"}}, "[check]: identity: it has no place"),  # noqa: E501
        ({"subject": SERVER, "check": {"determinism": True}}, "[check]: determinism: it has no place"),  # noqa: E501
        ({"subject": SERVER, "tools": {"identity-out": "x"}}, "[tools]: identity_out: it has no place"),  # noqa: E501
        ({"subject": SERVER, "reference": {"pakc": "a"}, "check": {}}, "the nearest is 'pack'"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(data: dict[str, Any], said: str) -> None:
    assert said in refused(data).message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "is not TOML"),
        (b"[check", "is not TOML"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
        (b"# x\n" * 400_000, "the most that a contract may have"),
    ],
)
def test_a_file_that_is_no_contract_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "assay.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        read_contract(path)


def test_a_pack_that_is_none_is_one_line(tmp_path: Path) -> None:
    for content in (None, b"", b"\0" * 64):
        pack = tmp_path / "a.pack"
        if content is not None:
            pack.write_bytes(content)
        with pytest.raises(AssayError) as caught:
            contract_of({"subject": SERVER, "reference": {"pack": str(pack)}, "compare": {}})
        assert "a.pack" in caught.value.message
        assert "\n" not in caught.value.message


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UsageError, match="cannot read the contract"):
            read_contract(path)


SCALARS = st.one_of(st.text(max_size=8), st.integers(), st.floats(), st.booleans(), st.none())
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=5), SCALARS)
)
KEYS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(sorted({d.name for s in SECTIONS.values() for d in s.declared()})),
)
NAMES = st.one_of(st.sampled_from(("subject", "reference", *SECTIONS)), st.text(max_size=6))


@given(
    st.dictionaries(
        NAMES, st.one_of(st.dictionaries(KEYS, VALUES, max_size=4), SCALARS), max_size=4
    )
)
def test_any_data_is_a_contract_or_one_clear_line(data: dict[str, Any]) -> None:
    try:
        contract = contract_of(data | {"subject": SERVER})
    except AssayError as error:
        assert error.message
        assert "\n" not in error.message
        return
    assert set(contract.sections) == data.keys() & SECTIONS.keys()


@given(st.text(max_size=60))
def test_any_text_is_a_contract_or_one_clear_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("contract") / "assay.toml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with pytest.raises(UsageError) as caught:
        read_contract(path)
    assert "\n" not in caught.value.message


def test_the_contracts_that_are_shown_can_be_read() -> None:
    shown = re.findall(r"^```toml\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.M | re.S)
    shown.append(
        (DOCS.parents[1] / "examples" / "gated-model" / "assay.toml").read_text(encoding="utf-8")
    )
    assert len(shown) == 2
    for text in shown:
        assert contract_of(tomllib.loads(text)).sections


def test_the_page_shows_every_key_as_it_is_declared() -> None:
    """docs/gate.md holds the tables that the declared options give: see `contract_reference`."""
    assert contract_reference() in DOCS.read_text(encoding="utf-8")


CHECKED = {"subject": {"server": "http://a"}, "check": {}}


@pytest.mark.parametrize(
    ("subject", "more", "server", "key", "said"),
    [
        ({"api_key_env": "AWS_SECRET"}, {}, None, None, "a contract names no secret"),
        ({"api_key_env": "AWS_SECRET"}, {}, "http://a", None, "a contract names no secret"),
        ({"api_key_env": "AWS_SECRET"}, {}, "http://a", "KEY", "a contract names no secret"),
        ({}, {}, None, "KEY", "is sent to no server that only"),
        (
            {"engine": "http://b?api_key_env=AWS_SECRET"},
            {},
            "http://a",
            "KEY",
            "it could name a secret",
        ),
        ({"engine": "vllm:m?python=./evil"}, {}, None, None, "it could choose a program to run"),
        ({}, {"check": {"reference_engine": "vllm:m?a=1&python=x"}}, None, None, "a program"),
        ({}, {"spec": {"lossless": "http://b"}}, "http://a", "KEY", "names no other server"),
    ],
)
def test_a_contract_of_a_pull_request_takes_no_secret_and_runs_no_program(
    subject: dict[str, str],
    more: dict[str, dict[str, str]],
    server: str | None,
    key: str | None,
    said: str,
) -> None:
    data = {**CHECKED, **more, "subject": {**CHECKED["subject"], **subject}}
    with pytest.raises(UsageError, match=said):
        contract_of(data, server=server, api_key_env=key)


def test_the_command_line_names_the_key_and_its_server() -> None:
    contract = contract_of(CHECKED, server="http://b", api_key_env="KEY")
    assert (contract.subject.server, contract.sections["check"].api_key_env) == ("http://b", "KEY")
    again = {**CHECKED, "subject": {**CHECKED["subject"], "api_key_env": "KEY"}}
    assert contract_of(again, server="http://b", api_key_env="KEY").subject.api_key_env == "KEY"
