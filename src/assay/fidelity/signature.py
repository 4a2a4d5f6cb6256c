"""The signature of a reference pack: by a secret that both sides share, or by an Ed25519 key pair.

A file with a secret of at least 16 bytes signs by HMAC-SHA256 (RFC 2104). A private Ed25519 key
(RFC 8032), as PEM or as `ssh-keygen -t ed25519` writes it, signs so that its public half checks.
Signatures are entries of a pack's metadata.

A file that looks like a key in any form is read as a key or refused, never taken as a secret: who
has the public half of a key could otherwise sign with it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import AssayError, UsageError

LEAST_KEY = 16
"""Bytes of a secret."""
MOST_KEY = 65_536
"""Bytes of a file with a key; a longer file is something else."""
_BOMS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_PEM = re.compile(rb"-----BEGIN [A-Z0-9 ]+-----.*?-----END [A-Z0-9 ]+-----", re.DOTALL)
_SSH = re.compile(rb"ssh-ed25519[ \t]+[A-Za-z0-9+/]+=*")
_SSH2 = re.compile(rb"-{4} ?BEGIN SSH2 PUBLIC KEY ?-{4}(.*?)-{4} ?END", re.DOTALL)
_BLOB = re.compile(rb"\bAAAA[A-Za-z0-9+/]{20,}=*")
_KEY_LIKE = re.compile(
    rb"-----BEGIN|SSH2 PUBLIC|\bssh-|\becdsa-|\bsk-(?:ssh|ecdsa)|(?:PUBLIC|PRIVATE) KEY"
    rb"|PuTTY-User-Key"
)


@dataclass(frozen=True)
class Key:
    """A secret, or an Ed25519 key: `public` are its 32 bytes, `private` signs where the file holds
    that half.
    """

    path: Path
    secret: bytes = b""
    public: bytes = b""
    private: Any = None

    def sign(self, text: str) -> dict[str, str]:
        """The entries of the metadata that sign a text; UsageError where the file holds the public
        half alone.
        """
        if self.secret:
            return {"hmac": self._mac(text)}
        if self.private is None:
            raise _unusable(
                self.path,
                "it is a public key, which checks and cannot sign",
                "sign with the private key",
            )
        return {"ed25519": self.private.sign(text.encode()).hex(), "ed25519_key": self.public.hex()}

    def check(self, name: str, text: str, metadata: Mapping[str, str]) -> None:
        """AssayError unless this key signed the text."""
        kind = "hmac" if self.secret else "ed25519"
        signature = metadata.get(kind)
        if signature is None:
            other = claimed_signer(metadata)
            if other:
                raise _refused(
                    name,
                    f"is signed by {other}, and this key is of another kind",
                    "give the key of that kind",
                )
            raise _refused(
                name,
                "is not signed, and a key was given",
                "leave the key out, or ask for a signed pack",
            )
        if self.secret:
            whole = hmac.compare_digest(
                self._mac(text).encode(), signature.encode("utf-8", "replace")
            )
        else:
            whole = _verifies(self.public, signature, text)
        if not whole:
            raise _refused(
                name,
                "was not signed with this key",
                "check the key; if it is right, the pack was changed",
            )

    def _mac(self, text: str) -> str:
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()


def read_key(path: Path | None) -> Key | None:
    """The key in a file.

    Args:
        path: A secret of at least 16 bytes, or an Ed25519 key; None for no key.

    Raises:
        UsageError: The file cannot be read, is too short, or looks like a key of another kind.
    """
    if path is None:
        return None
    if not path.is_file():
        raise _unusable(path, "it is not a regular file" if path.exists() else "it does not exist")
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_KEY + 1).strip()
    except OSError as error:
        raise _unusable(path, error.strerror or "it cannot be read") from error
    if len(raw) > MOST_KEY:
        raise _unusable(path, f"it has more than {MOST_KEY:,} bytes")
    if (key := _key_text(path, raw)) is not None:
        return _key_pair(path, key)
    if len(raw) < LEAST_KEY:
        raise _unusable(path, f"it holds fewer than {LEAST_KEY} bytes")
    return Key(path, raw)


def _key_text(path: Path, raw: bytes) -> bytes | None:
    """The key in a file without what may be around it (comments, options, attributes); None for a
    secret. UsageError for a text that looks like a key and holds none.
    """
    if found := _PEM.search(raw) or _SSH.search(raw):
        return found[0]
    if found := _SSH2.search(raw):
        lines = [line for line in found[1].splitlines() if b":" not in line]
        return b"ssh-ed25519 " + b"".join(b"".join(lines).split())
    if (found := _BLOB.search(raw)) and b"ssh-" in _decoded(found[0])[:16]:
        return b"ssh-ed25519 " + found[0]
    der = _decoded(raw)
    if _KEY_LIKE.search(raw) or raw.startswith(_BOMS) or (der and _is_der_key(der)):
        raise _unusable(
            path,
            "it looks like a key and cannot be read as a key of Ed25519",
            "give an Ed25519 key without a passphrase, as PEM or OpenSSH",
        )
    return None


def _decoded(text: bytes) -> bytes:
    """The bytes that a base64 text stands for, empty where it is none."""
    joined = b"".join(text.split())
    try:
        return base64.b64decode(joined + b"=" * (-len(joined) % 4), validate=True)
    except (binascii.Error, ValueError):
        return b""


def _is_der_key(raw: bytes) -> bool:
    """Whether bytes are an ASN.1 sequence that names Ed25519 (OID 1.3.101.112, RFC 8410)."""
    return raw.startswith(b"\x30") and b"\x06\x03\x2b\x65\x70" in raw[:24]


def claimed_signer(metadata: Mapping[str, str]) -> str:
    """Who signed, as the metadata says it: `HMAC-SHA256`, or an Ed25519 key with its fingerprint;
    empty where there is no signature. Only `Key.check` proves it.
    """
    if "ed25519" in metadata:
        try:
            digest = hashlib.sha256(bytes.fromhex(metadata.get("ed25519_key", ""))).hexdigest()
        except ValueError:
            digest = "unreadable"
        return f"Ed25519 key {digest[:16]}"
    return "HMAC-SHA256" if "hmac" in metadata else ""


def _key_pair(path: Path, raw: bytes) -> Key:
    try:
        from cryptography.hazmat.primitives import serialization as forms
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (
            Ed25519PrivateKey,
            Ed25519PublicKey,
        )
    except ImportError as error:
        raise _unusable(
            path,
            "Ed25519 keys need the package cryptography",
            "pip install 'llm-assay[sign]', or use a secret",
        ) from error
    try:
        if raw.startswith(b"ssh-"):
            key: Any = forms.load_ssh_public_key(raw)
        elif b"OPENSSH PRIVATE" in raw[:40]:
            key = forms.load_ssh_private_key(raw, None)
        elif b"PUBLIC" in raw[:40]:
            key = forms.load_pem_public_key(raw)
        else:
            key = forms.load_pem_private_key(raw, None)
    except Exception as error:  # damaged, encrypted, or of a kind that the library does not know
        locked = isinstance(error, TypeError)  # so the library says that a passphrase is missing
        reason = "it is locked with a passphrase" if locked else "it cannot be read as a key"
        raise _unusable(
            path, reason, "give an Ed25519 key without a passphrase, as PEM or OpenSSH"
        ) from error
    private = key if isinstance(key, Ed25519PrivateKey) else None
    public = key.public_key() if private else key
    if not isinstance(public, Ed25519PublicKey):
        raise _unusable(
            path, "it is no Ed25519 key", "make one: ssh-keygen -t ed25519 -N '' -f pack_key"
        )
    return Key(path, b"", public.public_bytes(forms.Encoding.Raw, forms.PublicFormat.Raw), private)


def _verifies(public: bytes, signature: str, text: str) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(bytes.fromhex(signature), text.encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def _refused(name: str, what: str, remedy: str) -> AssayError:
    return AssayError(
        f"the pack {name} {what}", finding_id="fidelity.pack_signature", remedy=remedy
    )


def _unusable(
    path: Path, reason: str, remedy: str = "make one: head -c 32 /dev/urandom | base64 > key"
) -> UsageError:
    return UsageError(f"the key {path}: {reason}", remedy=remedy, finding_id="fidelity.usage")
