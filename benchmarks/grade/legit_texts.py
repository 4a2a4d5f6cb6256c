"""Legitimate text, much of it repetitive, from sources that any Python machine has: what a detector
must leave alone.

Every item is (category, source, text). `source` is the unit of the tune/report split: one article,
module, language or generator. Chunks are cut hard, anywhere, at 60 to 3,000 characters: the harder
case for a detector of loops.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import dis
import gettext
import gzip
import hashlib
import html
import io
import json
import logging
import pydoc
import random
import re
import sqlite3
import string
import sys
import sysconfig
import textwrap
import tokenize
import traceback
import unicodedata
from calendar import TextCalendar
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
SHARED = next(
    (up / "shared" for up in HERE.parents if (up / "shared").is_dir()), HERE.parents[2] / "shared"
)
WIKITEXT = [SHARED / "corpus" / f"wikitext-2-{name}.txt" for name in ("test", "valid")]
LOCALES = Path("/usr/share/locale")


@dataclass(frozen=True)
class Legit:
    category: str
    source: str
    text: str


def legitimate(dense: int = 1) -> Iterator[Legit]:
    """Every legitimate chunk, in a fixed order; `dense` times as many from each source, for
    fitting.
    """
    for generator in (wikitext, topics, stdlib, generated, udhr, translations):
        yield from generator(dense)
    yield from repetitive()


def left_out() -> list[str]:
    """The sources that are not on this machine: what is counted without them is another set of
    texts.
    """
    absent = (
        []
        if all(path.exists() for path in WIKITEXT)
        else ["WikiText-2 (../shared/corpus is not there)"]
    )
    catalogues = any(LOCALES.glob("*/LC_MESSAGES/*.mo"))
    return absent if catalogues else [*absent, f"message catalogues ({LOCALES} holds none)"]


def chunks(category: str, source: str, text: str, limit: int = 4) -> Iterator[Legit]:
    """Up to `limit` pieces of `text`, at places and of lengths that depend only on the source's
    name.
    """
    rng = random.Random(hashlib.sha256(source.encode()).digest())
    for index in range(limit):
        length = int(60 * 50 ** rng.random())
        if len(text) <= length:
            if index == 0 and len(text.strip()) >= 40:
                yield Legit(category, source, text)
            return
        start = rng.randrange(len(text) - length)
        start = text.rfind("\n", 0, start) + 1 or start
        yield Legit(category, source, text[start : start + length])


def wikitext(dense: int = 1) -> Iterator[Legit]:
    """WikiText-2 (CC BY-SA), where it lies beside the repository; spacing undone, `<unk>` named."""
    for path in WIKITEXT:
        if not path.exists():
            continue
        name = path.stem.rpartition("-")[2]
        articles = re.split(r"\n \n (?== [^=])", path.read_text(encoding="utf-8"))
        for number, article in enumerate(articles):
            yield from chunks(
                "wikitext", f"wikitext/{name}/{number}", _detokenized(article), limit=6 * dense
            )


def _detokenized(text: str) -> str:
    text = (
        text.replace("<unk>", "Arden")
        .replace(" @-@ ", "-")
        .replace(" @,@ ", ",")
        .replace(" @.@ ", ".")
    )
    text = re.sub(r" ([,.;:!?)\]%])", r"\1", text)
    text = re.sub(r"([(\[$£]) ", r"\1", text)
    text = re.sub(r'" ([^"\n]*) "', r'"\1"', text)
    return text.replace(" 's", "'s").replace(" 't", "'t").replace("s ' ", "s' ")


def documents() -> Iterator[Legit]:
    """Documents dense with links, code, names and figures, whole and in pieces: this repository's,
    and those of installed packages.

    Which packages there are differs from machine to machine, so these texts are counted apart from
    the others.
    """
    root = HERE.parents[1]
    folders = (root / "docs", root / "lab", *sorted((root / "benchmarks").glob("*/results")))
    pages = [*root.glob("*.md"), *(page for f in folders for page in f.rglob("*.md"))]
    found = {
        str(page.relative_to(root)): page.read_text(encoding="utf-8") for page in sorted(pages)
    }
    for package in sorted(distributions(), key=lambda d: d.name):
        head, _, body = (package.read_text("METADATA") or "").partition("\n\n")
        found[f"package/{package.name} {package.version}"] = body or head
    for source, text in found.items():
        yield Legit("documents", source, text)
        yield from chunks("documents", f"{source}/pieces", text, limit=8)


def topics(dense: int = 1) -> Iterator[Legit]:
    """The language reference that ships with Python."""
    from pydoc_data.topics import topics as pages

    for name, page in sorted(pages.items()):
        yield from chunks("pydoc", f"pydoc/{name}", page, limit=4 * dense)


def stdlib(dense: int = 1) -> Iterator[Legit]:
    """Source of the standard library, its tests' data aside."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if {"site-packages", "test", "tests", "idle_test", "lib2to3"} & set(
            relative.parts
        ) or path.stat().st_size < 2000:
            continue
        with contextlib.suppress(UnicodeDecodeError, SyntaxError), tokenize.open(path) as file:
            yield from chunks("python", f"stdlib/{relative}", file.read(), limit=2 * dense)


def udhr(dense: int = 1) -> Iterator[Legit]:
    """The Universal Declaration of Human Rights in over 300 languages (public domain,
    unicode.org/udhr).
    """
    with gzip.open(HERE / "corpus" / "udhr.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield from chunks("languages", f"udhr/{row['language']}", row["text"], limit=2 * dense)


def translations(dense: int = 1) -> Iterator[Legit]:
    """Message catalogues of installed programs: short strings in many languages, one a line."""
    for path in sorted(LOCALES.glob("*/LC_MESSAGES/*.mo")):
        if (
            path.stat().st_size < 8000
            or int(hashlib.sha256(str(path).encode()).hexdigest(), 16) % 6 >= dense
        ):
            continue
        with (
            contextlib.suppress(OSError, UnicodeDecodeError, ValueError, IndexError),
            path.open("rb") as file,
        ):
            catalogue = gettext.GNUTranslations(file)
            strings = [s for key, s in catalogue._catalog.items() if key and len(s) > 30]  # type: ignore[attr-defined]
            yield from chunks(
                "messages", f"locale/{path.parts[-3]}/{path.stem}", "\n".join(strings), limit=dense
            )


def generated(dense: int = 1) -> Iterator[Legit]:
    """What programs print: JSON, CSV, logs, HTML, SQL, XML, disassembly, tracebacks, dumps, encoded
    data.
    """
    makers = (
        _json,
        _minified_json,
        _csv,
        _log,
        _access_log,
        _html,
        _sql,
        _xml,
        _disassembly,
        _traceback,
        _hexdump,
        _base64,
        _dna,
        _calendar,
        _markdown_table,
        _minified_code,
        _ini,
        _names,
        _numbers,
        _uuid,
        _paths,
        _diff,
        _glossary,
        _maths,
        _counted_functions,
    )
    for maker in makers:
        for seed in range(24 * dense):
            text = maker(random.Random(f"{maker.__name__}/{seed}"))
            for item in chunks(maker.__name__[1:], f"{maker.__name__[1:]}/{seed}", text, limit=1):
                # A row of one character alone is the same text as a flood of it.
                if len(set(item.text.strip())) > 1:
                    yield item


def _json(rng: random.Random) -> str:
    return json.dumps(
        [_record(rng) for _ in range(rng.randint(5, 60))], indent=rng.choice([1, 2, 4])
    )


def _minified_json(rng: random.Random) -> str:
    return json.dumps([_record(rng) for _ in range(rng.randint(5, 60))], separators=(",", ":"))


def _record(rng: random.Random) -> dict[str, object]:
    return {
        "id": rng.randint(1, 99999),
        "name": _word(rng).title(),
        "active": rng.random() < 0.5,
        "score": round(rng.random() * 100, 2),
        "tags": [_word(rng) for _ in range(rng.randint(0, 3))],
        "parent": None if rng.random() < 0.6 else rng.randint(1, 99),
    }


def _word(rng: random.Random) -> str:
    return rng.choice(sorted(k for k in sys.stdlib_module_names if not k.startswith("_")))


def _csv(rng: random.Random) -> str:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=rng.choice(",;\t"))
    writer.writerow(["date", "store", "units", "price", "total"])
    for day in range(rng.randint(20, 90)):
        units, price = rng.randint(0, 20), rng.choice([0.0, 2.5, 9.99])
        writer.writerow(
            [
                f"2026-{day // 28 + 1:02}-{day % 28 + 1:02}",
                rng.choice(["north", "south"]),
                units,
                price,
                units * price,
            ]
        )
    return out.getvalue()


def _log(rng: random.Random) -> str:
    stream = io.StringIO()
    logger = logging.Logger("worker")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        logging.Formatter(
            rng.choice(
                [
                    "%(levelname)s:%(name)s:%(message)s",
                    "%(relativeCreated)d %(levelname)-8s [%(name)s] %(message)s",
                ]
            )
        )
    )
    logger.addHandler(handler)
    events = [
        "heartbeat ok",
        "request served in %d ms",
        "cache miss for key %d",
        "retrying in %d s",
    ]
    for _ in range(rng.randint(20, 80)):
        event = rng.choice(events[: rng.randint(1, 4)])
        logger.log(
            rng.choice([20, 20, 20, 30]), event, *([rng.randint(1, 400)] if "%" in event else [])
        )
    return stream.getvalue()


def _access_log(rng: random.Random) -> str:
    return "".join(
        f'10.0.0.{rng.randint(1, 9)} - - [01/May/2026:10:{m // 60:02}:{m % 60:02} +0000] "GET'
        f' /{_word(rng)} HTTP/1.1" 200 {rng.randint(100, 9999)}\n'
        for m in range(rng.randint(20, 60))
    )


def _html(rng: random.Random) -> str:
    module = import_module(
        rng.choice(["textwrap", "bisect", "heapq", "string", "calendar", "shlex", "queue", "sched"])
    )
    return pydoc.HTMLDoc().docmodule(module)


def _sql(rng: random.Random) -> str:
    base = sqlite3.connect(":memory:")
    base.execute(
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT NOT NULL, total REAL, note"
        " TEXT)"
    )
    rows = [
        (i, _word(rng), round(rng.random() * 50, 2), rng.choice([None, "", "gift"]))
        for i in range(rng.randint(20, 60))
    ]
    base.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", rows)
    return "\n".join(base.iterdump())


def _xml(rng: random.Random) -> str:
    root = ElementTree.Element("catalog")
    for _ in range(rng.randint(5, 30)):
        item = ElementTree.SubElement(root, "item", id=str(rng.randint(1, 999)))
        ElementTree.SubElement(item, "title").text = _word(rng)
        ElementTree.SubElement(item, "price", currency="EUR").text = f"{rng.random() * 90:.2f}"
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode")


def _disassembly(rng: random.Random) -> str:
    out = io.StringIO()
    function = rng.choice(
        [
            textwrap.fill,
            json.dumps,
            random.Random.sample,
            html.escape,
            csv.Sniffer.sniff,
            gettext.find,
        ]
    )
    dis.dis(function, file=out)
    return out.getvalue()


def _traceback(rng: random.Random) -> str:
    depth = rng.randint(3, 40)

    def descend(level: int) -> int:
        return 1 // level if level == 0 else descend(level - 1) + 1

    try:
        descend(depth)
    except ZeroDivisionError:
        return "".join(traceback.format_exc())
    return ""


def _hexdump(rng: random.Random) -> str:
    data = (
        rng.randbytes(rng.randint(256, 1024))
        if rng.random() < 0.5
        else bytes(rng.randint(256, 1024))
    )
    rows = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        shown = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
        rows.append(f"{at:08x}  {row.hex(' ')}  |{shown}|")
    return "\n".join(rows)


def _base64(rng: random.Random) -> str:
    data = rng.randbytes(600) if rng.random() < 0.7 else bytes(900)
    # Zeros come in lines: see `generated`.
    lines = rng.random() < 0.7 or not any(data)
    return base64.encodebytes(data).decode() if lines else base64.b64encode(data).decode()


def _dna(rng: random.Random) -> str:
    bases = "".join(
        rng.choices("ACGT", weights=[rng.randint(1, 6) for _ in range(4)], k=rng.randint(400, 1200))
    )
    return ">seq synthetic\n" + "\n".join(textwrap.wrap(bases, 60))


def _calendar(rng: random.Random) -> str:
    return TextCalendar().formatyear(rng.randint(1990, 2040))


def _markdown_table(rng: random.Random) -> str:
    width = rng.randint(3, 8)
    rows = ["| " + " | ".join(_word(rng) for _ in range(width)) + " |", "|" + "---|" * width]
    rows += [
        "| "
        + " | ".join(rng.choice([_word(rng), "-", "0", "yes", "no"]) for _ in range(width))
        + " |"
        for _ in range(rng.randint(8, 40))
    ]
    return "\n".join(rows)


def _minified_code(rng: random.Random) -> str:
    letters = string.ascii_lowercase
    parts = []
    for _ in range(rng.randint(20, 80)):
        a, b, c = rng.choices(letters, k=3)
        parts.append(
            rng.choice(
                [
                    f"function {a}({b}){{return {b}?{c}({b}-1):0}}",
                    f"var {a}={b}.{_word(rng)}({c},{rng.randint(0, 9)});",
                    f'if(!{a}&&{b}>{c})throw new Error("{_word(rng)}");',
                ]
            )
        )
    return "".join(parts)


def _ini(rng: random.Random) -> str:
    sections = []
    for _ in range(rng.randint(3, 10)):
        keys = [
            f"{_word(rng)}_{_word(rng)} ="
            f" {rng.choice(['true', 'false', str(rng.randint(0, 900)), '/usr/lib/' + _word(rng)])}"
            for _ in range(rng.randint(2, 8))
        ]
        sections.append(f"[{_word(rng)}]\n" + "\n".join(keys))
    return "\n\n".join(sections)


def _names(rng: random.Random) -> str:
    start = rng.choice([0x41, 0xC0, 0x391, 0x410, 0x5D0, 0x621, 0x905, 0x2190, 0x2500, 0x1F600])
    return "\n".join(
        f"U+{c:04X} {chr(c)} {unicodedata.name(chr(c), '-')}"
        for c in range(start, start + rng.randint(20, 60))
    )


def _numbers(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return " ".join(
            str(rng.randint(0, 10 ** rng.randint(1, 6))) for _ in range(rng.randint(60, 300))
        )
    if kind == 1:
        step = rng.randint(2, 12)
        return (
            f"The multiples of {step}: "
            + ", ".join(str(step * i) for i in range(1, rng.randint(60, 200)))
            + "."
        )
    if kind == 2:
        return "\n".join(
            " ".join(rng.choice("01") for _ in range(16)) for _ in range(rng.randint(10, 30))
        )
    return "\n".join(
        "  ".join(f"{rng.gauss(0, 1):8.4f}" for _ in range(8)) for _ in range(rng.randint(10, 40))
    )


def _uuid(rng: random.Random) -> str:
    return "\n".join(
        f"{rng.getrandbits(32):08x}-{rng.getrandbits(16):04x}-4{rng.getrandbits(12):03x}-a{rng.getrandbits(12):03x}-{rng.getrandbits(48):012x}"
        for _ in range(rng.randint(10, 40))
    )


def _paths(rng: random.Random) -> str:
    return "\n".join(
        f"-rw-r--r-- 1 user group {rng.randint(1, 99999):>6} May {rng.randint(1, 28):>2}"
        f" 10:{rng.randint(0, 59):02} {_word(rng)}/{_word(rng)}.py"
        for _ in range(rng.randint(10, 40))
    )


def _diff(rng: random.Random) -> str:
    import difflib

    lines = textwrap.wrap(
        pydoc.plain(
            pydoc.render_doc(import_module(rng.choice(["heapq", "shlex", "bisect", "queue"])))
        ),
        70,
    )
    changed = [line.upper() if rng.random() < 0.1 else line for line in lines]
    return "\n".join(difflib.unified_diff(lines, changed, "a.txt", "b.txt", lineterm=""))


def _maths(rng: random.Random) -> str:
    """A calculation told in sentences: single letters, signs and numbers between short words."""
    a, b, c, k = (rng.randint(2, 60) for _ in range(4))
    x, y, n = rng.sample("abcdkmnpqrstuvxyz", 3)
    steps = [
        f"Let {x} = {a} and {y} = {b}, so {x} + {y} = {a + b}.",
        f"Suppose that {n} is odd, that is {n} = 2{k} + 1 for some whole number {k}.",
        f"Then {x}^2 - {y}^2 = ({x} - {y})({x} + {y}) = {a - b} * {a + b} = {(a - b) * (a + b)}.",
        f"Multiply both sides by {k}: {k}{x} = {k * a}, which gives {x} = {a} again.",
        f"So f({x}) = {a}*{x} + {b}, and f({c}) = {a}*{c} + {b} = {a * c + b}.",
        f"If {n} > {b}, then {n}/{b} > 1; else we stop here and take {y} = 0.",
        f"The sum 1 + 2 + ... + {a} is {a}*{a + 1}/2 = {a * (a + 1) // 2}.",
        f"No, wait: {a} - {b} is {a - b}, not {a - b + 1}, so I have to go back one step.",
        f"The derivative of {a}{x}^{c} is {a * c}{x}^{c - 1}, and at {x} = 1 it is {a * c}.",
        (
            f"What do we do for {n} = {k}? We get P({n}) = C({k}, 2) * p^2 * (1 - p)^{k}, a small"
            " number."
        ),
        (
            f"{k} km in {b} min is {k}/{b} * 60 = {60 * k / b:.1f} km/h, or about"
            f" {round(60 * k / b)} km/h."
        ),
        f"Hence {x} | {y}*{n} and gcd({x}, {y}) = 1, so {x} | {n}. QED",
        (
            f"It is 10:{b:02} now, and {a} min later it will be"
            f" {10 + (a + b) // 60}:{(a + b) % 60:02}."
        ),
        f"We write $\\frac{{{x}}}{{{y}}} = {n}$, where ${y} \\neq 0$ and ${n} \\in \\mathbb{{N}}$.",
        f"Check: {a} * {b} = {a * b}. Yes, and {a * b} - {c} = {a * b - c}, as it should be.",
    ]
    rng.shuffle(steps)
    joint = rng.choice([" ", "\n", "\n\n"])
    return joint.join(steps[: rng.randint(4, 12)])


def _counted_functions(rng: random.Random) -> str:
    """Minified code of a generator: the same small function again and again, with other names and
    numbers.
    """
    a, b, c = rng.sample(string.ascii_lowercase, 3)
    shape = rng.choice(
        [
            "function {a}{i}({b},{c}){{return {b}?{c}({b}-{i}):{j}}}",
            "{a}.{b}{i}=function({c}){{{c}.x+={i};{c}.y-={j};return {a}}};",
            "if({a}=={i}){{{b}({j},{c});{a}++}}else ",
            "var {a}{i}={b}[{i}]||{c}[{j}];",
        ]
    )
    return "".join(
        shape.format(a=a, b=b, c=c, i=i, j=rng.randint(0, 9)) for i in range(rng.randint(15, 60))
    )


def _glossary(rng: random.Random) -> str:
    """A table of words in several languages; its columns hold what its heads say."""
    with gzip.open(HERE / "corpus" / "udhr.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = {row["language"]: row["text"] for row in map(json.loads, lines)}
    languages = rng.sample(
        [
            "eng",
            "rus",
            "cmn_hans",
            "arb",
            "tha",
            "deu_1996",
            "ell_monotonic",
            "jpn",
            "kor",
            "heb",
            "hin",
            "fra",
        ],
        rng.randint(3, 7),
    )
    words = {
        name: re.findall(r"[^\W\d_]{2,12}", texts[name]) for name in languages if name in texts
    }
    rows = ["| " + " | ".join(words) + " |", "|---" * len(words) + "|"]
    rows += [
        "| " + " | ".join(rng.choice(column) for column in words.values()) + " |"
        for _ in range(rng.randint(5, 25))
    ]
    if rng.random() < 0.5:
        return "\n".join(rows)
    return "\n".join(
        f"- {rng.choice(next(iter(words.values())))}: "
        + ", ".join(rng.choice(c) for c in words.values())
        for _ in range(12)
    )


def repetitive() -> Iterator[Legit]:
    """Repetition that is meant: refrains, drills, tables, drawings, countdowns, lines on
    request.
    """
    for name, text in _repetitive():
        yield Legit("repetitive", f"repetitive/{name}", text)


def _repetitive() -> Iterator[tuple[str, str]]:
    lines = (
        "I must not talk in class.",
        "I will hand in my homework on time.",
        "The early bird catches the worm.",
        "Je ne parlerai plus en classe.",
        "我不会再迟到了。",
        "Ich soll nicht schwatzen.",
    )
    for index, line in enumerate(lines):
        for count in (5, 10, 20, 30):
            yield (
                f"request/{index}/{count}",
                f"Here it is, {count} times:\n\n" + "\n".join([line] * count),
            )
            yield (
                f"numbered/{index}/{count}",
                "\n".join(f"{i}. {line}" for i in range(1, count + 1)),
            )
    for size in range(5, 17):
        yield (
            f"times/{size}",
            "\n".join(f"{a} x {b} = {a * b}" for a in range(1, size) for b in range(1, 11)),
        )
        yield (
            f"tree/{size}",
            "```\n"
            + "\n".join(" " * (size - i) + "*" * (2 * i + 1) for i in range(size))
            + "\n```",
        )
        yield f"zeros/{size}", "\n".join(" ".join(["0"] * size) for _ in range(size))
        yield f"list/{size}", f"x = [{', '.join(['0'] * size * 4)}]"
        yield (
            f"banner/{size}",
            "/"
            + "*" * 70
            + f"\n * Section {size}\n "
            + "*" * 70
            + "/\nint main(void) {\n    return 0;\n}\n",
        )
        yield (
            f"rules/{size}",
            "\n\n".join(
                f"Chapter {i}\n{'=' * 40}\n\nText of chapter {i} stands here.\n\n---"
                for i in range(size)
            ),
        )
        yield (
            f"chess/{size}",
            "\n".join("".join("#."[(r + c) % 2] for c in range(size * 2)) for r in range(size)),
        )
        yield (
            f"bars/{size}",
            "\n".join(
                f"step {i:2} [{'#' * i}{'-' * (size - i)}] {100 * i // size}%"
                for i in range(size + 1)
            ),
        )
        yield (
            f"count/{size}",
            "\n".join(
                f"{i} green bottles hanging on the wall,\n{i} green bottles hanging on the"
                f" wall,\nAnd if one green bottle should accidentally fall,\nThere'll be {i - 1}"
                " green bottles hanging on the wall.\n"
                for i in range(size, 0, -1)
            ),
        )
        yield (
            f"getters/{size}",
            "\n".join(
                f"    def get_{n}(self):\n        return self._{n}\n"
                for n in sorted(sys.stdlib_module_names)[size : 2 * size]
            ),
        )
        yield (
            f"very/{size}",
            (
                f"It was a {'very ' * min(size, 7)}good day, and {'no, ' * min(size, 5)}nobody"
                f" complained. {'Ha' * min(size, 9)}!"
            ),
        )
        yield (
            f"toc/{size}",
            "\n".join(f"{i}. Chapter {i} {'.' * (60 - size)} {i * 7}" for i in range(1, size)),
        )
        yield (
            f"form/{size}",
            "\n".join(
                f"{label}: {'_' * 40}"
                for label in ("Name", "Address", "City", "Phone")[: size % 4 + 1]
            ),
        )
        yield (
            f"switch/{size}",
            "switch (x) {\n"
            + "".join(f"    case {i}:\n        return {i * i};\n" for i in range(size * 3))
            + "}\n",
        )
        yield (
            f"song/{size}",
            "\n\n".join(
                f"{verse} the {animal} in the morning light,\n{verse} the {animal} in the fading"
                " light.\n  Oh, home again, home again,\n  Oh, home again, home again."
                for verse, animal in zip(
                    ("Call", "Find", "Feed", "Ride", "Free"),
                    ("sparrow", "horse", "otter", "heron", "fox"),
                    strict=True,
                )
            ),
        )
