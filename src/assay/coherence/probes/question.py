"""Probes of one question and one answer: the three tiers of the field, a JSON list, another language."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from assay.coherence.probes.base import Context, Step, Talk, answer_text, user
from assay.coherence.record import AnswerCheck
from assay.engines.base import Capability, Reply


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
    """A story of 300 words may have half or twice as many; scripts without spaces are not expected here."""
    words = len(answer_text(reply).split())
    return AnswerCheck("story_length", 100 <= words <= 700, f"{words} words, asked for 300")


def ends_by_itself(reply: Reply) -> AnswerCheck:
    """A short answer ends at the end-of-text token, not at the length limit."""
    return AnswerCheck(
        "ends_by_itself", reply.finish_reason != "length", f"finish_reason {reply.finish_reason or 'missing'}"
    )


def code_parses(reply: Reply) -> AnswerCheck:
    """The code in the answer is valid Python and defines a function."""
    source = extract_code(answer_text(reply))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return AnswerCheck("code_parses", False, f"not valid Python: {error}")
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return AnswerCheck("code_parses", bool(functions), "" if functions else "no function is defined")


_FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def extract_code(text: str) -> str:
    """The first fenced block of `text`, else what follows the first line that begins a definition, else all of it."""
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
    question="Write a story of about 300 words about a cat named Whiskers who discovers a rooftop garden.",
    prompt=(
        "Whiskers and the Rooftop Garden\n\nA short story of about 300 words.\n\n"
        "Whiskers was a grey cat who lived on the top floor of an old house in the city. One morning"
    ),
    max_tokens=700,
    checks=(story_length,),
)

FIBONACCI = Question(
    name="fibonacci",
    title="code: iterative Fibonacci with a docstring",
    question="Write a Python function fibonacci(n) that returns the n-th Fibonacci number iteratively. Include a docstring.",
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
    question="List five European rivers as a JSON array of strings. Reply with the JSON array only.",
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
