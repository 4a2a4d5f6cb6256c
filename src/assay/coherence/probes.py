"""What a model is asked: texts to score, facts to find in long ones, and the probes with the checks
of their answers.

Bits per byte of fixed texts: how well does the model predict plain text, by itself and deep in a
context?

A sane language model needs well under 2 bits for a byte of English; a broken one needs more, long
before its text looks wrong. Against a reference, which scores the same texts, much smaller
differences show.
"""

from __future__ import annotations

import ast
import json
import random
import re
import unicodedata
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from assay.coherence.conversation import Context, Probe, Step, Talk, answer_text, user
from assay.coherence.record import AnswerCheck, PassageScore
from assay.engines import Capability, Engine, Message, Reply, read_calls, score_all

LONGEST_CONTEXT = 4096
"""Deepest position, in tokens, at which texts are scored."""
LEAST_CONTEXT = 512
"""A shorter context says nothing of depth."""
LEAST_TEXTS = 8
"""So many texts must be scored on both sides for a comparison."""
MARGIN_TOKENS = 32
CHARS_PER_TOKEN = 4.2
"""Of the texts, in the tokenizers of the field: for planning only."""
_BETWEEN = "\n\n"
_TOGETHER = 4


@cache
def passages() -> tuple[str, ...]:
    """The fixed texts, shipped with assay."""
    text = (files("assay.coherence") / "passages.txt").read_text(encoding="utf-8")
    body = "\n".join(line for line in text.splitlines() if not line.startswith("# Fixed texts"))
    return tuple(block.strip("\n") for block in body.split("\n----\n"))


def planned_tokens(texts: int, context: int) -> int:
    """About how many tokens `score_alone` (context 0) or `score_in_context` sends."""
    alone = round(sum(map(len, passages()[:texts])) / CHARS_PER_TOKEN)
    return min(alone, context) + context if context else alone


def score_alone(engine: Engine, count: int) -> Iterator[PassageScore]:
    """Score the first `count` texts, each by itself; a few in one request where the engine takes
    that.
    """
    for begin in range(0, count, _TOGETHER):
        part = passages()[begin : min(begin + _TOGETHER, count)]
        for index, scores in enumerate(score_all(engine, part), begin):
            yield PassageScore(_name(index), 0, scores.nll, len(passages()[index].encode()))


def score_in_context(engine: Engine, context: int) -> Iterator[PassageScore]:
    """Score the texts behind one another, twice: from the start, and behind a filler, up to
    `context` tokens.

    One request scores all texts that fit, each at its own depth. Needs the engine's own tokenizer,
    to know which tokens are those of which text; the second order begins with the second half of
    the texts.
    """
    half = len(passages()) // 2
    orders = (list(range(len(passages()))), [*range(half, len(passages())), *range(half)])
    first = yield from _score_together(engine, orders[0], "", context)
    room = context - first
    if room >= LEAST_CONTEXT // 4:
        # Where the texts leave room, what stands before them is as deep as the context allows.
        yield from _score_together(engine, orders[1], filler("depth", room) + _BETWEEN, context)
    else:
        yield from _score_together(engine, orders[1], "", context)


def _score_together(
    engine: Engine, order: list[int], before: str, context: int
) -> Generator[PassageScore, None, int]:
    """Scores of the texts in this order behind `before`, as many as fit into `context` tokens;
    returns the tokens sent.
    """
    text, spans = before, list[tuple[int, int, int]]()
    for index in order:
        start = len(engine.tokenize(text)) if text else 0
        longer = text + passages()[index]
        end = len(engine.tokenize(longer))
        if end > context:
            break
        spans.append((index, start, end))
        text = longer + _BETWEEN
    text = text.removesuffix(_BETWEEN)
    if not spans:
        return 0
    logprobs = engine.score(text).token_logprobs
    special = len(logprobs) - len(engine.tokenize(text))  # a start token, where the engine adds one
    for index, start, end in spans:
        if not start:  # by itself, it was scored before
            continue
        nats = -sum(
            value for value in logprobs[special + start : special + end] if value is not None
        )
        yield PassageScore(_name(index), start, nats, len(passages()[index].encode()))
    return spans[-1][2]


def _name(index: int) -> str:
    return f"p{index:02d}"


# A fact hidden in a long text: a grid of depth × length from the server's own context length.
#
# The filler is varied (a paragraph repeated would make the needle stand out, and the cache idle),
# the needle looks like its surroundings, and each cell has a fact of its own.


DEPTHS = (0.1, 0.5, 0.9)
DEFAULT_LONGEST = 8192
_ANSWER_TOKENS = 60
_MARGIN_TOKENS = 128
_CHARS_PER_TOKEN = 4

_PEOPLE = (
    "Anna",
    "Tomas",
    "Ines",
    "Marek",
    "Lucia",
    "Henrik",
    "Olga",
    "Samir",
    "Greta",
    "Paolo",
    "Nadia",
    "Viktor",
)
_PLACES = (
    "library",
    "harbour",
    "bakery",
    "town hall",
    "museum",
    "railway station",
    "market",
    "school",
    "hospital",
)
_THINGS = (
    "lamp",
    "bicycle",
    "window",
    "ladder",
    "notice board",
    "water pipe",
    "door",
    "roof",
    "clock",
    "bench",
)
_DEEDS = (
    "repaired", "painted", "measured", "cleaned", "photographed", "moved", "replaced", "inspected",
    "described",
)  # fmt: skip
_WHEN = (
    "on Monday",
    "before noon",
    "last winter",
    "after the rain",
    "in the evening",
    "at the end of May",
    "early",
)
_CODES = (
    "heron",
    "walnut",
    "copper",
    "meadow",
    "lantern",
    "saffron",
    "granite",
    "willow",
    "falcon",
    "amber",
    "violin",
)


@dataclass(frozen=True)
class Needle:
    """Find one fact in a text of `lengths` tokens at `depths` of it.

    `count_tokens` is the server's own tokenizer; without one, lengths are estimated from
    characters.
    """

    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = DEPTHS
    seed: int = 0
    count_tokens: Callable[[str], int] | None = None
    name: str = "needle"
    title: str = "a fact in a long context"
    needs: frozenset[Capability] = frozenset()

    @property
    def variants(self) -> Sequence[str]:
        """One cell of the grid each, as `LENGTH@DEPTH`."""
        return tuple(f"{length}@{depth:g}" for length in self.lengths for depth in self.depths)

    def talk(self, context: Context, variant: str) -> Talk:
        """Ask for the fact after the text."""
        length, depth = _parse(variant)
        place, _ = self._fact(variant)
        text = self._haystack(variant, length, depth)
        question = f"According to the text, which word opens the store room of the {place}?"
        yield Step(
            messages=(user(f"{text}\n\n{question} Answer with that one word."),),
            prompt=(
                f"{text}\n\nQuestion: {question}\nAnswer: The word that opens the store room of the"
                f" {place} is"
            ),
            max_tokens=_ANSWER_TOKENS,
        )

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """The code word is in the answer."""
        code = self._fact(variant)[1]
        passed = code in answer_text(replies[-1]).casefold()
        return (AnswerCheck("finds_needle", passed, f"expected {code!r} at {variant}"),)

    def _fact(self, variant: str) -> tuple[str, str]:
        rng = random.Random(f"{self.seed}/{variant}/fact")
        return rng.choice(_PLACES), rng.choice(_CODES)

    def _haystack(self, variant: str, length: int, depth: float) -> str:
        place, code = self._fact(variant)
        needle = f"The word that opens the store room of the {place} is {code}."
        sentences = _sentences(f"{self.seed}/{variant}/filler", length)
        count = self.count_tokens or (lambda text: len(text) // _CHARS_PER_TOKEN)
        # Tokens grow with sentences; two corrections bring the text close to the length that was
        # asked for.
        keep = len(sentences)
        for _ in range(2):
            tokens = max(count(" ".join(sentences[:keep])), 1)
            keep = min(len(sentences), max(1, int(keep * length / tokens)))
        sentences = sentences[:keep]
        sentences.insert(int(len(sentences) * depth), needle)
        return " ".join(sentences)


def needle_lengths(max_model_len: int | None, longest: int = DEFAULT_LONGEST) -> tuple[int, ...]:
    """A quarter, a half and the whole of the usable context, in tokens; at most `longest`."""
    usable = min(max_model_len or longest, longest) - _ANSWER_TOKENS - _MARGIN_TOKENS
    return tuple(sorted({length for length in (usable // 4, usable // 2, usable) if length >= 128}))


def filler(seed: str, tokens: int) -> str:
    """About `tokens` tokens of plain sentences, different for every seed from the first word on."""
    text = " ".join(_sentences(seed, tokens))
    return text[: tokens * _CHARS_PER_TOKEN]


def _sentences(seed: str, tokens: int) -> list[str]:
    """At least `tokens` tokens of sentences: none of them has fewer than eight."""
    rng = random.Random(seed)
    return [_sentence(rng) for _ in range(tokens // 8)]


def _parse(variant: str) -> tuple[int, float]:
    length, _, depth = variant.partition("@")
    return int(length), float(depth)


def _sentence(rng: random.Random) -> str:
    """One plain sentence of a town's chronicle; eight tokens or more in any tokenizer of the field."""
    person, place, thing, deed, when = (
        rng.choice(words) for words in (_PEOPLE, _PLACES, _THINGS, _DEEDS, _WHEN)
    )
    number = rng.randint(2, 97)
    return rng.choice(
        (
            f"{person} {deed} the {thing} of the {place} {when}.",
            f"The {thing} at the {place} was {deed} {when}, and it cost {number} crowns.",
            f"{when[0].upper()}{when[1:]}, {person} counted {number} visitors at the {place}.",
            (
                f"Nobody remembers who {deed} the {thing} behind the {place}, but {person} kept the"
                " bill."
            ),
            f"The {place} stayed open {when}, although its {thing} had to be {deed}.",
        )
    )


# The probes: what is asked, and checks of the answers.


# Probes of one question and one answer: the three tiers of the field, a JSON list, another
# language.


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


# A second turn in the same conversation: faults of caches and templates often show only there.

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


# A tool call and the answer after its result.

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


# Many requests at the same moment: faults of batching show only there.

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
