"""A Hub on loopback that speaks the real API: model info, tree (paged), paths-info, resolve with
its redirect to a CDN.

Two servers, as in reality: the Hub itself and the CDN that bodies come from. A test may put a
`Twist` in front of any request: a status, a delay, a body cut short.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LFS_BYTES = 20_000
"""Files from this size on are stored by content (the real rule is by name and by size)."""


@lru_cache(maxsize=1000)
def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@lru_cache(maxsize=1000)
def content_id(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Repo:
    """Commits by id, newest last, and names (branches, tags) that point at them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        text = json.dumps({n: git_oid(b) for n, b in sorted(files.items())})
        sha = hashlib.sha1(f"{text}{len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        revision = urllib.parse.unquote(revision)
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass(frozen=True)
class Seen:
    """One request as it came in; `sent` counts the bytes of the body that went out."""

    method: str
    path: str
    headers: dict[str, str]
    cdn: bool


@dataclass(frozen=True)
class Twist:
    """What happens to requests whose path matches, `times` times (None: always)."""

    path: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    delay: float = 0.0
    cut: int | None = None
    times: int | None = None


class LoopbackHub:
    """Start with `with hub:`; `url` is what HF_ENDPOINT is set to."""

    def __init__(self, page: int = 3, token: str | None = None) -> None:
        self.repos: dict[str, Repo] = {}
        self.twists: list[Twist] = []
        self.seen: list[Seen] = []
        self.sent = 0
        self.page, self.token = page, token
        self._lock = threading.Lock()
        self._servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), self._handler(cdn)) for cdn in (False, True)
        ]
        for server in self._servers:
            server.daemon_threads = True

    def __enter__(self) -> LoopbackHub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *failure: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def cdn(self) -> str:
        # Another host name than the Hub's, so that clients drop the token on the way as they do in
        # reality.
        return f"http://localhost:{self._servers[1].server_port}"

    def upload(self, repo: str, folder: Path, branch: str = "main", **more: bytes) -> str:
        """Commit the files of a folder; returns the commit's id."""
        files = {
            p.relative_to(folder).as_posix(): p.read_bytes()
            for p in folder.rglob("*")
            if p.is_file()
        }
        return self.repos.setdefault(repo, Repo()).commit(files | more, branch)

    def twist(self, path: str, **what: Any) -> None:
        self.twists.append(Twist(path, **what))

    def taken(self, path: str) -> Twist | None:
        with self._lock:
            for at, twist in enumerate(self.twists):
                if re.search(twist.path, path) and (twist.times is None or twist.times > 0):
                    if twist.times is not None:
                        self.twists[at] = Twist(**{**twist.__dict__, "times": twist.times - 1})
                    return twist
        return None

    def note(self, seen: Seen) -> None:
        with self._lock:
            self.seen.append(seen)

    def count(self, sent: int) -> None:
        with self._lock:
            self.sent += sent

    def _handler(self, cdn: bool) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self._serve()

            def do_HEAD(self) -> None:
                self._serve()

            def do_POST(self) -> None:
                self._serve()

            def _serve(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = self.rfile.read(length)
                headers = {k.lower(): v for k, v in self.headers.items()}
                hub.note(Seen(self.command, self.path, headers, cdn))
                twist = hub.taken(self.path)
                if twist is not None and twist.delay:
                    time.sleep(twist.delay)
                if twist is not None and twist.status is not None:
                    self.answer(twist.status, twist.body or b"", twist.headers)
                    return
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                status, answer, more = (
                    hub.cdn_answer(url.path, headers)
                    if cdn
                    else hub.hub_answer(self.command, url.path, query, headers, body)
                )
                self.answer(status, answer, more, twist.cut if twist is not None else None)

            def answer(
                self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None
            ) -> None:
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    if self.command != "HEAD":
                        sent = body if cut is None else body[:cut]
                        self.wfile.write(sent)
                        hub.count(len(sent))
                    if cut is not None:
                        self.close_connection = True
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

        return Handler

    # What the Hub answers.

    def hub_answer(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        if self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
            return _error(401, "RepoNotFound", "Invalid username or password.")
        api = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?", path
        )
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        if found is None:
            return 404, b"Not Found", {}
        repo = self.repos.get(found[1])
        if repo is None:
            return _error(
                401 if self.token is None else 404, "RepoNotFound", "Repository not found"
            )
        commit = repo.resolve((api[3] if api else file[2]) or "main")  # type: ignore[index]
        if commit is None:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        files = repo.commits[commit]
        if file is not None:
            return self._resolve(urllib.parse.unquote(file[3]), commit, files, found[1])
        assert api is not None
        if api[2] == "tree":
            return self._tree(path, query, files)
        if api[2] == "paths-info":
            asked = urllib.parse.parse_qs(body.decode()).get("paths", [])
            return _json([_entry(p, files[p]) for p in asked if p in files])
        siblings = [{"rfilename": name} for name in sorted(files)]
        info = {
            "_id": commit[:24],
            "id": found[1],
            "modelId": found[1],
            "sha": commit,
            "private": False,
            "siblings": siblings,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "lastModified": "2026-01-02T03:04:05.000Z",
            "createdAt": "2026-01-01T00:00:00.000Z",
        }
        return _json(info)

    def _tree(
        self, path: str, query: dict[str, str], files: dict[str, bytes]
    ) -> tuple[int, bytes, dict[str, str]]:
        folders = sorted({n.rpartition("/")[0] for n in files if "/" in n})
        entries: list[dict[str, Any]] = [
            {"type": "directory", "oid": git_oid(f.encode()), "size": 0, "path": f} for f in folders
        ]
        entries += [_entry(name, data) for name, data in sorted(files.items())]
        start = int(query.get("cursor", "0"))
        status, body, headers = _json(entries[start : start + self.page])
        if start + self.page < len(entries):
            following = urllib.parse.urlencode(query | {"cursor": str(start + self.page)})
            headers["Link"] = f'<{self.url}{path}?{following}>; rel="next"'
        return status, body, headers

    def _resolve(
        self, name: str, commit: str, files: dict[str, bytes], repo: str
    ) -> tuple[int, bytes, dict[str, str]]:
        if name not in files:
            return _error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        data = files[name]
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if len(data) < LFS_BYTES:
            return 200, data, headers | {"ETag": f'"{git_oid(data)}"'}
        sha256 = content_id(data)
        headers |= {
            "X-Linked-Etag": f'"{sha256}"',
            "X-Linked-Size": str(len(data)),
            "ETag": '"not-the-digest"',
        }
        headers["Location"] = (
            f"{self.cdn}/{urllib.parse.quote(repo)}/{commit}/{urllib.parse.quote(name)}"
        )
        return 302, b"Found. Redirecting", headers

    def cdn_answer(self, path: str, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        org, name, commit, file = urllib.parse.unquote(path).lstrip("/").split("/", 3)
        data = self.repos[f"{org}/{name}"].commits[commit][file]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if wanted is None:
            return 200, data, {}
        first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
        if first >= len(data):
            return 416, b"", {"Content-Range": f"bytes */{len(data)}"}
        return 206, data[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(data)}"}


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": git_oid(data), "size": len(data), "path": name}
    if len(data) >= LFS_BYTES:
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {len(data)}\n"
        )
        entry["lfs"] = {"oid": content_id(data), "size": len(data), "pointerSize": len(pointer)}
        entry["oid"] = git_oid(pointer.encode())
        entry["xetHash"] = git_oid(data) + "0" * 24
    return entry


def _json(document: Any) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(document).encode(), {"Content-Type": "application/json; charset=utf-8"}


def _error(
    status: int, code: str, message: str, more: dict[str, str] | None = None
) -> tuple[int, bytes, dict[str, str]]:
    headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}
    return status, json.dumps({"error": message}).encode(), headers | (more or {})


@contextmanager
def closed_port() -> Iterator[str]:
    """An address at which nobody listens."""
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"
