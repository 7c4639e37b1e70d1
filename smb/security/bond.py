"""What a proof for the control plane covers beside the token: the certificate of who shows it. Handed on by somebody
else it is not good. For data connections the engine does the same (csrc/base/bond.h); docs/protocol.md has the words.
"""

from __future__ import annotations

import hashlib
import ssl
import struct

_LABEL, _CONTROL_PLANE = b"smb channel 1", 5
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def first_of(pem: bytes) -> bytes:
    """Return the first certificate of several, in DER: its owner's. Raises ValueError for none."""
    text = pem.decode("ascii", "replace").partition(_BEGIN)[2].partition(_END)[0]
    if not text:
        raise ValueError("no certificate")
    return ssl.PEM_cert_to_DER_cert(_BEGIN + text + _END)


def bond_of_caller(pem: bytes) -> bytes:
    """Return 32 bytes for the control plane's calls by the holder of that certificate; empty: it is in the clear."""
    if not pem:
        return bytes(32)
    digest = hashlib.sha256(first_of(pem)).digest()
    return hashlib.sha256(struct.pack("<16sQ", _LABEL, _CONTROL_PLANE) + digest).digest()
