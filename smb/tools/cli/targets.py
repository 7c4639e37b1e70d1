"""`smb targets`: the targets for Prometheus, as a file for its file_sd_configs."""

from __future__ import annotations

import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from smb.config.parse import format_bytes, parse_address
from smb.config.settings import text_of
from smb.config.untrusted import parse_json
from smb.errors import UnavailableError
from smb.security.page_access import read_token

_TIMEOUT_S = 5.0
_TARGETS_BYTES_MAX = 1 << 20  # a few hundred bytes for each of 1024 servers
_TARGETS_PARTS_MAX = 16 * 1024


def targets(
    metrics: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT",
            envvar="SMB_COORDINATOR_METRICS",
            help="The coordinator's address for metrics; of several coordinators all, separated by commas.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write to this file, atomically, instead of standard output."
        ),
    ] = None,
    every: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Keep running, and write again at this interval. 0: write once."),
    ] = 0.0,
) -> None:
    """Print what Prometheus should scrape.

    That is all coordinators and every memory server that they know. Of several coordinators the first that answers is
    asked. If Prometheus can reach them, it needs no file: http_sd_configs with http://HOST:PORT/targets for each.

    Example: smb targets 127.0.0.1:9470 --output targets.json
    """
    addresses = metrics.split(",")
    for address in addresses:
        parse_address(address)
    while True:
        try:
            found = _read_first(addresses)
        except UnavailableError:
            if not every:
                raise  # when running on, the former file is the best there is
        else:
            if output is None:
                typer.echo(found, nl=False)
            else:
                _write(output, found)
        if not every:
            return
        time.sleep(every)


def _read_first(addresses: Sequence[str]) -> str:
    """Return the answer of the first coordinator that answers. Raises UnavailableError with what each one said."""
    failures = []
    for address in addresses:
        try:
            return _read(address)
        except UnavailableError as error:
            failures.append(str(error))
    raise UnavailableError("; ".join(failures))


def _read(metrics: str) -> str:
    url = f"http://{metrics}/targets"
    try:
        with urllib.request.urlopen(_pending(url), timeout=_TIMEOUT_S) as answer:  # noqa: S310 - http, as above
            read: bytes = answer.read(_TARGETS_BYTES_MAX + 1)
        text = read.decode()
        if len(read) > _TARGETS_BYTES_MAX:
            raise ValueError(f"its answer has more than {format_bytes(_TARGETS_BYTES_MAX)}")
        parse_json(text, _TARGETS_PARTS_MAX)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise UnavailableError(
            f"cannot read targets from a coordinator at {url} ({error}); is this the address of its --metrics?"
        ) from None
    return text


def _pending(url: str) -> urllib.request.Request:
    token_file = text_of("cluster.metrics_token_file")
    headers = {"Authorization": f"Bearer {read_token(Path(token_file))}"} if token_file else {}
    return urllib.request.Request(url, headers=headers)  # noqa: S310 - http, as the URL says


def _write(output: Path, text: str) -> None:
    staged = output.with_name(f"{output.name}.{secrets.token_hex(8)}.tmp")
    try:
        staged.write_text(text)
        staged.replace(output)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise UnavailableError(f"cannot write {output}: {error.strerror}") from None
