"""The probes: what a model is asked, with the checks of its answers."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from assay.coherence.conversation import Context, Probe, Step, Talk, answer_text, user
from assay.coherence.needle import Needle, needle_lengths
from assay.coherence.record import AnswerCheck
from assay.engines import Capability, Message, Reply, read_calls


@dataclass(frozen=True)
class Question:
    """One question asked once. `prompt` is its form for a model that only continues text."""

    name: str
    title: str
    question: str
    prompt: str
    max_tokens: int
    checks: tuple[Callable[[Reply], AnswerCheck], ...] = ()
    needs: frozenset[Capability] = frozenset()
    variants: Sequence[str] = ()

    def talk(self, context: Context, variant: str) -> Talk:
        """Ask the question."""
        yield Step(messages=(user(self.question),), prompt=self.prompt, max_tokens=self.max_tokens)

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """Run the checks on the answer."""
        return tuple(check(replies[-1]) for check in self.checks)


def names_paris(reply: Reply) -> AnswerCheck:
    """The capital of France is Paris."""
    passed = "paris" in answer_text(reply).casefold()
    return AnswerCheck("names_paris", passed, "" if passed else "the answer does not name Paris")


def story_length(reply: Reply) -> AnswerCheck:
    """A story of 300 words may have half or twice as many; scripts without spaces are not expected
    here.
    """
    words = len(answer_text(reply).split())
    return AnswerCheck("story_length", 100 <= words <= 700, f"{words} words, asked for 300")


def ends_by_itself(reply: Reply) -> AnswerCheck:
    """A short answer ends at the end-of-text token, not at the length limit."""
    return AnswerCheck(
        "ends_by_itself",
        reply.finish_reason != "length",
        f"finish_reason {reply.finish_reason or 'missing'}",
    )


def code_parses(reply: Reply) -> AnswerCheck:
    """The code in the answer is valid Python and defines a function."""
    source = extract_code(answer_text(reply))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return AnswerCheck("code_parses", False, f"not valid Python: {error}")
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return AnswerCheck(
        "code_parses", bool(functions), "" if functions else "no function is defined"
    )


_FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def extract_code(text: str) -> str:
    """The first fenced block of `text`, else what follows the first line that begins a definition,
    else all of it.
    """
    fenced = _FENCE.search(text)
    if fenced:
        return fenced.group(1)
    start = re.search(r"^(?:def|import|from|class)\b", text, re.MULTILINE)
    return text[start.start() :] if start else text


def valid_json_list(reply: Reply) -> AnswerCheck:
    """The answer holds a JSON array of five strings."""
    text = answer_text(reply)
    start, end = text.find("["), text.rfind("]")
    try:
        value = json.loads(text[start : end + 1]) if 0 <= start < end else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list):
        return AnswerCheck("valid_json_list", False, "no JSON array in the answer")
    return AnswerCheck("valid_json_list", len(value) == 5, f"an array of {len(value)}, asked for 5")


_SPANISH = frozenset(
    [
        "el",
        "la",
        "los",
        "las",
        "un",
        "una",
        "de",
        "del",
        "que",
        "y",
        "en",
        "es",
        "por",
        "con",
        "para",
        "se",
        "al",
        "como",
        "más",
        "agua",
        "río",
        "mar",
        "sol",
        "nube",
        "lluvia",
        "vapor",
        "tierra",
    ]
)


def answers_in_spanish(reply: Reply) -> AnswerCheck:
    """At least a sixth of the words are common Spanish ones (English prose has almost none)."""
    words = re.findall(r"\w+", answer_text(reply).casefold())
    share = sum(word in _SPANISH for word in words) / len(words) if words else 0.0
    return AnswerCheck("answers_in_spanish", share >= 1 / 6, f"{share:.0%} common Spanish words")


FRANCE = Question(
    name="france",
    title="short fact: the capital of France",
    question="What is the capital of France? Answer in one sentence.",
    prompt="Question: What is the capital of France?\nAnswer: The capital of France is",
    max_tokens=200,
    checks=(names_paris,),
)
STORY = Question(
    name="story",
    title="prose: a story of 300 words",
    question=(
        "Write a story of about 300 words about a cat named Whiskers who discovers a rooftop"
        " garden."
    ),
    prompt=(
        "Whiskers and the Rooftop Garden\n\nA short story of about 300 words.\n\nWhiskers was a"
        " grey cat who lived on the top floor of an old house in the city. One morning"
    ),
    max_tokens=700,
    checks=(story_length,),
)
FIBONACCI = Question(
    name="fibonacci",
    title="code: iterative Fibonacci with a docstring",
    question=(
        "Write a Python function fibonacci(n) that returns the n-th Fibonacci number iteratively."
        " Include a docstring."
    ),
    prompt=(
        "# Iterative Fibonacci numbers in Python.\n\ndef fibonacci(n):\n"
        '    """Return the n-th Fibonacci number, computed iteratively."""\n'
    ),
    max_tokens=500,
    checks=(code_parses,),
)
JSON_LIST = Question(
    name="json_list",
    title="structure: a JSON list",
    question=(
        "List five European rivers as a JSON array of strings. Reply with the JSON array only."
    ),
    prompt='Five European rivers as a JSON array of strings:\n["Danube", "Rhine",',
    max_tokens=150,
    checks=(valid_json_list,),
)
SPANISH = Question(
    name="spanish",
    title="another language: the water cycle in Spanish",
    question="Explica en español, en un párrafo breve, el ciclo del agua.",
    prompt="El ciclo del agua, explicado en un párrafo breve. El agua de los ríos y del mar",
    max_tokens=250,
    checks=(answers_in_spanish,),
)


_FIRST = "My dog is called Bruno and he is afraid of thunder. Give me three short tips to calm him."
_SECOND = (
    "Thank you. Now write two sentences to my neighbour about it. What was my dog's name again?"
    " Use it."
)


@dataclass(frozen=True)
class SecondTurn:
    """Ask, then ask again with the first answer in the context."""

    name: str = "second_turn"
    title: str = "second turn of a conversation"
    needs: frozenset[Capability] = frozenset({Capability.CHAT})
    variants: Sequence[str] = ()
    max_tokens: int = 200

    def talk(self, context: Context, variant: str) -> Talk:
        """Two turns; the model's own first answer is handed back."""
        first = yield Step(messages=(user(_FIRST),), prompt=_FIRST, max_tokens=self.max_tokens)
        said = Message(role="assistant", content=first.content or "(no answer)")
        yield Step(
            messages=(user(_FIRST), said, user(_SECOND)), prompt=_SECOND, max_tokens=self.max_tokens
        )

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """The name from the first turn is remembered."""
        passed = "bruno" in answer_text(replies[-1]).casefold()
        return (
            AnswerCheck(
                "remembers_name", passed, "" if passed else "the second answer does not name Bruno"
            ),
        )


_QUESTION = "What is the weather in Oslo right now? Use the tool."
_RESULT = '{"city": "Oslo", "temperature_c": 18, "sky": "cloudy"}'
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class ToolUse:
    """Offer one tool; where it is called, hand its result back and let the model answer."""

    name: str = "tool_call"
    title: str = "a tool call"
    needs: frozenset[Capability] = frozenset({Capability.CHAT, Capability.TOOLS})
    variants: Sequence[str] = ()
    max_tokens: int = 200

    def talk(self, context: Context, variant: str) -> Talk:
        """Ask; if the model calls the tool, answer the call and read the final reply."""
        question = user(_QUESTION)
        first = yield Step(
            messages=(question,), prompt=_QUESTION, max_tokens=self.max_tokens, tools=(WEATHER,)
        )
        if not first.tool_calls:
            return
        call = first.tool_calls[0]
        turns = (
            question,
            Message(role="assistant", content=first.content or None, tool_calls=(call,)),
            Message(role="tool", content=_RESULT, tool_call_id=call.id or "call_0", name=call.name),
        )
        yield Step(messages=turns, prompt=_QUESTION, max_tokens=self.max_tokens, tools=(WEATHER,))

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """The right tool, arguments that parse, the city in them, and the result used in the
        answer.

        A whole call that the server left in the text is the model's call; that nothing parsed it is
        a finding of its own.
        """
        calls = replies[0].tool_calls or read_calls(replies[0].content, {"get_weather"}).calls
        if not calls:
            return (AnswerCheck("calls_tool", False, "the answer holds no tool call"),)
        checks = [
            AnswerCheck("calls_tool", calls[0].name == "get_weather", f"called {calls[0].name!r}")
        ]
        try:
            arguments = json.loads(calls[0].arguments)
            city = str(arguments.get("city", "")) if isinstance(arguments, dict) else ""
            checks.append(
                AnswerCheck("tool_arguments", "oslo" in city.casefold(), f"city {city!r}")
            )
        except ValueError:
            checks.append(AnswerCheck("tool_arguments", False, "the arguments are not JSON"))
        if len(replies) > 1:
            used = says_18_degrees(answer_text(replies[-1]))
            checks.append(AnswerCheck("uses_tool_result", used, "expected 18 degrees"))
        return tuple(checks)


_EIGHTEEN = re.compile(
    r"(?<![\d.,:])(?<![\s(][-\u2212])(?<!\A[-\u2212])(?:18(?:[.,\u066b]0+)?|64(?:[.,]4)?(?=\s*(?:°\s*F|℉|degrees"
    r" F|Fahrenheit)))"
    r"(?![\d:]|[.,\u066b]\d)|\b(?:eighteen|achtzehn|dix-huit|dieciocho|diciotto|dezoito|achttien|arton|atten"
    r"|osiemnaście|восемнадцать)\b|十八|열여덟",
    re.IGNORECASE,
)


def says_18_degrees(text: str) -> bool:
    """Whether a text names 18 °C: in digits of any script, with a decimal point or comma, in words,
    or in Fahrenheit.
    """
    digits = (str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)
    return bool(_EIGHTEEN.search("".join(digits)))


# Short facts that a small model knows, one a stream, so that an answer to another stream's question
# is seen.
FACTS = (
    ("What do bees make?", "Bees make", "honey"),
    ("What is the chemical formula of water?", "The chemical formula of water is", "h2o"),
    ("What is the capital of Italy?", "The capital of Italy is", "rome"),
    ("Which planet do we live on?", "The planet we live on is called", "earth"),
    ("What is the capital of Japan?", "The capital of Japan is", "tokyo"),
    ("What colour is the sky on a clear day?", "On a clear day the colour of the sky is", "blue"),
    ("What is the capital of Spain?", "The capital of Spain is", "madrid"),
    ("What is frozen water called?", "Frozen water is called", "ice"),
)


@dataclass(frozen=True)
class Burst:
    """`streams` different questions at once."""

    streams: int = 8
    name: str = "burst"
    title: str = "many requests at once"
    needs: frozenset[Capability] = frozenset()
    max_tokens: int = 120

    @property
    def variants(self) -> Sequence[str]:
        """One stream each."""
        return tuple(str(index) for index in range(self.streams))

    def talk(self, context: Context, variant: str) -> Talk:
        """Ask one of the questions, with room for an explanation."""
        question, prompt, _ = _fact(variant)
        yield Step(
            messages=(user(f"{question} Answer, then explain in two sentences."),),
            prompt=f"Question: {question}\nAnswer: {prompt}",
            max_tokens=self.max_tokens,
        )

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """The answer belongs to the question of this stream."""
        expected = _fact(variant)[2]
        text = answer_text(replies[-1]).casefold().replace("₂", "2")
        return (AnswerCheck("answers_own_question", expected in text, f"expected {expected!r}"),)


def _fact(variant: str) -> tuple[str, str, str]:
    return FACTS[int(variant) % len(FACTS)]


NAMES = (
    "france",
    "story",
    "fibonacci",
    "json_list",
    "spanish",
    "second_turn",
    "tool_call",
    "needle",
    "burst",
)


def standard_probes(
    *,
    max_model_len: int | None,
    longest_needle: int,
    streams: int,
    seed: int,
    count_tokens: Callable[[str], int] | None,
) -> tuple[Probe, ...]:
    """All probes, fitted to one subject; the burst comes last, since it wants the server for
    itself.
    """
    needle = Needle(
        lengths=needle_lengths(max_model_len, longest_needle), seed=seed, count_tokens=count_tokens
    )
    return (
        FRANCE,
        STORY,
        FIBONACCI,
        JSON_LIST,
        SPANISH,
        SecondTurn(),
        ToolUse(),
        needle,
        Burst(streams=streams),
    )
