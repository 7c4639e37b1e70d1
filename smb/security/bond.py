"""The bond of a proof on the control plane: the proof covers, besides the token, the certificate of the client that
shows it. So it is useless to anybody else. The engine does the same for data connections (csrc/channel/bond.h);
docs/protocol.md specifies it.
"""

from __future__ import annotations

import hashlib
import ssl
import struct

_LABEL, _CONTROL_PLANE = b"smb channel 1", 5
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def first_of(pem: bytes) -> bytes:
    """Return the first certificate in a PEM text, in DER: the owner's. Raises ValueError if there is none."""
    text = pem.decode("ascii", "replace").partition(_BEGIN)[2].partition(_END)[0]
    if not text:
        raise ValueError("the text contains no certificate")
    return ssl.PEM_cert_to_DER_cert(_BEGIN + text + _END)


def bond_of_caller(pem: bytes) -> bytes:
    """Return the 32 bytes that bond control calls to the holder of that certificate; empty for calls without TLS."""
    if not pem:
        return bytes(32)
    digest = hashlib.sha256(first_of(pem)).digest()
    return hashlib.sha256(struct.pack("<16sQ", _LABEL, _CONTROL_PLANE) + digest).digest()
