"""Secrets, home paths and names of this machine are taken out of text before it is handed over."""

from __future__ import annotations

import getpass
import os
import re
import socket
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

_SECRETS = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9_-]{8,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bAKIA[0-9A-Z]{16}|\bxox[abp]-[\w-]{10,}|"
    r"(?i:bearer\s+)[\w.~+/=-]{8,}"
)
_NAMED = re.compile(
    r"(?i)(--[\w-]*(?:api-key|token|secret|password)\s+|"
    r"(?:api[-_]?key|token|secret|passw(?:or)?d|authorization)[\"']?\s*[=:]\s*[\"']?)([^\s\"',}\]]{4,})"
)
_SECRET_NAMES = re.compile(r"(?i)key|token|secret|passw|credential")


class Scrubber:
    """Takes secrets, home paths and names of this machine out of text."""

    def __init__(self, command_words: tuple[str, ...] = ()) -> None:
        found = {
            v: "<removed>" for n, v in os.environ.items() if _SECRET_NAMES.search(n) and len(v) >= 8
        }
        for flag, value in pairwise(command_words):
            if (
                _SECRET_NAMES.search(flag)
                and flag.startswith("--")
                and "token" not in flag[-10:].replace("hf-token", "")
            ):
                found[value] = "<removed>"
        home = str(Path.home())
        if len(home) > 2:
            found[home] = "~"
        with suppress(OSError):
            if len(name := socket.gethostname()) >= 4 and name != "localhost":
                found[name] = "<host>"
        with suppress(OSError, KeyError, ImportError):
            if len(user := getpass.getuser()) >= 3 and user not in ("root", "user"):
                found[f"/{user}/"] = "/<user>/"
        self._found = sorted(found.items(), key=lambda item: -len(item[0]))

    def text(self, text: str) -> str:
        """The text without them."""
        for value, instead in self._found:
            text = text.replace(value, instead)
        text = re.sub(r"/(?:home|Users)/[^/\s\"':]+", "~", text)
        text = _SECRETS.sub("<removed>", text)
        return _NAMED.sub(
            lambda m: (
                m[0]
                if m[2].isdigit() or m[2] in ("null", "None", "true", "false")
                else f"{m[1]}<removed>"
            ),
            text,
        )
