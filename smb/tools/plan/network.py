"""The network of a plan: link rates as people write them, the part that is payload, and start-up times."""

from __future__ import annotations

import math
import re
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import smb
from smb.errors import Error, InvalidArgumentError

# Constants of the code and of TCP, as in docs/scaling.md (tests/unit/tools/test_plan_model.py compares them with
# perf.model).
FRAME_BYTES, CHUNK_BYTES = 64, 256 << 10
CONNECTIONS_MAX = 4096  # limit of one server
CONNECTION_BYTES = 2 << 20  # in flight on one connection (docs/decisions.md, 0034)
SEGMENT_BYTES, PACKET_BYTES = 1448, 1514  # payload of a packet, and the bytes that it takes on a link
# Measured on this project's machine over loopback (docs/scaling.md): the cost of a call in addition to the round trip,
# and the rates of one client and of one loop of a server. A server has up to 8 loops.
CALL_S = 25e-6
CLIENT_PER_S, LOOP_PER_S, LOOPS = 4e9, 4e9, 8

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:bit|bit/s|bps)", re.IGNORECASE)
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_PROBE_BYTES = 4 << 20  # on each server
_TRIPS, _REPEATS = 50, 8


@dataclass(frozen=True)
class Network:
    """Link rates and start-up times.

    worker_per_s, server_per_s: bytes of parameters that a link of theirs can send in a second while receiving as many.
    rtt_s: of a packet. call_s: a call of a few bytes, with its round trip. source: a description of the values' origin.
    client_per_s: the same of one worker's process, whatever its link carries.
    """

    worker_per_s: float
    server_per_s: float
    rtt_s: float
    call_s: float
    source: str
    client_per_s: float = CLIENT_PER_S


def parse_rate(text: str) -> float:
    """Return the bits a second of "10Gbit", "400 Mbit/s", "1gbps". Raises InvalidArgumentError."""
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) * _PREFIXES[match[2].lower()] if match else 0.0
    if not 0 < rate < math.inf:
        raise InvalidArgumentError(f"a link's rate must be in bits a second, such as 10Gbit or 400Mbit, not {text!r}")
    return rate


def parse_seconds(text: str) -> float:
    """Return the seconds of "20ms", "50us", "0.1s". Raises InvalidArgumentError."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise InvalidArgumentError(f"a time needs a number and a unit, such as 20ms or 50us, not {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def payload_per_s(bits_per_s: float) -> float:
    """Return the payload bytes that a link carries in a second: without headers of Ethernet, TCP and frames."""
    return bits_per_s / 8 * SEGMENT_BYTES / PACKET_BYTES * CHUNK_BYTES / (CHUNK_BYTES + FRAME_BYTES)


def given(link: str, server_link: str | None, rtt: str, client_limit: str | None = None) -> Network:
    """Return the network for rates and a round trip given as text; client_limit: what one worker's process moves, at
    most, in each direction. Raises InvalidArgumentError.
    """
    rtt_s = parse_seconds(rtt)
    client_per_s = parse_rate(client_limit) / 8 if client_limit else CLIENT_PER_S
    ours, theirs = parse_rate(link), parse_rate(server_link or link)
    words = f"links of {link}" + (f", {server_link} at the servers" if server_link else "") + f", round trip {rtt}"
    if client_limit:
        words += f", at most {client_limit} for each worker's process"
    return Network(
        payload_per_s(ours),
        min(payload_per_s(theirs), LOOPS * LOOP_PER_S),
        rtt_s,
        rtt_s + CALL_S,
        words,
        client_per_s,
    )


def measured(address: str, timeout: float = 30.0) -> Network:
    """Measure the path to a cluster, through buffers of 4 MiB a server that are deleted again. Takes seconds.

    The rate from one server to one worker counts as the server's link, which is a lower bound. Raises Error.
    """
    with smb.connect(address, timeout=timeout) as client:
        servers = [server.name for server in client.servers() if server.alive]
        if not servers:
            raise Error(f"no memory server is registered at {address}; start one, or pass --link")
        call_s, one = _probe(client, servers[:1])
        rate = max(one, _probe(client, servers)[1]) if len(servers) > 1 else one
    words = f"measured at {address}: a call {call_s * 1e6:.0f} us, {one / 1e6:.4g} MB/s from one server"
    words += f", {rate / 1e6:.4g} from {len(servers)}"
    return Network(rate, one, call_s, call_s, words, max(rate, CLIENT_PER_S))  # the rate has the process's limit in it


def _probe(client: smb.Client, servers: list[str]) -> tuple[float, float]:
    """Return the seconds of a call of one element, and the bytes a second of the slower direction."""
    data = np.zeros(len(servers) * _PROBE_BYTES // 4, np.float32)
    name = f"smb-plan-{secrets.token_hex(8)}"
    buffer = client.create(name, data.size, "float32", servers=servers)
    try:
        one = np.zeros(1, np.float32)
        call_s = _median(lambda: buffer.write(one, offset=0), _TRIPS)
        seconds = max(_median(lambda: buffer.write(data), _REPEATS), _median(lambda: buffer.read(out=data), _REPEATS))
        return call_s, data.nbytes / max(seconds - call_s, 1e-9)
    finally:
        client.delete(name, missing_ok=True)


def _median(call: Callable[[], object], times: int) -> float:
    call()
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)
