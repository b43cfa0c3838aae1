"""A digest of weights on disk, by which trainer and policy server check that they use the same weights."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest_weights(directory: Path) -> str:
    """Returns the digest of all ``*.safetensors`` in a directory: their names and contents."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()
