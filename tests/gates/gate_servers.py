"""A deployment to hold to a contract: a server that answers every probe and every tool rightly, and
the logs of a head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from assay.coherence.tools import Case, cases
from stub_server import MODEL, Exchange, StubServer, healthy

LOG = (
    "INFO 01-01 00:00:00 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 2.40,"
    " Accepted throughput: 70.00 tokens/s, Drafted throughput: 100.00 tokens/s, Accepted: 700"
    " tokens, Drafted: 1000 tokens, Per-position acceptance rate: 0.900, 0.500, Avg Draft"
    " acceptance rate: 70.0%\n"
)
CONTRACT = """\
[subject]
name = "stub"
server = "{url}"
logs = ["vllm.log"]

[spec]
min_acceptance = "60%"

[check]
samples = 1
min_tokens_per_s = 5
max_ttft_s = 30

[tools]
min_schema_valid = "90%"
"""


class Right:
    """Answers the tools suite by its own cases, and everything else as `sane` does; `spoilt` cases
    get no JSON.
    """

    def __init__(self, sane: Any, spoilt: int = 0) -> None:
        self.sane, self.cases = sane, {case.ask: case for case in cases()}
        self.spoilt = {case.key for case in cases()[:spoilt]}

    def __call__(self, e: Exchange) -> None:
        asked = str(e.body["messages"][-1]["content"]) if "messages" in e.body else ""
        case = next((case for ask, case in self.cases.items() if asked.startswith(ask)), None)
        if case is None:
            self.sane(e)
        elif case.key in self.spoilt or not case.name:
            text = "I would rather not." if case.key in self.spoilt else json.dumps(_value(case))
            healthy(chunks=(text,))(e)
        else:
            call = {"name": case.name, "arguments": json.dumps(_value(case))}
            tool = {"id": "c1", "type": "function", "function": call}
            message = {"role": "assistant", "content": None, "tool_calls": [tool]}
            usage = {"prompt_tokens": 60, "completion_tokens": 9, "total_tokens": 69}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            e.json({"id": "x", "model": MODEL, "choices": [choice], "usage": usage})


def _value(case: Case) -> Any:
    """A right answer: the expected values, and of what else is required one that fits its
    schema.
    """
    known = case.schema["properties"]
    return {name: _fitting(known[name]) for name in case.schema["required"]} | dict(case.expect)


def _fitting(schema: Any) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    if kind == "object":
        return {name: _fitting(schema["properties"][name]) for name in schema["required"]}
    least = {"string": "x", "boolean": True, "null": None, "array": []}
    return least.get(kind, schema.get("minimum", 1))


def deployment(folder: Path, stub: StubServer, contract: str = CONTRACT) -> Path:
    """The contract of a server and its logs, in a folder."""
    (folder / "vllm.log").write_text(LOG * 20, encoding="utf-8")
    path = folder / "assay.toml"
    path.write_text(contract.replace("{url}", stub.url), encoding="utf-8")
    return path
