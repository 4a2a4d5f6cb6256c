"""Texts to flag and texts to leave alone, for the tests of the detectors."""

from __future__ import annotations

import base64
import random

GOOD_START = (
    "The harbour was quiet when the ferry came in. Two men tied the ropes, and a woman with a red"
    " scarf waited by the gate until the last passenger had gone. "
)

# (name, text, kind): each begins to fail somewhere and should be named so.
DEGENERATE = [
    ("exclamations", "Paris is" + "!" * 300, "single_char_flood"),
    ("letters", GOOD_START + "G" * 400, "single_char_flood"),
    ("boxes", "Java is a language □" + "□" * 90, "single_char_flood"),
    ("chinese_char", "答案是" + "的" * 200, "single_char_flood"),
    ("newlines", "[1]\n" + "\n" * 200, "newline_loop"),
    ("newlines_with_blanks", '{"a":\n' + " \n" * 80, "newline_loop"),
    ("blanks", "So the answer is" + " " * 500, "blank_flood"),
    ("asterisks", "The capital is * * * * * * * * * * * * * * * * * * * *", "asterisk_attractor"),
    ("asterisk_run", "Answer: " + "*" * 400, "asterisk_attractor"),
    ("the", "It was the the the the the the the", "the_the_the"),
    ("the_mixed_case", "The the The the The the The the", "the_the_the"),
    ("a", "This is a a a a a a a a", "a_a_a"),
    ("delimiters", "Name **: **: **: **: **: **: **: **:", "delimiter_loop"),
    ("commas", "I like apples" + ", " * 100, "delimiter_loop"),
    ("one_word", "Once upon a time " + "garden " * 60, "single_token_loop"),
    ("no_spaces", "Hello " + "foo" * 100, "single_token_loop"),
    ("two_words", "Well, " + "I am " * 80, "phrase_loop"),
    ("three_words", GOOD_START + "of the sea " * 50, "phrase_loop"),
    ("sentence", GOOD_START + "The cat sat on the roof. " * 30, "sentence_loop"),
    ("lines_cut", "Sum: 4.\n" + "So the answer is 4.\n" * 9 + "So the ans", "sentence_loop"),
    ("paragraph", (GOOD_START * 2 + "\n\n") * 8, "sentence_loop"),
    ("chinese_phrase", "故事:" + "我不知道你在说什么," * 30, "phrase_loop"),
    ("thai_phrase", "เรื่อง " + "แมวนั่งอยู่บนหลังคา" * 30, "phrase_loop"),
    (
        "long_period",
        " ".join([f"word{chr(97 + i // 8)}{chr(97 + i % 8)}" for i in range(60)] * 8),
        "phrase_loop",
    ),
    (
        "counter",
        " ".join(f"This is attempt {i} and it did not work for me at all" for i in range(25)),
        "counter_loop",
    ),
    (
        "end_tokens",
        "Hello<|im_end|><|im_end|><|im_end|><|im_end|><|im_end|><|im_end|>",
        "special_token_flood",
    ),
    ("pads", "I am" + "<pad>" * 50, "special_token_flood"),
    ("brackets", "I am [PAD] [PAD] [PAD] [PAD] [PAD] [PAD]", "special_token_flood"),
    ("reserved", "<|reserved_special_token_7|>" * 20, "special_token_flood"),
    ("think_closers", "So. " + "</think>" * 40, "special_token_flood"),
    (
        "unk_strewn",
        "The <unk> of the town was <unk> and then <unk> came along.",
        "special_token_leak",
    ),
    (
        "ran_on",
        "It is 4.<|endoftext|>The following is a list of cities in Italy.",
        "special_token_leak",
    ),
    ("turns", "It is 4.<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>", "template_leak"),
    ("inst", "Sure. [INST] What else? [/INST] Nothing.", "template_leak"),
    ("byte_level", "ĠtheĠcatĠsatĠonĠtheĠmatĠandĠsleptĠallĠday", "tokenizer_marks"),
    (
        "replacement",
        "人生の意\ufffd\ufffd\ufffd、フロント\ufffd\ufffdいてる",
        "replacement_characters",
    ),
    ("controls", "abc\x00\x01\x02\x03 def", "control_characters"),
    ("stutter", "Here is a small small program that prints prints the the words.", "stutter"),
    ("glued_numbers", "The0912 and so2 the20 is a value, but33 they said that91.", "digit_salad"),
    ("strewn_digits", "L 1.\n\n\n\n0\n\n\n0\n\n\n\n\n1", "digit_salad"),
    ("braces", "{}{}{}{}", "bracket_loop"),
    ("ends", "Rome.</s></s></s>", "special_token_flood"),
    (
        "same_blocks",
        "Let me look."
        + "<tool_call>ls\n<arg_key>path</arg_key>\n<arg_value>/</arg_value>\n</tool_call>\n" * 3,
        "repeated_tool_call",
    ),
    ("three_braces", "{}{}{}", "bracket_loop"),
    ("bracket_comma", "),),),),),),),),),", "delimiter_loop"),
    ("brackets_spaced", "[] [] [] [] [] []", "bracket_loop"),
    ("braces_fenced", "```json\n" + "{}" * 12 + "\n```", "bracket_loop"),
    ("braces_after_words", "Here is the object you asked for: " + "{}" * 9, "bracket_loop"),
    (
        "braces_within",
        GOOD_START + "{} " * 16 + "and then the story goes on as before.",
        "bracket_loop",
    ),
    ("braces_in_a_call", "<tool_call>\n" + "{}" * 5 + "\n</tool_call>", "bracket_loop"),
    ("braces_crossed", "}{][}{)(}{][{}][" * 4, "bracket_loop"),
    (
        "identifier",
        "def " + "_".join(["main", "table", "context", "freeze", "order", "hack"] * 5),
        "identifier_soup",
    ),
]

_DRIFT = (
    "stone rock pebble gravel sand dust powder flour grain wheat corn maize barley rye oats hay"
    " straw grass lawn meadow field pasture ranch farm barn stable stall shed hut cabin lodge inn"
    " hotel motel hostel house home dwelling abode residence mansion palace castle fortress tower"
)
DEGENERATE.append(("drift", _DRIFT, "thesaurus_drift"))

_WORDS = [
    "the",
    "of",
    "and",
    "a",
    "in",
    "to",
    ".",
    ",",
    "I",
    "that",
    "is",
    "for",
    "on",
    "v",
    "it",
    "as",
]


def function_salad(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(120))


def soup(seed: int) -> str:
    """Random pieces of words of several languages and of code, as a broken model with a wide
    vocabulary writes.
    """
    rng = random.Random(seed)
    pieces = [
        "ream",
        "enl",
        "aces",
        "imresult",
        "data",
        "Евин",
        "which",
        "arr",
        "testcess",
        "des",
        "Sub",
        "ab",
        "rightarrow",
        "ards",
        "umgress",
        "isch",
        "vyzu",
        "grikal",
        "ION",
        "com",
        "Should",
        "eye",
        "мини",
        "vis",
        "dd",
        "levant",
        "igte",
        "outTract",
        "orm",
        "egal",
        "Neighb",
        "qual",
        "idence",
        "сня",
        "т",
        "lid",
        "erw",
        "inter",
        "dw",
        "lilack",
        "except",
        "up",
        "Anr",
        "ight",
        "setString",
        "util",
        "chem",
        "ically",
        "redits",
        "ünd",
        "漢",
        "の",
        "ของ",
        "quelle",
        "str",
        "uct",
        "ptr",
        "ffee",
        "onucle",
        "Theorem",
        "wik",
        "tracker",
        "ulaire",
        "ñana",
        "obs",
        "cure",
        "pped",
    ]
    return "".join((" " if rng.random() < 0.6 else "") + rng.choice(pieces) for _ in range(200))


_ROWS = [f"| {n} | {n * n} | {'yes' if n % 2 else 'no'} |" for n in range(30)]
_FIGURES = [
    "| what | figure | script (`benchmarks/`) |",
    "|---|---|---|",
    (
        "| Whole servers pass | 10 of 10 healthy vLLM servers (SmolLM2, 41 texts each, H100), with"
        " and without a reference | `server_faults.py` |"
    ),
    (
        "| Damaged ones fail | 14 of 14 damages with a reference; without one 10 fail, 2 are"
        " inconclusive, 2 pass | `server_faults.py` |"
    ),
    (
        "| Sane text is left alone | `grade` flags 10 of 2,172 legitimate texts, 0.46 % [0.25,"
        " 0.85]; it finds 187 of 194 loops, 101 of 106 floods, 181 of 204 salads |"
        " `detector_roc.py` |"
    ),
    (
        "| Checkpoint faults are named | 82 of 82 under their own id, none of 19 whole checkpoints"
        " accused | `verify_zoo.py` |"
    ),
    (
        "| The instrument agrees with its peer | mean KL within 0.3 % of `llama-perplexity` on four"
        " GGUF pairs, top-1 to its last digit | `llama_perplexity_agreement.py` |"
    ),
    (
        "| Intervals hold on real text | 4-bit SmolLM2, 64 windows: 95 % intervals contain the"
        " truth in 95.5 to 98.4 % of draws; with contiguous windows in 46 to 54 % |"
        " `stats_coverage.py` |"
    ),
    (
        "| A 2× fp8 KV cache can break a model | Qwen2.5-Coder-1.5B: Δppl +106 % [+94, +119], KL"
        " 0.85, REJECT; the 0.5B +1.3 % [+1.1, +1.6], MARGINAL; SmolLM2 +0.5 %, ACCEPT |"
        " `kv_codecs.py` |"
    ),
    (
        "| … and a smaller one need not | the same 1.5B with 4-bit integers in groups (KIVI),"
        " 2.99×: Δppl +0.04 % [−0.09, +0.17], KL 0.0026, ACCEPT | `kv_codecs.py` |"
    ),
    (
        "| Codes that a kernel can read token by token | `pca(coding=fixed, gains=3)`, ACCEPT with"
        " tables shared by 32k tokens: 1.5B 5.1× (KL 0.0071; by 1k 3.2×, by 8k 4.8×), SmolLM2 4.4×"
        " (0.0068), and on fresh windows 0.5B 4.7× (0.0076), Gemma 3 3.7× (0.0083) |"
        " `kv_codecs.py` |"
    ),
    (
        "| vLLM's own small caches | SmolLM2, vLLM 0.25.1: fp8 KL 0.0123 and `turboquant_k8v4`"
        " 0.0113 MARGINAL; 4- and 3-bit presets REJECT | `compare_engines.py` |"
    ),
]
"""Rows of a table of measurements, mostly figures and names."""
# (name, text): repetitive or strange, and right so.
LEGITIMATE = [
    ("prose", GOOD_START * 1),
    ("very", "It was a very very very very very good film."),
    ("zero_row", "0 0 0 0 0 0"),
    ("zero_matrix", "\n".join(["0 0 0 0 0 0 0 0"] * 12)),
    (
        "banner",
        "/*****************************\n * Module x\n *****************************/\nint x;\n",
    ),
    ("rule", "Above\n\n*****\n\nBelow\n\n* * *\n\nEnd."),
    ("long_rule", "Title\n" + "=" * 100 + "\nText.\n" + "-" * 100 + "\n"),
    ("password", "Password: **********\nUser: anna\n"),
    ("laugh", "Ha ha ha ha ha! Hahahahaha! No no no no, that is wrong."),
    ("emphasis", "Stop!!!!! I said stop!!!!!!!!"),
    ("dots", "Wait......... what?"),
    (
        "contents",
        "1 Start ............................ 3\n2 Middle ........................... 15\n",
    ),
    ("table", "| n | square | odd |\n|---|---|---|\n" + "\n".join(_ROWS)),
    ("figures", "\n".join(_FIGURES)),
    ("empties", '[{}, [], {}, {}, {}]\n{"a": {}, "b": [], "c": {}}\n{}\n{}\n{}\n'),
    ("empty_objects", "[" + ",".join(["{}"] * 30) + "]"),
    (
        "jsonl_of_empties",
        '{"id": 1, "tags": []}\n{"id": 2, "tags": []}\n{"id": 3, "tags": []}\n' * 4,
    ),
    ("format_string", 'print("{}{}{}{}{}{}{}{}{}{}".format(*row), "{}, " * 20)'),
    ("placeholders", "INSERT INTO t VALUES (" + ", ".join("?" * 40) + ");"),
    ("macro", "\\cventry{}{}{}{}{}{}{}{}{}{}"),
    ("types", "int[][][][][][][][] grid = f()()()()()()()();"),
    ("closers", "".join("  " * n + "}\n" for n in range(30, 0, -1))),
    ("parentheses", "()()()()()()\n(())()()\n((()))\n"),
    ("lambdas", "[](){}(); auto f = {[](){}, [](){}, [](){}};"),
    ("jsfuck", "[][(![]+[])[+[]]+(![]+[])[!+[]+!+[]]+(![]+[])[+!+[]]+(!![]+[])[+[]]]" * 3),
    ("wide_table", "| a | b |\n|" + "-" * 150 + "|" + "-" * 150 + "|\n| 1 | 2 |\n"),
    (
        "ascii_art",
        "```\n" + "\n".join(" " * (12 - i) + "*" * (2 * i + 1) for i in range(12)) + "\n```",
    ),
    ("progress", "[##########################------] 81%"),
    (
        "hexdump",
        "\n".join(f"{16 * i:08x}  " + "00 " * 16 + " |................|" for i in range(40)),
    ),
    (
        "base64",
        "\n".join(base64.b64encode(random.Random(i).randbytes(57)).decode() for i in range(12)),
    ),
    ("base64_zeros", base64.encodebytes(bytes(400)).decode()),
    (
        "dna",
        ">seq\n" + "\n".join("".join(random.Random(i).choices("ACGT", k=60)) for i in range(15)),
    ),
    (
        "json",
        "[" + ",\n ".join(f'{{"id": {i}, "name": "item", "on": true}}' for i in range(30)) + "]",
    ),
    ("csv", "day,n\n" + "\n".join(f"2026-01-{d:02},{d % 3}" for d in range(1, 29))),
    (
        "log",
        "\n".join(
            f"10:00:{s:02} INFO worker-{s % 4} heartbeat ok ms={s * 7 % 13}" for s in range(50)
        ),
    ),
    ("same_log_line", "\n".join(["INFO heartbeat ok"] * 25)),
    ("twenty_lines", "As asked:\n\n" + "\n".join(["I will be on time tomorrow morning."] * 20)),
    (
        "refrain",
        (
            "We sailed at dawn.\n  Row on, row on, row on.\n  Row on, row on, row on.\n\nWe slept"
            " at sea.\n"
        ),
    ),
    ("multiples", ", ".join(str(7 * i) for i in range(1, 80)) + "."),
    (
        "multiplication",
        "\n".join(" ".join(f"{a * b:3}" for b in range(1, 13)) for a in range(1, 13)),
    ),
    ("numbered", "\n".join(f"{i}. Step {i}: press the button." for i in range(1, 31))),
    ("switch", "\n".join(f"    case {i}:\n        return {i * i};" for i in range(40))),
    ("minified", "".join(f"function f{i}(a,b){{return a?b(a-{i}):0}}" for i in range(30))),
    ("quoted_token", 'The template ends a turn with `<|im_end|>` and "<pad>" fills the rest.'),
    ("code_token", "```\n<|im_start|>user\nHi<|im_end|>\n```\nThat is the template."),
    ("end_token_last", "The answer is 4.<|im_end|>"),
    ("html", "<ul>" + "<li><s>old</s> new</li>" * 12 + "</ul>"),
    (
        "chinese",
        "杭州的西湖四季皆美。春天桃红柳绿,游人如织;夏天荷花开放,清香随风而来;秋天满是桂花的甜味。",
    ),
    (
        "japanese",
        "春はあけぼの。やうやう白くなりゆく山ぎは、少し明かりて、紫だちたる雲の細くたなびきたる。",
    ),
    (
        "korean",
        "서울은 대한민국의 수도이며 한강이 도시를 가로지른다. 많은 사람들이 지하철로 출근한다.",
    ),
    (
        "arabic",
        "تقع مدينة فاس في شمال المغرب، وهي من أقدم المدن، ويشتهر سوقها بالجلود والنحاس والتوابل.",
    ),
    ("hindi", "धीरे धीरे सब कुछ बदल गया। गाँव के लोग सुबह सुबह खेतों में जाते हैं और शाम को लौट आते हैं।"),
    (
        "thai",
        ("กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย มีแม่น้ำเจ้าพระยาไหลผ่านกลางเมือง ผู้คนนิยมเดินทางด้วยเรือ"),
    ),
    (
        "russian",
        "Зимой река замерзает, и дети катаются на коньках до самого вечера, пока не зажгут фонари.",
    ),
    (
        "finnish",
        (
            "Kesällä järven rannalla on hiljaista, ja illalla aurinko laskee vasta puoliltaöin"
            " metsän taa."
        ),
    ),
    (
        "translations",
        (
            "| en | ru | zh | ar |\n|---|---|---|---|\n| water | вода | 水 | ماء |\n| bread | хлеб"
            " | 面包 | خبز |"
        ),
    ),
    (
        "double_blank_lines",
        "import os\n\n\ndef a():\n    pass\n\n\ndef b():\n    pass\n\n\ndef c():\n    pass\n",
    ),
    (
        "long_name",
        "def test_that_the_server_answers_with_an_error_when_the_model_is_not_there(): ...",
    ),
    (
        "thinking",
        "Hmm. Wait, let me check again. Hmm, if n is 7 it is 28. Wait, both agree. Good, 28.",
    ),
]
