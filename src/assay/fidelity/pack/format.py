"""The format of a pack: a reference in one file that a stranger can check and compare against.

It is a safetensors file of the final states [windows, n, d] in 16 bits and the token ids [windows,
length]; its metadata holds a manifest: how and by what it was scored, the SHA-256 of every tensor
and window, those of the model's files, the floors, what rounding the states to 16 bits cost, and
the digest of the output head. The head itself is in it only where that was asked for. Else it comes
from a checkpoint (`pack:FILE?head=FOLDER`) or from the candidate, and counts only if its digest is
that of the pack.

The manifest carries its own hash, and a signature where a key was given (`signature`): who has the
secret, or the public half of the key, can tell that the pack is unchanged. Without a key the
hash tells damage only.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import Head
from assay.errors import AssayError

if TYPE_CHECKING:
    import torch


FORMAT, VERSION = "assay-pack", 1


def head_digest(head: Head) -> str:
    """SHA-256 of an output head as float32, so that a head in 16 bits and the same one widened are
    equal.
    """
    digest = hashlib.sha256(repr(tuple(head.weight.shape)).encode())
    for tensor in (head.weight, head.bias):
        for rows in () if tensor is None else tensor.detach().cpu().split(8192):
            digest.update(bytes_of(rows.float()))
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor as a safetensors file holds them."""
    import torch

    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def sha256_of(raw: bytes) -> str:
    """The SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(raw).hexdigest()


def canonical(manifest: Mapping[str, Any]) -> str:
    """The one way in which a manifest is written, so that its hash is its own."""
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), default=dict)


def read_metadata(raw: bytes, path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    try:
        (size,) = struct.unpack("<Q", raw[:8])
        found: dict[str, str] = json.loads(raw[8 : 8 + size])["__metadata__"]
        return dict(found)
    except (struct.error, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise altered(path, "it is no pack, or cut short") from error


def altered(path: Path, reason: str) -> AssayError:
    """The error for a pack that is not what was packed."""
    return AssayError(
        f"the pack {path.name} is damaged or altered: {reason}",
        finding_id="fidelity.pack_altered",
        remedy="fetch it again, or make it again: assay reference pack DIR --out FILE",
    )
