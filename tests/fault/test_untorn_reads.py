"""Readers against writers at full rate: no read ever shows half of an addition to a chunk, or a mix of two versions."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import smb
from tests.fault.long import LIMIT_S, times
from tests.support.checkers import check_one_version, check_untorn
from tests.support.clients import Adders, in_process, publish_until_killed
from tests.support.transports import EACH_WAY, FAR

pytestmark = pytest.mark.timeout(LIMIT_S)

READS = times(2_500, 500_000)  # over each transport
CHUNK = 16 * 1024 // 8  # elements: small, so that many reads meet a change
COUNT = 4 * CHUNK
VERSIONS = 15  # are published at least while the readers read


@pytest.mark.parametrize("way", EACH_WAY)
def test_reads_of_additions(way: str) -> None:
    """Two processes add, over shm and tcp; every chunk that is read is whole."""
    with (
        smb.LocalCluster(servers=1, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport=way) as client,
    ):
        adders = Adders(cluster.address, ("shm", FAR), COUNT)
        try:
            common = client.open("common")
            chunk = common.layout.chunk_bytes // 8
            out = np.empty(min(chunk, COUNT), np.int64)
            changes, last = 0, -1
            turn = 0
            while turn < READS or changes < READS // 100:
                turn += 1
                at = turn * 128 % COUNT // chunk * chunk
                common.read(at, min(chunk, COUNT - at), out=out[: min(chunk, COUNT - at)])
                check_untorn(out[: min(chunk, COUNT - at)], at)
                changes += int(out[0]) != last
                last = int(out[0])
            done = adders.finish()
        except BaseException:
            adders.kill()
            raise
        print(f"{turn} reads over {way}, {changes} different, {sum(done)} additions: 0 torn")


@pytest.mark.parametrize("way", EACH_WAY)
def test_reads_of_versions(way: str) -> None:
    """A process publishes at full rate over two servers; every read is one version, and none goes back."""
    count, reads = 100_000, times(150, 20_000)
    with (
        smb.LocalCluster(servers=2, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport=way) as client,
        smb.connect(cluster.address, transport=way) as second,
    ):
        client.create("w", count, "int64", versions=2, stripe="64KiB")
        seen: list[int] = []
        failures: list[BaseException] = []

        def read(own: smb.Client) -> None:
            buffer, out, last = own.open("w"), np.empty(count, np.int64), 0
            try:
                done = 0
                while done < reads // 2 or last < VERSIONS:
                    done += 1
                    version = check_one_version(buffer.read(out=out))
                    assert version >= last
                    last = version
                    seen.append(version)
            except BaseException as error:  # noqa: BLE001 - raised again below
                failures.append(error)

        with in_process(publish_until_killed, cluster.address, "w", count):
            client.open("w").wait(3, timeout=30)
            threads = [threading.Thread(target=read, args=(own,)) for own in (client, second)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failures, failures[0]
        assert len(set(seen)) > 2
        # Its publisher was killed in the middle: what was published last is still there, and another goes on.
        before = check_one_version(client.open("w").read())
        start = time.monotonic()
        assert second.open("w").publish(np.full(count, before + 1)) > 0
        assert time.monotonic() - start < 15
        assert check_one_version(client.open("w").read()) == before + 1
        print(f"{len(seen)} reads over {way} of {len(set(seen))} versions: 0 mixed")
