"""Who packed it: a signature by a secret that both sides share, or by a key pair whose public half anybody may have.

A file with a secret of at least 16 bytes signs by HMAC-SHA256 (RFC 2104). A private Ed25519 key (RFC 8032), as PEM or as
`ssh-keygen -t ed25519` writes it, signs so that its public half checks. Signatures are entries of a pack's metadata.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import AssayError, UsageError

LEAST_KEY = 16
"""Bytes of a secret."""
_PEM, _SSH = b"-----BEGIN ", b"ssh-"


@dataclass(frozen=True)
class Key:
    """A secret, or an Ed25519 key: `public` are its 32 bytes, `private` signs where the file holds that half."""

    path: Path
    secret: bytes = b""
    public: bytes = b""
    private: Any = None

    def sign(self, text: str) -> dict[str, str]:
        """The entries of the metadata that sign a text; UsageError where the file holds the public half alone."""
        if self.secret:
            return {"hmac": self._mac(text)}
        if self.private is None:
            raise _unusable(self.path, "it is a public key, which checks and cannot sign", "sign with the private key")
        return {"ed25519": self.private.sign(text.encode()).hex(), "ed25519_key": self.public.hex()}

    def check(self, name: str, text: str, metadata: Mapping[str, str]) -> None:
        """AssayError unless this key signed the text."""
        kind = "hmac" if self.secret else "ed25519"
        signature = metadata.get(kind)
        if signature is None:
            other = signer(metadata)
            if other:
                raise _refused(
                    name, f"is signed by {other}, and this key is of another kind", "give the key of that kind"
                )
            raise _refused(name, "is not signed, and a key was given", "leave the key out, or ask for a signed pack")
        if self.secret:
            whole = hmac.compare_digest(self._mac(text), signature)
        else:
            whole = _verifies(self.public, signature, text)
        if not whole:
            raise _refused(name, "was not signed with this key", "check the key; if it is right, the pack was changed")

    def _mac(self, text: str) -> str:
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()


def read_key(path: Path | None) -> Key | None:
    """The key in a file; UsageError in one line where there is none."""
    if path is None:
        return None
    try:
        raw = path.read_bytes().strip()
    except OSError as error:
        raise _unusable(path, error.strerror or "it cannot be read") from error
    if raw.startswith((_PEM, _SSH)):
        return _key_pair(path, raw)
    if len(raw) < LEAST_KEY:
        raise _unusable(path, f"it holds fewer than {LEAST_KEY} bytes")
    return Key(path, raw)


def signer(metadata: Mapping[str, str]) -> str:
    """Who signed, as far as the metadata says: `HMAC-SHA256`, or an Ed25519 key with its fingerprint; empty for nobody."""
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
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    except ImportError as error:
        raise _unusable(
            path, "Ed25519 keys need the package cryptography", "pip install 'llm-assay[sign]', or use a secret"
        ) from error
    try:
        if raw.startswith(_SSH):
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
        raise _unusable(path, reason, "give an Ed25519 key without a passphrase, as PEM or OpenSSH") from error
    private = key if isinstance(key, Ed25519PrivateKey) else None
    public = key.public_key() if private else key
    if not isinstance(public, Ed25519PublicKey):
        raise _unusable(path, "it is no Ed25519 key", "make one: ssh-keygen -t ed25519 -N '' -f pack_key")
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
    return AssayError(f"the pack {name} {what}", finding_id="fidelity.pack_signature", remedy=remedy)


def _unusable(path: Path, reason: str, remedy: str = "make one: head -c 32 /dev/urandom | base64 > key") -> UsageError:
    return UsageError(f"the key {path}: {reason}", remedy=remedy, finding_id="fidelity.usage")
