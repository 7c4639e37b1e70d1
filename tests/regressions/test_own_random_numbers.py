"""Pauses between tries took numbers from Python's own generator. A program that had seeded it got other
numbers in each run.
"""

from __future__ import annotations

import os
import random
import socket

import pytest

import smb
from smb.config.backoff import Backoff


def test_a_pause_takes_none_of_the_programs_numbers() -> None:
    """Neither one pause nor a client that tries to connect."""
    random.seed(7)
    before = random.getstate()
    assert 0.5 <= Backoff(1.0, 8.0).next_s() <= 1.0
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(smb.UnavailableError):
            smb.connect(f"127.0.0.1:{nobody.getsockname()[1]}", timeout=0.5)
    assert random.getstate() == before


def test_forks_pause_differently() -> None:
    """Processes that were forked with one generator's state come back at different moments."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(there, repr(Backoff(1.0, 8.0).next_s()).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert float(os.read(here, 100)) != Backoff(1.0, 8.0).next_s()
    os.close(here)
    os.close(there)
