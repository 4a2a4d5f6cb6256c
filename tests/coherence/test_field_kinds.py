"""Kinds of faults that people paste, and sane text that looks like them: both sides of
each rule.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.coherence.grade_files import grade_file
from assay.coherence.grading import Grade, Label, grade

SANE = "The ferry leaves at nine from the northern pier, and the crossing takes forty minutes."
BLANKLESS = (
    "Thekeyisunderthestoneinthegardenandthedoorsticksalittlewhenitrains.Pleasefeedthecatswith"
    "thefoodfromthecupboardandnotwiththatfromtheshelf,whichisforthedogsthatwillcomeonsunday."
)


def spliced(word: str) -> str:
    return (
        f"We walked to the {word} market and bought bread {word} and cheese for the {word} journey."
        f" The train was late by {word} ten minutes, so the {word} children sat on the {word} bench"
        f" and read the {word} paper until the {word} guard came by {word} and opened the door."
    )


def kind_of(text: str, **options: str) -> str | None:
    found = grade(text, **options)  # type: ignore[arg-type]
    return found.kind if found.label is Label.DEGENERATE else None


@pytest.mark.parametrize(
    "text",
    [
        SANE + "\n</tool_call>",
        SANE + "\n\n</function_call>\n",
        "Let me look.\n<function=list_files>\n<parameter=path>\n/srv\n</parameter>\n</function>",
        'Booked.{"role":"assistant","tool_calls":[{"id":"c1","arguments":"{}"}]}' + SANE,
        'Reading it now.{"content":null,"tool_call_id":"c9","tool_name":"read"}All done.',
        SANE + '\n<tool_result call_id="c4">\nSent.\n</tool_result>\n' + SANE,
        SANE + "\n<function_results>\n12 files\n</function_results>",
    ],
)
def test_parts_of_calls_and_invented_results_are_leaks(text: str) -> None:
    assert kind_of(text) == "call_leak"


@pytest.mark.parametrize(
    "text",
    [
        "The model closes a call with the tag </tool_call>, which the parser takes away.",
        "Hermes writes calls so:\n\n```\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n```\n",  # noqa: E501
        "Each answer of the XML format ends like this: <tool_result>ok</tool_result> for success.",
        'The body is {"role": "assistant", "tool_calls": []} when nothing is called.',
        'Send this:\n\n```json\n{"role":"assistant","tool_calls":[{"arguments":"{}"}]}\n```\n',
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    ],
)
def test_text_about_calls_is_left_alone(text: str) -> None:
    assert kind_of(text) is None


def test_a_flood_in_blocks_is_found_and_rows_of_code_are_not() -> None:
    block = "<*>\n" * 30
    assert kind_of((block + "<7.7.\n") * 3) == "mark_blocks"
    assert kind_of(("}\n" * 9 + "int main() {\n") * 10) is None
    assert kind_of("##\n" * 9 + "# A title\n\n" + SANE) is None


def test_an_answer_that_restarts_and_grows_is_found_and_lists_are_not() -> None:
    words = SANE.split()
    rounds = [" ".join(words[:n]) for n in range(6, len(words))]
    found = grade("\n".join(rounds))
    assert (found.kind, found.family) == ("growing_restarts", "loop")
    paths = [
        "/usr",
        "/usr/lib",
        "/usr/lib/python3",
        "/usr/lib/python3/dist",
        "/usr/lib/python3/d/x",
    ]
    assert kind_of("\n".join(paths)) is None
    typed = ["g", "gr", "gre", "grep", "grep -r", "grep -r x"]
    assert kind_of("It completes as you type:\n" + "\n".join(typed) + "\n") is None
    assert kind_of("```\n" + "\n".join(rounds) + "\n```\n") is None


def test_a_long_sentence_whose_last_round_is_cut() -> None:
    long = (
        "The committee will meet again on the second Tuesday of the month to hear what the owners"
        " of the two houses by the canal have to say. "
    )
    assert kind_of(long * 3 + long[:40].strip()) == "sentence_loop"
    assert kind_of(long * 2 + long[:40].strip()) is None
    assert kind_of(long * 3 + "After that it will decide.") is None


def test_headers_of_a_prompt_that_run_on() -> None:
    turn = "\n\n### Instruction:\nAnd of {}?\n\n### Response:\nIt is {}.\n"
    text = "It is Lisbon." + turn.format("Spain", "Madrid") + turn.format("Italy", "Rome")
    assert kind_of(text) == "template_leak"
    assert kind_of("A prompt of this format looks so.\n" + text) is None
    assert kind_of("# Notes\n\n### Question\nWhy?\n\n### Answer\nBecause.\n") is None


def test_lost_blanks_are_found_and_long_words_are_not() -> None:
    assert kind_of(BLANKLESS) == "lost_blanks"
    assert kind_of(f"{SANE}\n\n{BLANKLESS}\n\n{SANE}") == "lost_blanks"
    german = "Donaudampfschifffahrtsgesellschaftskapitaen und Rindfleischetikettierungsgesetz. " * 3
    assert kind_of(german + SANE) != "lost_blanks"
    tags = " ".join(
        f"#thankyouforthefoodandthewarmthof{place}" for place in ("rome", "oslo", "bern")
    )
    assert kind_of(f"{SANE} {tags}") != "lost_blanks"


@pytest.mark.parametrize("word", ["přístavu", "lørdagen", "müşteri"])
def test_a_spliced_word_is_found(word: str) -> None:
    found = grade(spliced(word))
    assert (found.kind, found.family) == ("spliced_word", "salad")


def test_a_foreign_dish_and_an_adjective_are_left_alone() -> None:
    dish = (
        "The jalapeño is a chilli. Slice the jalapeño and fry it. A ripe jalapeño turns red, and"
        " dried jalapeño keeps for a year. My uncle grows jalapeño plants; each jalapeño is picked"
        " by hand, and one jalapeño goes into every jar."
    )
    assert kind_of(dish) is None
    assert kind_of(spliced("naïve")) is None


def test_marks_of_a_tokenizer_between_sentences() -> None:
    text = f"{SANE}▁▁{SANE}▁(See below.)▁▁Then we went home.\n\n{SANE}"
    assert kind_of(text) == "tokenizer_marks"
    assert kind_of(f"Load today: ▁▂▃▅▇▅▃▂▁ and yesterday ▁▁▂▂▃▃▂▂▁. {SANE}") is None


@pytest.mark.parametrize(
    "text",
    [
        "Kifak ya 7abibi? Sho 3am ta3mel hal2? Ana ray7a 3al souk ma3 okhti, w ba3den 7a nerja3 3al"
        " beit. Law baddak teje ma3na, 2oulli abel el sa3a 5. Ma tensa tjib ma3ak 2akel w chi 7elo.",  # noqa: E501
        "Jin1tian1 wo3 qu4 shu1dian4 mai3 shu1. Shu1dian4 hen3 da4, ren2 hen3 duo1. Wo3 mai3 le5"
        " liang3 ben3 shu1, yi1 ben3 gei3 ma1ma5, yi1 ben3 gei3 wo3 zi4ji3. Ran2hou4 hui2jia1.",
        "\n".join(
            [
                "2Na + 2H₂O → 2NaOH + H₂↑",
                "BaCl₂ + Na₂SO₄ → BaSO₄↓ + 2NaCl",
                "2C₂H₂ + 5O₂ → 4CO₂ + 2H₂O",
                "P₄O₁₀ + 6H₂O → 4H₃PO₄",
                "3Cu + 8HNO₃ → 3Cu(NO₃)₂ + 2NO + 4H₂O",
                "SiO₂ + 4HF → SiF₄ + 2H₂O",
                "2Fe + 3Cl₂ → 2FeCl₃",
                "MnO₂ + 4HCl → MnCl₂ + Cl₂ + 2H₂O",
            ]
        ),
        "#bookstagram #bookworm #booklover #bibliophile #currentlyreading #tbrpile #readersofig"
        " #bookishlife #instabooks #bookcommunity #readmorebooks #bookaddict #fantasybooks"
        " #booknerd #bookshelf #igreads #romancebooks #indieauthor #bookrecs #shelfie #yabooks",
        "Ten phrases in Dothraki:\n\n"
        "1. M'athchomaroon – Hello, with respect\n2. Hash yer dothrae chek? – How are you?\n"
        "3. Anha zhilak yera – I love you\n4. Me nem nesa – It is known\n"
        "5. Fonas chek – Hunt well, goodbye\n6. Yer shekh ma shieraki anni – You are my sun and stars\n"  # noqa: E501
        "7. San athchomari yeraan – Much honour to you\n8. Athdavrazar – Excellent\n",
    ],
)
def test_letters_as_digits_tones_formulas_tags_and_made_up_languages_are_sane(text: str) -> None:
    assert kind_of(text) is None


def test_numbers_strewn_over_words_are_a_salad_still() -> None:
    text = (
        "the1 harbour4 was quiet0 and the8 boats lay1 still but4 that0 was9 not the1 end of6 it"
        " 44they0 have1 seen the4 fire and1 so0 have we8 with4 this1 one"
    )
    assert kind_of(text) == "digit_salad"


def graded(tmp_path: Path, text: str) -> Grade:
    path = tmp_path / "output.txt"
    path.write_text(text, encoding="utf-8")
    return grade_file(str(path)).grade


def test_halves_of_a_letter_in_two_events_join(tmp_path: Path) -> None:
    event = (
        'data: {"id":"a","object":"chat.completion.chunk","choices":[{"index":0,"delta":%s}]}\n\n'
    )
    pieces = ['"So "', r'"\ud83c"', r'"\udf31"', '" it grows."']
    stream = "".join(event % f'{{"content":{piece}}}' for piece in pieces) + "data: [DONE]\n"
    found = graded(tmp_path, stream)
    assert (found.label, found.total_chars) == (Label.OK, len("So x it grows."))


def test_what_a_script_prints_is_its_output_and_not_its_input(tmp_path: Path) -> None:
    head = 'Input [Text 0]: "<s>[INST] Say hello. [/INST]"\nOutput [Text 0 Beam 0]: "{}"\n'
    assert graded(tmp_path, head.format("Hello, and welcome.")).label is Label.OK
    assert graded(tmp_path, head.format("Hello" + " the" * 40)).kind == "the_the_the"


def test_an_answer_in_the_reasoning_field_of_a_printed_reply(tmp_path: Path) -> None:
    reply = (
        "ChatCompletion(id='1', choices=[Choice(finish_reason='stop', index=0, message="
        "ChatCompletionMessage(content='', reasoning_content='It is four.'), stop_reason=None)])"
    )
    found = graded(tmp_path, reply)
    assert (found.label, found.kind) == (Label.EMPTY, "answer_in_reasoning_field")


@pytest.mark.parametrize(
    "body",
    [
        '{"choices":[{"index":0,"finish_reason":"stop","message":{"content":%s}}]}'
        % ('[{"text":' * 450 + '"x"' + "}]" * 450),
        '{"created":1%s,"choices":[{"index":0,"message":{"content":"Four."}}]}' % ("0" * 400),
        r'{"id":"\ud800","choices":[{"index":0,"message":{"content":"Fo\udc00ur."}}]}',
        '{"choices":[{"message":{"tool_calls":[{"function":{"name":"f","arguments":"%s"}}]}}]}'
        % ("[" * 100_000),
    ],
    ids=["nested parts", "401 digits", "surrogates", "deep arguments"],
)
def test_hostile_json_is_graded_or_left_and_never_breaks(tmp_path: Path, body: str) -> None:
    found = graded(tmp_path, body)
    assert found.label in set(Label)
    if "Four." in body:
        assert found.total_chars == len("Four.")


FAULTS = {
    "run-on": " the" * 26,
    "phrase": " of the sea" * 20,
    "flood": "!" * 200,
    "digits": "1" * 200,
    "tokens": "<|im_start|>" * 6,
    "broken": "\ufffd" * 40,
    "brackets": "{}" * 60,
    "lost blanks": BLANKLESS,
    "spliced": spliced("přístavu"),
    "call": "Done.</tool_call>",
}
AROUND = (
    SANE,
    "Thank you for asking. Here is what I found.\n\nThe mill was built in 1820, and it closed in"
    " 1911 when the river changed its course.",
)


@pytest.mark.parametrize("separator", [" ", "\n", "\n\n"])
@pytest.mark.parametrize("name", FAULTS)
def test_sane_text_before_or_after_frees_no_fault(name: str, separator: str) -> None:
    fault = FAULTS[name]
    assert grade(fault).label is Label.DEGENERATE
    for sane in AROUND:
        for text in (
            sane + separator + fault,
            fault + separator + sane,
            sane + separator + fault + separator + sane,
        ):
            assert grade(text).label is Label.DEGENERATE, text
