"""Special tokens: leaks are found, and tokens that a text names, shows or quotes are left alone."""

from __future__ import annotations

import pytest

from assay.coherence.grading import Label, grade

TEMPLATE = "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"

NAMED = [
    "The tool is called functions.get_time in the schema, and the assistant calls it by that name.",
    "Roles in this chat:\n\nassistant\nThe model.\n\nuser\nThe person who asks.",
    (
        "A harmony model opens its thoughts with <|channel|>analysis<|message|> and ends them with"
        " <|end|>; the answer follows."
    ),
    (
        "BERT puts [CLS] at the start of the input and [SEP] between two sentences; one word in"
        " seven becomes [MASK]."
    ),
    (
        "Stop tokens per family:\n- <|im_end|>: Qwen, Yi\n- <|eot_id|>: Llama 3\n- <end_of_turn>:"
        " Gemma\n- </s>: Mistral"
    ),
    "| token | meaning |\n|---|---|\n| <|im_start|> | begins a turn |\n| <pad> | padding |",
    "The chat template looks like this:\n\n"
    + "".join(f"    {line}\n" for line in TEMPLATE.splitlines())
    + "\nEach turn ends so.",
    f"A ChatML prompt is written so:\n\n{TEMPLATE}\nand the model goes on from there.",
    f"```\n{TEMPLATE}```\nis what the template makes of it.",
    "".join(f"> {line}\n" for line in TEMPLATE.splitlines()) + "\nThat is the prompt.",
    "T5 marks the masked spans with sentinel tokens such as <extra_id_0> and <extra_id_1>.",
    (
        "Das Modell hört nicht auf, weil der Stopp-Token <|im_end|> fehlt; dort steht nur"
        " <|endoftext|>."
    ),
    "模型没有停下来，因为停止词元<|im_end|>没有写进配置里。",
    "Set eos_token = <|eot_id|>. If you see <|end_of_text|> in the output, the template is wrong.",
    (
        "The reasoning parser is off: the template opens the tag <think>, so only the tag </think>"
        " comes from the model."
    ),
    "Raw harmony text reads `analysis...assistantfinal...` when its special tokens are dropped.",
    "The roles are:\n\nuser\nassistant\nsystem\n\nEach message has one of them.",
    (
        "Old models use [INST] and [/INST] as markers around the user's turn, and <<SYS>> around"
        " the prompt."
    ),
    "Gemma 4 ends a turn with the token <turn|> and begins it with <|turn>, followed by the role.",
    (
        "The filler tokens [control_8] to [control_20] of the vocabulary are never produced by a"
        " healthy model."
    ),
    (
        "class Bot:\n    def name(self):\n        return self.user\n\n    def base(self):\n       "
        " return self.model\n"
    ),
    "x = arr[mask]\ny = table[reserved_1]\nprint(x[special_2])\n",
    "The virtual assistant\nanswers the user\nand calls the model\n",
    "<think>\nA word on rain.\n</think>\n\nIt rains.",
    "The answer is 4.<|im_end|>",
    (
        "DeepSeek uses <｜begin▁of▁sentence｜>, <｜User｜> and <｜Assistant｜>, and ends with"
        " <｜end▁of▁sentence｜>."
    ),
    (
        "1. `[INST]` begins an instruction.\n2. `[/INST]` ends it.\n\nSo a prompt reads <s>[INST]"
        " Hello [/INST] Hi</s>."
    ),
    "Gemma marks a turn with <start_of_turn>user and ends it with <end_of_turn>.",
    "Here is a dialogue.\n\nUser: Hi.\nAssistant: Hello.\nUser: Bye.\nAssistant: Goodbye.",
    (
        "Reporter: How did you begin?\nWriter: I wrote letters.\nReporter: To whom?\nWriter: To my"
        " aunt."
    ),
]

LEAKED = [
    "[gMASK]<sop>Two and two is four.",
    "<s>Rome is a city in Italy.",
    "<|eom_id|>",
    "assistantanalysisWe look it up first.",
    "commentaryI will call the tool now.",
    'to=functions.get_time {"zone": "UTC"}',
    'functions.get_time:0 {"zone": "UTC"}',
    "assistant\n\nRome lies on the Tiber.",
    "It is noon.<|channel|>analysis<|message|>Now what does the user want?",
    (
        "Rome is the capital.\nUser: And of Spain?\nAssistant: Madrid.\nUser: And of"
        " Peru?\nAssistant: Lima."
    ),
    'commentary to=functions.get_weather json{"city": "Oslo"}',
    "Paris is the capital.[control_129][control_130] It lies on the Seine.",
    "Paris[control_129] is the capital of France.",
    "Sure.<|im_end|>\n<|im_start|>user\nMore",
    "The answer is 42.<|endoftext|>The next document is about cats and dogs.",
    (
        "The capital of France is Paris. <|endoftext|> The capital of Spain is Madrid."
        " <|endoftext|> The"
    ),
    "Hello there, <|reserved_special_token_12|> how are you today?",
    "I like it. ]~b]user\nmore ]~b]ai\n",
    "The capital<unused12> of France is Paris.",
    "The <unk> was <unk> in the <unk> of <unk> town.",
    "analysisThe user wants a joke. Keep it short.assistantfinalWhy did the hen",
    "analysisWe need to find the number of apples and then",
    'We should answer.assistantcommentary to=functions.get_weather json{"city": "Oslo"}',
    "Okay, think. It is 4.\n</think>\n\nThe answer is 4.",
    "It is 4.assistant\n\nIt is 4.",
    "Yes!user\nAnd then?\nassistant\nNo",
    "It is warm.\nuser\nAnd in Rome?\nassistant\nWarm too.\nuser\n",
    "The capital is Paris.<turn|>\n<|turn>user\nMore",
    '[TOOL_CALLS][{"name": "get_weather", "arguments": {}}]',
    "The answer is 4.<|return|>",
    "Rome <end_of_turn> <start_of_turn>user more",
    "<|channel|>analysis<|message|>Let me think<|end|>",
    "Good day.<｜end▁of▁sentence｜>Next one.",
    "[|assistant|] Hello [|endofturn|]",
    "I will call it.<|tool_calls_section_begin|><|tool_call_begin|>functions.ls:0<|tool_call_end|>",
]


@pytest.mark.parametrize("text", NAMED)
def test_a_token_that_is_named_is_no_leak(text: str) -> None:
    for finish_reason in (None, "stop"):
        result = grade(text, finish_reason=finish_reason)
        assert result.label is Label.OK, result


@pytest.mark.parametrize("text", LEAKED)
def test_a_token_that_leaks_is_found(text: str) -> None:
    result = grade(text)
    assert result.label is Label.DEGENERATE and result.kind in {
        "special_token_leak", "template_leak", "think_tag_leak", "special_token_flood",
    }, result  # fmt: skip


def test_the_closing_tag_alone_counts_beside_a_reasoning_field_too() -> None:
    result = grade(
        "So it is four.\n</think>\n\nFour.", reasoning="Two and two.", finish_reason="stop"
    )
    assert (result.kind, result.onset_char) == ("think_tag_leak", 15)
