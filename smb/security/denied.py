"""Who is refused although the certificate is good: `deny.txt` and `crl.pem`, beside `ca.pem` or in --deny DIR.

`deny.txt` has one entry in a line, `name=NAME` (smb:name/NAME in the certificate, whatever its role) or `serial=HEX`,
as `openssl x509 -noout -serial` prints it. Empty lines and lines that begin with # are skipped. What looks like
a slip (a remark after an entry, a space before the name, the whole URI) is an error, because the entry would deny
nobody; a certificate whose name has a space or a # is denied by its serial number. `crl.pem` has revocation lists, as
`openssl ca -gencrl` makes them. Both files are optional, and are read again when they change, as the certificates are.
"""

from __future__ import annotations

import re

from smb.errors import InvalidArgumentError

DENY_FILE, LISTS_FILE = "deny.txt", "crl.pem"
_NAME = re.compile(r"(?!smb:)[!\"$-~]{1,255}")
_SERIAL = re.compile(r"[0-9A-F]{1,64}")


def entries_of(text: bytes, where: str) -> bytes:
    """Return the entries in the engine's form: sorted lines. Raises InvalidArgumentError with the line at fault."""
    found = set()
    for number, line in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
        entry = line.strip()
        if entry and not entry.startswith("#"):
            found.add(_entry(entry, f"{where}:{number}"))
    return "".join(sorted(found)).encode()


def _entry(entry: str, where: str) -> str:
    kind, _, value = entry.partition("=")
    if kind == "name" and _NAME.fullmatch(value):
        return f"name={value}\n"
    serial = value.replace(":", "").upper()
    if kind == "serial" and _SERIAL.fullmatch(serial):
        return f"serial={serial.lstrip('0')}\n"
    raise InvalidArgumentError(
        f'{where}: "{entry[:80]}" is neither name=NAME nor serial=HEX, alone in its line; NAME is what '
        f"follows smb:name/ in the certificate, without spaces and #; `openssl x509 -noout -serial -in cert.pem` "
        f"prints the latter"
    )
