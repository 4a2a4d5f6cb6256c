"""Chat templates: programs that somebody else wrote, and the token that they end an answer with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from assay.checkpoint import render
from assay.checkpoint.rules.chat_template import template_problem, turn_end
from checkpoint.asking import Ask
from checkpoint_samples import edit_json, llama

SPECIAL = (("bos_token", "<s>"), ("eos_token", "</s>"))
ADDED = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|stop|>",
    "<|stop",
    "[INST]",
)
LOOP = "{% for message in messages %}"
CHATML = (
    LOOP + "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%"
    " endfor %}"
)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ("<|im_end|>",)),
        (LOOP + "{{ message.content }}{{ eos_token }}{% endfor %}", ("</s>",)),
        (LOOP + "{% if message.role == 'user' %}[INST] {{ message.content }}{% else %} {{ message.content | trim }}"  # noqa: E501
         "</s>{% endif %}{% endfor %}", ("</s>",)),
        # A last answer ends with another token than those before it.
        (LOOP + "{{ message.content }}{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}",  # noqa: E501
         ("<|return|>", "<|end|>")),
        # two in a row, the longer name
        (LOOP + "{{ message.content }}<|end|><|stop|>{% endfor %}", ("<|end|>", "<|stop|>")),
        (LOOP + "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% endfor %}", ("<|im_end|>",)),  # noqa: E501
        # Nothing ends a turn here: what follows an answer begins the next one.
        (LOOP + "<|im_start|>{{ message.content }}{% endfor %}", ()),
        (LOOP + "{{ message.content }} and more text</s>{% endfor %}", ()),
        ("{% if messages %}{{ raise_exception('never') }}{% endif %}", ()),
        ("{{ messages.nothing.at.all }}", ()),
    ],
)  # fmt: skip
def test_the_token_after_an_answer(template: str, ends: tuple[str, ...]) -> None:
    assert turn_end(template, SPECIAL, ADDED) == ends


def chat(folder: Path, template: str, **configs: Any) -> None:
    """A Llama whose tokenizer knows <|im_end|> as 316."""
    llama(folder)
    tokenizer = folder / "tokenizer.json"
    text = tokenizer.read_text().replace('"content": "<|user|>"', '"content": "<|im_end|>"')
    tokenizer.write_text(text)
    edit_json(folder / "tokenizer_config.json", chat_template=template, added_tokens_decoder=...)
    for name in ("config", "generation_config"):
        if name in configs:
            edit_json(folder / f"{name}.json", eos_token_id=configs[name])


END, BASE = 319, 2


@pytest.mark.parametrize(
    ("config", "generation", "said"),
    [
        (BASE, BASE, ["nothing stops there"]), ([BASE, END], [BASE, END], []), (END, END, ["the tokenizer ends with '</s>'"]), (BASE, [END, BASE], []),  # noqa: E501
        ([BASE, END], BASE, ["drops end tokens of config.json: [319]", "nothing stops there"]),
        ([BASE, END], END, ["drops end tokens of config.json: [2]"]), (END, BASE, ["config.json ends at [319]", "nothing stops"]),  # noqa: E501
        ([BASE, END], ..., []), (BASE, ..., ["nothing stops there"]),
    ],
)  # fmt: skip
def test_engines_must_stop_where_the_template_ends_a_turn(
    ask: Ask, tmp_path: Path, config: Any, generation: Any, said: list[str]
) -> None:
    chat(tmp_path / "m", CHATML, config=config, generation_config=generation)
    code, report = ask(tmp_path / "m", "--allow-unverified", "--hash", "none")
    titles = [f["title"] for f in report["findings"] if f["id"] == "checkpoint.tokenizer_conflict"]
    assert code == 0  # warnings: a server can be told otherwise
    assert len(titles) == len(said)
    for words in said:
        assert any(words in title for title in titles), titles


def test_the_tokenizers_own_end_token_is_one_that_engines_stop_at(ask: Ask, tmp_path: Path) -> None:
    chat(tmp_path / "m", CHATML, config=BASE, generation_config=BASE)
    edit_json(tmp_path / "m" / "tokenizer_config.json", eos_token="<|im_end|>")
    _, report = ask(tmp_path / "m", "--allow-unverified", "--hash", "none")
    assert not any("nothing stops" in f["title"] for f in report["findings"])


# Templates that never end or fill memory. Each is refused in bounded time, and nothing of it runs
# in this process.

BOMBS = {
    "a power": "{{ 9**(9**9) }}{{ messages }}",
    "a power in a condition": "{% if 9**(9**9) > 1 %}{{ messages }}{% endif %}",
    "a long text": "{{ 'a' * (4 * 10**9) }}{{ messages }}",
    "a list": "{{ [0] * (4 * 10**9) }}{{ messages }}",
    "loops": (
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in messages %}{% endfor %}{%"
        " endfor %}{% endfor %}"
    ),
    "text in a loop": LOOP + "{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endfor %}",
    "wordwrap": "{{ ('a ' * 30000000) | wordwrap(1) }}{{ messages }}",
    "padding": "{{ '%2000000000d' % 3 }}{{ messages }}",
    "centre": "{{ 'a' | center(2000000000) }}{{ messages }}",
    "doubling": (
        "{% set ns = namespace(t='aaaaaaaa') %}"
        + "{% set ns.t = ns.t + ns.t %}" * 40
        + "{{ ns.t }}{{ messages }}"
    ),
    "itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}{{ messages }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_does_not_end_is_refused_in_time(name: str) -> None:
    began = time.process_time()
    problem = template_problem(BOMBS[name])
    assert time.process_time() - began < 2  # of this process; the other has bounds of its own
    # A range of more than 100,000, or a macro without an end, is an error that the template would
    # raise in a server too.
    assert (
        problem is None
        if name == "itself"
        else problem is not None and "does not finish" in problem
    ), problem


def test_a_bomb_is_one_finding(ask: Ask, tmp_path: Path) -> None:
    llama(tmp_path / "m")
    edit_json(tmp_path / "m" / "tokenizer_config.json", chat_template=BOMBS["a power"])
    code, report = ask(tmp_path / "m", "--allow-unverified", "--hash", "none")
    titles = [
        f["title"] for f in report["findings"] if f["id"] == "checkpoint.chat_template_invalid"
    ]
    assert (code, len(titles)) == (1, 1)
    assert "does not finish two messages" in titles[0]


def test_a_template_cannot_reach_the_system(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for body in (
        f"cycler.__init__.__globals__.os.system('touch {mark}')",
        (
            "messages.__class__.__base__.__subclasses__()[0].__init__.__globals__['os'].system('touch"
            f" {mark}')"
        ),
    ):
        assert (
            template_problem("{{ " + body + " }}{{ messages }}") is None
        )  # it raises, and that is all
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is not text"), ([1], "is not text"), ("  ", "is empty"), ("{% for %}", "does not parse"),  # noqa: E501
        ("hello", "never uses the messages"), ("a" * 500_000, "characters long"), ("{{ " + "(" * 9000, "too deeply"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_is_no_template(text: Any, says: str) -> None:
    problem = template_problem(text)
    assert problem is not None
    assert says in problem


def test_a_program_that_fails_is_no_runaway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render.sys, "executable", "/does/not/exist")
    assert render.render(CHATML + "{# another #}", ()) == ()
