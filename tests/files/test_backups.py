"""smb snapshot --all and smb restore --all: a whole cluster into a directory, and into another cluster."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import smb
import smb.torch
import smb.train
from smb.config.limits import BACKUP_MANIFEST_BYTES_MAX
from smb.config.untrusted import open_regular
from smb.files import backups, copying
from smb.files.attributes import Attributes
from smb.spi import rename_file
from tests.support.commands import run_smb
from tests.support.daemons import wait_for
from tests.support.other_users import AS_ROOT, STRANGER, output_as, sticky

COUNT = 100_003


@pytest.fixture(scope="module")
def clusters() -> Iterator[list[smb.LocalCluster]]:
    with smb.LocalCluster(servers=2, capacity="64MiB") as one, smb.LocalCluster(servers=2, capacity="64MiB") as two:
        yield [one, two]


@pytest.fixture
def cluster(clusters: list[smb.LocalCluster]) -> Iterator[smb.LocalCluster]:
    """A cluster of which backups are made, without buffers."""
    yield clusters[0]
    empty(clusters[0])


@pytest.fixture
def other(clusters: list[smb.LocalCluster]) -> Iterator[smb.LocalCluster]:
    """A cluster into which backups are restored, without buffers."""
    yield clusters[1]
    empty(clusters[1])


def empty(cluster: smb.LocalCluster) -> None:
    with smb.connect(cluster.address) as client:
        for info in client.list():
            client.delete(info.name, missing_ok=True)


def run(*words: str, at: smb.LocalCluster, fails: bool = False) -> str:
    """Run the command; return what it says."""
    done = run_smb(*words, coordinator=at.address)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + done.stderr


def fill(client: smb.Client) -> dict[str, np.ndarray[Any, Any]]:
    """Make one buffer of each kind; return the values."""
    rng = np.random.default_rng(7)
    values: dict[str, np.ndarray[Any, Any]] = {
        "team/weights": rng.random((11, COUNT // 11), dtype=np.float32),
        "counts": rng.integers(0, 1 << 40, COUNT),
        "bytes": rng.integers(0, 255, 3, dtype=np.uint8),
        "policy": rng.random(1000, dtype=np.float32),
    }
    client.create(
        "team/weights", values["team/weights"].shape, replicas=2, wire="bfloat16", metadata={"step": 7}
    ).write(values["team/weights"], wire="exact")
    client.create("team/state", state_of="team/weights").write(values["team/weights"] * 2, wire="exact")
    client.create("counts", COUNT, "int64").write(values["counts"])
    client.create("bytes", 3, "uint8").write(values["bytes"])
    published = client.create("policy", 1000, versions=3)
    for number in range(4):
        published.publish(values["policy"] * number)
    client.create("never", 10, versions=2)
    client.create("named", tensors={"w": ((10, 20), "float32"), "b": ((10,), "float32")}).tensor("b").write(
        np.arange(10, dtype=np.float32)
    )
    client.create("none", (0, 3))
    worker = smb.train.join(client, "run", np.zeros(100, np.float32), smb.train.DiLoCo(every=1))
    with worker:
        worker.step()
    return values


def check(client: smb.Client, values: dict[str, np.ndarray[Any, Any]]) -> None:
    """All of it is there, with its form."""
    weights, state = client.open("team/weights"), client.open("team/state")
    for name in ("team/weights", "counts", "bytes"):
        np.testing.assert_array_equal(client.open(name).read(wire="exact"), values[name])
    np.testing.assert_array_equal(state.read(wire="exact"), values["team/weights"] * 2)
    assert (weights.info.replicas, weights.wire, weights.metadata) == (2, "bfloat16", {"step": 7})
    assert state.info.moves_with(weights.info)
    policy = client.open("policy")
    assert policy.versions == 3
    np.testing.assert_array_equal(policy.read(), values["policy"] * 3)
    assert policy.version == 4
    never = client.open("never")
    assert (never.versions, never.version) == (2, 0)
    np.testing.assert_array_equal(client.open("named").tensor("b").read(), np.arange(10))
    assert client.open("none").shape == (0, 3)
    status = smb.train.status(client, "run")
    assert (status.scheme, status.round) == ("diloco", 1)


def test_a_cluster_is_saved_and_made_again(cluster: smb.LocalCluster, other: smb.LocalCluster, tmp_path: Path) -> None:
    """Values, shapes, dtypes, copies, metadata, tensors, and published states as a whole. What exists is not replaced
    unless that is asked for.
    """
    backup = tmp_path / "monday"
    with smb.connect(cluster.address) as client, smb.connect(other.address) as there:
        values = fill(client)
        run("snapshot", "--all", str(backup), "--together", "counts,bytes", at=cluster)
        assert not list(tmp_path.glob("*.part"))
        assert not any(".smb-files" in info.name for info in client.list())
        entries = {entry["name"]: entry for entry in json.loads((backup / "backup.json").read_text())["buffers"]}
        assert entries["policy"]["generation"] == 4
        again = run("snapshot", "--all", str(backup), at=cluster, fails=True)
        assert "exists; give each backup a directory of its own" in again
        run("restore", "--all", str(backup), at=other)
        check(there, values)
        there.open("counts").fill(0)
        refused = run("restore", "--all", str(backup), at=other, fails=True)
        assert "these exist: bytes, counts, named" in refused
        assert not there.open("counts").read().any()
        refused = run("restore", "--all", str(backup), "--replace", at=other, fails=True)
        assert "these exist: run; nothing was restored; delete these trainings first" in refused
        assert not there.open("counts").read().any()
        smb.train.delete(there, "run")
        run("restore", "--all", str(backup), "--replace", at=other)
        check(there, values)
        smb.train.delete(there, "run")
        for info in there.list():
            there.delete(info.name)
        (backup / entries["counts"]["file"]).write_bytes(bytes(8 * COUNT))
        spoilt = run("restore", "--all", str(backup), at=other, fails=True)
        assert "wrong CRC-32C" in spoilt
        assert there.list() == []


def test_names_that_are_not_there_and_published_ones_are_refused(cluster: smb.LocalCluster, tmp_path: Path) -> None:
    """So is one in two lists. Nothing is left then, and no directory with others' files is used."""
    with smb.connect(cluster.address) as client:
        client.create("state", 10, versions=2)
        client.create("w", 10)
        client.create("v", 10)
        for groups, told in (
            (["nothing,state"], "there is no buffer 'nothing'"),
            (["state"], "published by generations"),
            (["v,w", "w"], "'w' is in two lists"),
        ):
            options = [word for names in groups for word in ("--together", names)]
            refused = run("snapshot", "--all", str(tmp_path / "b"), *options, at=cluster, fails=True)
            assert told in refused
            assert not (tmp_path / "b").exists()
        assert not list(tmp_path.iterdir())
        (tmp_path / "b.part").mkdir(mode=0o700)
        (tmp_path / "b.part/kept").write_text("of somebody else")
        refused = run("snapshot", "--all", str(tmp_path / "b"), at=cluster, fails=True)
        assert "kept is not of a backup" in refused
        client.delete("state")
    assert (tmp_path / "b.part/kept").read_text() == "of somebody else"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 2, "buffers": []}', '{"format": 1, "buffers": [{"name": "w"}]}']
)
def test_what_is_no_backup_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "backup.json").write_text(text)
    with pytest.raises(smb.InvalidArgumentError, match="is not of a backup"):
        backups.read_manifest(tmp_path)


ENTRY = {"name": "w", "file": "data-000001.bytes", "shape": [10], "dtype": "float32"}


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([{"file": "../../etc/passwd"}], "has the file"),
        ([{"state_of": ["w"]}], "something else where a text"),
        ([{"metadata": []}], "something else where a text or metadata"),
        ([{"shape": [1.5]}], "something else where whole numbers"),
        ([{"versions": True}], "something else where whole numbers"),
        ([{"replicas": -1}], "something else where whole numbers"),
        ([{"kind": "barrier"}], "unknown kind"),
        ([{"kind": "training", "file": ""}], "has no file"),
        ([{"file": ""}], "has no file"),
        ([{"name": "a/../b"}], "cannot name a buffer"),
        ([{"name": "n" * 256}], "cannot name a buffer"),
        ([{}, {}], "'w' occurs twice"),
        ([{"state_of": "later"}, {"name": "later"}], "moves with 'later'"),
        ([{"surprise": 1}], "surprise"),
        ([{"file_attributes": 1}], "something else where a text"),
        ([{"file_attributes": "A" * 8192}], "more attributes than a file may have"),
        ([{"file_attributes": "!"}], "base64"),
    ],
)
def test_entries_that_no_backup_has_are_refused(tmp_path: Path, entries: list[dict[str, Any]], why: str) -> None:
    text = {"format": 1, "buffers": [{**ENTRY, **each} for each in entries]}
    (tmp_path / "backup.json").write_text(json.dumps(text))
    with pytest.raises(smb.InvalidArgumentError, match=f"is not of a backup: .*{why}"):
        backups.read_manifest(tmp_path)
    text["buffers"] = [ENTRY, {**ENTRY, "name": "v", "state_of": "w", "versions": 2, "file": ""}]
    (tmp_path / "backup.json").write_text(json.dumps(text))
    assert [entry.name for entry in backups.read_manifest(tmp_path)[0]] == ["w", "v"]


def test_a_manifest_has_a_bound(cluster: smb.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger one is not read, and a backup notes what would make it larger, so that it can be restored."""
    with (tmp_path / "backup.json").open("wb") as file:
        file.truncate(BACKUP_MANIFEST_BYTES_MAX + 1)
    with pytest.raises(smb.InvalidArgumentError, match="may have at most"):
        backups.read_manifest(tmp_path)
    monkeypatch.setattr(backups, "BACKUP_MANIFEST_BYTES_MAX", 20_000)
    with smb.connect(cluster.address) as client:
        client.create("a", 10, metadata={"large": "x" * 20_000}).fill(1)
        client.create("b", 10).fill(1)
        with backups.Backup(client, tmp_path / "b", lambda _: None) as backup:
            backup.add(backups.kept(client))
    entries, missing = backups.read_manifest(tmp_path / "b")
    assert [entry.name for entry in entries] == ["b"]
    assert "too large" in missing["a"]


def test_what_is_checked_is_what_is_restored(
    cluster: smb.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is opened once, and each block written once it was checked: into a version, too, of several blocks."""
    opened: list[str] = []
    with smb.connect(cluster.address) as client:
        values = np.random.default_rng(3).random(5_000_003, dtype=np.float32)
        client.create("plain", values.size).write(values)
        client.create("state", values.size, versions=2).publish(values)
        with backups.Backup(client, tmp_path / "b", lambda _: None) as backup:
            backup.add(backups.kept(client))
        entries, _ = backups.read_manifest(tmp_path / "b")

        def look(path: Path) -> int:
            opened.append(path.name)
            return open_regular(path)

        monkeypatch.setattr(copying, "open_regular", look)
        monkeypatch.delattr(np, "memmap")  # which opens files, too
        backups.restore(client, tmp_path / "b", entries, owned=lambda _: (), replace=True, say=lambda _: None)
        assert opened == [entry.file for entry in entries]
        for name in ("plain", "state"):
            np.testing.assert_array_equal(client.open(name).read(), values)
        assert client.open("state").version == 1
        data = tmp_path / "b" / entries[1].file
        with data.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff")
        with pytest.raises(smb.Error, match="wrong CRC-32C"):
            backups.restore(client, tmp_path / "b", entries, owned=lambda _: (), replace=True, say=lambda _: None)
        with data.open("r+b") as file:
            file.truncate(8)
        with pytest.raises(smb.Error, match="has 8 bytes, and its buffer takes"):
            backups.restore(client, tmp_path / "b", entries, owned=lambda _: (), replace=True, say=lambda _: None)
        assert [info.name for info in client.list()] == ["plain", "state"]


def test_a_state_with_deltas_is_made_again(cluster: smb.LocalCluster, other: smb.LocalCluster, tmp_path: Path) -> None:
    """It has no log until its trainer publishes again. One that has a log is not replaced, nor anything beside it."""

    def state(value: float) -> dict[str, torch.Tensor]:
        return {"w": torch.full((1000,), value)}

    with smb.connect(cluster.address) as client, smb.connect(other.address) as there:
        publisher = smb.torch.Publisher(client, "policy", state(0), deltas=4)
        for value in range(3):
            publisher.publish(state(value))
        client.create("a", 10).fill(1)
        client.create("z", 10).fill(1)
        run("snapshot", "--all", str(tmp_path / "b"), at=cluster)
        run("restore", "--all", str(tmp_path / "b"), at=other)
        assert [info.name for info in there.list()] == ["a", "policy", "z"]
        again = smb.torch.Publisher(there, "policy", state(0), deltas=4)
        again.publish(state(7))
        assert smb.torch.follow(there, "policy").state_dict()["w"].tolist() == [7.0] * 1000
        there.open("a").fill(5)
        refused = run("restore", "--all", str(tmp_path / "b"), "--replace", at=other, fails=True)
        assert "these exist: policy.log; nothing was restored" in refused
        assert there.open("a").read()[0] == 5
        run("rm", "policy", at=other)
        run("restore", "--all", str(tmp_path / "b"), "--replace", at=other)
        assert there.open("a").read()[0] == 1


def join(client: smb.Client, name: str) -> smb.train.Worker:
    return smb.train.join(client, name, np.zeros(100, np.float32), smb.train.DiLoCo(every=1))


def test_work_units_and_buffers_below_a_training_are_no_trainings(
    cluster: smb.LocalCluster, other: smb.LocalCluster, tmp_path: Path
) -> None:
    """Work units alone and users' buffers below a training's name are saved; a training's parts and work units are not
    saved beside it. A training below another one's name is saved, too.
    """
    with smb.connect(cluster.address) as client, smb.connect(other.address) as there:
        with join(client, "run") as worker, join(client, "run/second") as second:
            worker.step()
            second.step()
            for name in ("units", "run/units"):
                with smb.train.WorkUnits(client, name, 10, 1, worker=worker) as units:
                    assert units.take() is not None
            client.create("run/eval", 10).fill(3)
            client.create("run/nextone", 10).fill(4)
            client.create("state", 10, versions=2)
            client.create("state.log", 10).fill(5)  # of a state without deltas
            run("snapshot", "--all", str(tmp_path / "b"), at=cluster)
        buffers = json.loads((tmp_path / "b/backup.json").read_text())["buffers"]
        kinds = {entry["name"]: entry["kind"] for entry in buffers}
        assert {name for name in kinds if kinds[name] == "training"} == {"run", "run/second"}
        assert {name for name in kinds if kinds[name] == "buffer"} == {
            *("run/eval", "run/nextone", "state", "state.log", "units", "units/members", "units/tick"),
        }
        run("restore", "--all", str(tmp_path / "b"), at=other)
        assert [there.open(name).read()[0] for name in ("run/eval", "run/nextone", "state.log")] == [3, 4, 5]
        assert [smb.train.status(there, name).round for name in ("run", "run/second")] == [1, 1]
        with smb.train.WorkUnits(there, "units", 10, 1, epochs=1) as units:
            assert len(list(units)) == 10


def test_weights_of_a_training_are_never_replaced(
    cluster: smb.LocalCluster, other: smb.LocalCluster, tmp_path: Path
) -> None:
    """Where the backup has a plain buffer of that name. Anything else stays, too."""
    with smb.connect(cluster.address) as client, smb.connect(other.address) as there:
        client.create("a", 10).fill(1)
        client.create("run", 100).fill(9)
        run("snapshot", "--all", str(tmp_path / "b"), at=cluster)
        there.create("a", 10)
        with join(there, "run") as worker:
            refused = run("restore", "--all", str(tmp_path / "b"), "--replace", at=other, fails=True)
            assert "these exist: run; nothing was restored; delete these trainings first" in refused
            worker.step()
            assert not there.open("a").read().any()
            assert not there.open("run").read().any()


def test_what_a_killed_backup_left_is_in_nobodys_way(cluster: smb.LocalCluster, tmp_path: Path) -> None:
    part = tmp_path / "b.part"
    part.mkdir(mode=0o700)
    for name in ("data-000001.bytes.part", "data-000007.bytes", "data-000009.training.part-ab", "backup.json"):
        (part / name).write_text("half")
    with smb.connect(cluster.address) as client:
        client.create("w", 10).fill(1)
        run("snapshot", "--all", str(tmp_path / "b"), at=cluster)
    assert not part.exists()
    assert {each.name for each in (tmp_path / "b").iterdir()} == {
        *("backup.json", "data-000001.bytes", "data-000001.bytes.crc32c"),
    }


def test_buffers_that_are_gone_or_replaced_meanwhile_end_no_backup(
    cluster: smb.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was deleted is skipped, what was replaced is saved as it is now, and what was renamed is noted."""
    said: list[str] = []
    with smb.connect(cluster.address) as client:
        for name in ("deleted", "kept", "renamed", "replaced"):
            client.create(name, 10).fill(1)
        snapshot = copying.snapshot

        def then_replace(client: smb.Client, name: str, path: Path) -> int:
            number = snapshot(client, name, path)
            if name == "replaced" and len(client.open(name).shape) == 1:
                client.delete(name)
                client.create(name, (2, 3)).fill(2)
            return number

        monkeypatch.setattr(copying, "snapshot", then_replace)
        infos = backups.kept(client)
        client.delete("deleted")
        client.rename("renamed", "other")
        with backups.Backup(client, tmp_path / "b", said.append) as backup:
            backup.add(infos)
        assert {info.name for info in client.list()} == {"kept", "other", "replaced"}
    entries, missing = backups.read_manifest(tmp_path / "b")
    assert [(entry.name, entry.shape) for entry in entries] == [("kept", (10,)), ("replaced", (2, 3))]
    assert "deleted: was deleted meanwhile" in said
    assert missing == {"renamed": "it was renamed to 'other' meanwhile"}
    assert (tmp_path / "b" / entries[1].file).stat().st_size == 24


# More than 5 s: waits for two calls on a server that is away, and for its lease.
def test_what_cannot_be_read_is_missing_and_the_rest_is_saved(tmp_path: Path) -> None:
    """A server is away, then back without its memory: the backup ends with 3 and says what it lacks, and a restore says
    it again. Nothing waits twice for a server that is away, and no copy is left behind.
    """
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster, smb.connect(cluster.address, timeout=2) as client:
        away = cluster.servers[1]
        for name in ("a", "b", "c", "d"):
            client.create(name, 10, servers=[away.name if name in ("b", "c") else cluster.servers[0].name]).fill(1)
        away.kill()
        wait_for(lambda: not all(server.alive for server in client.servers()), "the server to be away")
        with backups.Backup(client, tmp_path / "monday") as backup:
            backup.add(backups.kept(client), together=[["a", "b"]])
        assert [entry.name for entry in backup.entries] == ["d"]
        assert sorted(backup.missing) == ["a", "b", "c"]
        assert f"memory server {away.name} is away" in backup.missing["c"]
        for left in cluster.memory_directory.glob(f"smb.{away.name}.*"):
            left.unlink()
        away.start()
        wait_for(lambda: client.open("b").info.lost, "its memory to count as lost")
        done = run_smb("snapshot", "--all", tmp_path / "tuesday", coordinator=cluster.address)
        assert done.returncode == 3
        for name in ("b", "c"):
            assert f"not in the backup: {name}: " in done.stderr
        assert {info.name for info in client.list()} == {"a", "b", "c", "d"}
        for info in client.list():
            client.delete(info.name)
        done = run_smb("restore", "--all", tmp_path / "tuesday", coordinator=cluster.address)
        assert done.returncode == 0
        assert "not in the backup: b: " in done.stderr
        assert [info.name for info in client.list()] == ["a", "d"]


def test_a_backups_directory_is_this_users_alone(cluster: smb.LocalCluster, tmp_path: Path) -> None:
    """Others can guess the name DIR.part: a link there is not followed, and what others may change gets private."""
    target, backup, part = tmp_path / "target", tmp_path / "b", tmp_path / "b.part"
    target.mkdir()
    with smb.connect(cluster.address) as client:
        client.create("w", 10).fill(1)
    part.symlink_to(target)
    refused = run("snapshot", "--all", str(backup), at=cluster, fails=True)
    assert "b.part is no directory of this user's" in refused
    assert not list(target.iterdir())
    part.unlink()
    part.mkdir()
    part.chmod(0o777)
    (tmp_path / "victim").write_text("kept")
    (part / "backup.json").symlink_to(tmp_path / "victim")
    run("snapshot", "--all", str(backup), at=cluster)
    assert (tmp_path / "victim").read_text() == "kept"
    assert stat.S_IMODE(backup.stat().st_mode) == 0o700
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nothing")
    refused = run("snapshot", "--all", str(dangling), at=cluster, fails=True)
    assert "exists; give each backup a directory of its own" in refused


@AS_ROOT
def test_another_users_directory_is_not_used(cluster: smb.LocalCluster) -> None:
    with sticky() as place:
        planted = "become(); os.mkdir(sys.argv[2]); os.chmod(sys.argv[2], 0o777)"
        output_as(STRANGER, planted, place / "b.part")
        with smb.connect(cluster.address) as client:
            client.create("w", 10).fill(1)
        refused = run("snapshot", "--all", str(place / "b"), at=cluster, fails=True)
        assert "b.part is no directory of this user's" in refused
        assert not list((place / "b.part").iterdir())


def test_rights_and_links_are_saved_and_copied(
    cluster: smb.LocalCluster, other: smb.LocalCluster, tmp_path: Path
) -> None:
    """A file that its owner alone may read stays so, and a symbolic link one: by a backup, a copy, a restore over it.
    A buffer without attributes has an entry that earlier releases read."""
    with smb.connect(cluster.address) as client, smb.connect(other.address) as second:
        texts = {
            "secret": Attributes(0o600, (7, 8), 9, extended={"k": b"v"}).encode(),
            "link": Attributes(link=True).encode(),
            "plain": b"",
        }
        for name, text in texts.items():
            buffer = client.create(name, 6, "uint8")
            buffer.write(np.frombuffer(b"secret", np.uint8))
            rename_file(client, (name, buffer.info.id), name, attributes=text)
        run("snapshot", "--all", str(tmp_path / "b"), "--together", "secret,plain", at=cluster)
        run("restore", "--all", str(tmp_path / "b"), at=other)
        entries = {entry["name"]: entry for entry in json.loads((tmp_path / "b/backup.json").read_text())["buffers"]}
        assert "file_attributes" not in entries["plain"]
        for name, text in texts.items():
            assert second.open(name).info.file_attributes == text
            for target in (client, second):
                copying.copy_buffer(client, name, target, f"{name}-copied")
                assert target.open(f"{name}-copied").info.file_attributes == text
        copying.snapshot(client, "secret", tmp_path / "secret")
        copying.restore(client, tmp_path / "secret", "secret", replace=True)
        kept = Attributes(0o600, (7, 8), extended={"k": b"v"}).encode()
        assert client.open("secret").info.file_attributes == kept
        copying.restore(client, tmp_path / "secret", "link", replace=True)
        assert client.open("link").info.file_attributes == b""
