"""Which optional fields a route of a server accepts, found by sending them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from assay.engines.server.errors import RequestRefused
from assay.engines.server.payload import Dialect

Result = TypeVar("Result")

_BAD_FIELDS = frozenset({400, 422})


def negotiate(send: Callable[[Dialect], Result], dialect: Dialect) -> tuple[Result, Dialect]:
    """Send with ever fewer optional fields until the server accepts; the result, and what it accepted.

    Fields that a refusal names are left out. If it names none, all are; if that is refused too, the fields are not
    the reason, and the refusal is raised; else those that it takes one by one are put back.
    """
    while True:
        try:
            return send(dialect), dialect
        except RequestRefused as refusal:
            if refusal.status not in _BAD_FIELDS or not dialect.optional:
                raise
            said = str(refusal.evidence.get("said", ""))
            unnamed = [name for name in dialect.optional if not re.search(rf"\b{name}\b", said)]
        if len(unnamed) == len(dialect.optional):
            return _one_by_one(send, dialect)
        dialect = dialect.keeping(unnamed)


def _one_by_one(send: Callable[[Dialect], Result], dialect: Dialect) -> tuple[Result, Dialect]:
    result = send(dialect.keeping(()))
    accepted = []
    for name in dialect.optional:
        try:
            send(dialect.keeping((name,)))
        except RequestRefused:
            continue
        accepted.append(name)
    return result, dialect.keeping(accepted)
