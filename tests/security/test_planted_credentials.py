"""Credentials, tokens and passwords count only if nobody but this user and root can change or replace them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from smb.config.untrusted import open_kept
from smb.errors import InvalidArgumentError
from smb.security.credentials import Credentials, load_directory
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role
from tests.support.other_users import AS_ROOT, DAEMON, STRANGER, output_as, sticky

# Tells of each directory what becomes of the credentials, the token and the password in it.
LOAD = """
from pathlib import Path
from smb.coordinator.etcd.connection import Access
from smb.errors import Error
from smb.security.credentials import load_directory
from smb.security.page_access import read_token
become()
for directory in map(Path, sys.argv[2:]):
    print("== ", end="")
    for load in (load_directory, lambda place: read_token(place / "token"), Access.of):
        try:
            load(directory)
            print("taken")
        except Error as error:
            print("refused:", error)
"""
FILES = ("ca.pem", "cert.pem", "key.pem", "token", "user")


def give(path: Path, user: int, mode: int, group: int = DAEMON) -> None:
    os.chown(path, user, group, follow_symlinks=False)
    if not path.is_symlink():
        path.chmod(mode)


def files(place: Path, user: int, public: int, secret: int) -> None:
    for file in FILES:
        give(place / file, user, public if file.startswith("c") else secret)


def of_root(place: Path) -> None:
    """As an administrator puts them: the keys are the group's, too."""
    files(place, 0, 0o644, 0o640)
    give(place, 0, 0o755)


def of_kubernetes(place: Path) -> None:
    """A secret's volume with fsGroup: links of root in a directory that is sticky and everybody's."""
    inner = place / "..2026_01_01"
    inner.mkdir()
    for file in FILES:
        (place / file).rename(inner / file)
        (place / file).symlink_to(f"..data/{file}")
    files(inner, 0, 0o440, 0o440)
    give(inner, 0, 0o2755)
    (place / "..data").symlink_to(inner.name)
    give(place, 0, 0o3777)


def of_systemd(place: Path) -> None:
    """LoadCredential= with an owner of its own."""
    files(place, DAEMON, 0o400, 0o400)
    give(place, DAEMON, 0o500)


def linked(place: Path) -> None:
    """Links of this user's own to what is root's elsewhere."""
    real = place.with_name(f"{place.name}-real")
    place.rename(real)
    of_root(real)
    place.mkdir()
    for file in FILES:
        (place / file).symlink_to(real / file)
        give(place / file, DAEMON, 0)
    give(place, DAEMON, 0o700)


def changed(file: str, mode: int = 0, user: int = DAEMON) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        give(place / file, user, mode or (place / file).stat().st_mode & 0o777)

    return change


def linked_by_a_stranger(place: Path) -> None:
    for file in FILES:
        (place / file).rename(place / f"real-{file}")
        (place / file).symlink_to(f"real-{file}")
        give(place / file, STRANGER, 0)
    give(place, 0, 0o1777)


def behind_a_strangers_link(place: Path) -> None:
    real = place.with_name(f"{place.name}-real")
    place.rename(real)
    place.symlink_to(real)
    give(place, STRANGER, 0)


def second_names(place: Path) -> None:
    for file in FILES:
        (place.parent / f"{place.name}-{file}").hardlink_to(place / file)
    give(place, 0, 0o1777)


GOOD = {"as made": lambda place: None, "root": of_root, "kubernetes": of_kubernetes, "systemd": of_systemd,
        "linked": linked, "a group reads": lambda place: files(place, DAEMON, 0o640, 0o640)}  # fmt: skip
BAD: dict[str, tuple[Callable[[Path], None], str, int]] = {  # with what is told, and of how many of the three
    "ca is everybody's": (changed("ca.pem", 0o666), "ca.pem may be changed by others", 2),
    "ca is the group's": (changed("ca.pem", 0o664), "ca.pem may be changed by others", 2),
    "key is the group's": (changed("key.pem", 0o660), "key.pem may be changed by others", 2),
    "token is the group's": (changed("token", 0o660), "token may be changed by others", 1),
    "user is the group's": (changed("user", 0o660), "user may be changed by others", 1),
    "ca is a stranger's": (changed("ca.pem", user=STRANGER), f"ca.pem belongs to user {STRANGER}", 2),
    "files of a stranger": (lambda place: files(place, STRANGER, 0o644, 0o640), f"belongs to user {STRANGER}", 3),
    "directory of a stranger": (lambda place: give(place, STRANGER, 0o755), f"belongs to user {STRANGER}", 3),
    "directory is everybody's": (lambda place: give(place, DAEMON, 0o777), "others than its owner may put files", 3),
    "directory is the group's": (lambda place: give(place, 0, 0o775), "others than its owner may put files", 3),
    "links of a stranger": (linked_by_a_stranger, f"belongs to user {STRANGER}", 3),
    "a directory's link": (behind_a_strangers_link, f"belongs to user {STRANGER}", 3),
    "second names where all may link": (second_names, "others than its owner may put files", 3),
}


def sets(place: Path, made: Path, cases: list[str]) -> list[Path]:
    """A directory for each case, in its form before it is changed."""
    found = []
    for index, _ in enumerate(cases):
        found.append(place / str(index))
        shutil.copytree(made, found[-1])
        (found[-1] / "token").write_text("a-word-that-is-long-enough")
        (found[-1] / "user").write_text("smb:word")
        files(found[-1], DAEMON, 0o644, 0o600)
        give(found[-1], DAEMON, 0o700)
    return found


@AS_ROOT
def test_who_can_change_credentials(tmp_path: Path) -> None:
    """What people have is taken, and nothing that another user could have put there, or can change."""
    make_set(tmp_path, [Holder(Role.CLIENT, "")])
    with sticky() as place:
        cases = [*GOOD, *BAD]
        places = sets(place, tmp_path / "client", cases)
        for case, where in zip(cases, places, strict=True):
            (GOOD[case] if case in GOOD else BAD[case][0])(where)
        told = output_as(DAEMON, LOAD, *places).split("== ")[1:]
        for case, text in zip(cases, told, strict=True):
            if case in GOOD:
                assert text.split() == ["taken"] * 3, (case, text)
                continue
            refused = [line for line in text.splitlines() if line.startswith("refused: ")]
            assert len(refused) == BAD[case][2], (case, text)
            also = "Permission denied" if "link" in case else BAD[case][1]  # some kernels follow no link like that
            assert all(BAD[case][1] in line or also in line for line in refused), (case, text)


@AS_ROOT
def test_root_takes_no_other_users_credentials(tmp_path: Path) -> None:
    make_set(tmp_path, [Holder(Role.CLIENT, "")])
    with sticky() as place:
        (where,) = sets(place, tmp_path / "client", ["one"])
        text = output_as(0, LOAD, where)
        assert text.count(f"belongs to user {DAEMON}; it must belong to this user, 0, or to root") == 3, text


def test_credentials_are_checked_as_they_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths may lead to something else by then: to a pipe, which waits for ever, or to another pair."""
    make_set(tmp_path, [Holder(Role.CLIENT, "")])
    check = Credentials.check
    asked = []

    def replaced(credentials: Credentials) -> None:
        for file in FILES[:3]:
            (tmp_path / "client" / file).unlink()
        asked.append(credentials)
        check(credentials)  # opened again, a path would be missing now

    monkeypatch.setattr(Credentials, "check", replaced)
    assert load_directory(tmp_path / "client") in asked
    os.mkfifo(tmp_path / "client" / "cert.pem")
    assert asked[0].context().get_ca_certs()


# Tells of each directory what `smb certs` makes there.
CERTIFY = """
import os
from pathlib import Path
from smb.errors import Error
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role
become()
for directory in map(Path, sys.argv[2:]):
    print("== ", end="")
    try:
        made = make_set(directory, [Holder(Role.CLIENT, ""), Holder(Role.READER, "")])
        print("made", sorted(path.name for path in made))
    except Error as error:
        print("refused:", error)
"""


@AS_ROOT
def test_certificates_are_made_only_among_files_of_this_user(tmp_path: Path) -> None:
    """No authority that another user planted signs, and no directory of credentials is his."""
    make_set(tmp_path / "set", [Holder(Role.CLIENT, "")])
    with sticky() as place:
        names = ("new", "own", "open", "foreign", "ca", "key", "holder", "link", "dangling")
        own, everybodys, foreign, ca, key, holder, link, dangling = (place / name for name in names[1:])
        for where in (own, everybodys, foreign, ca, key, holder, place / "real"):
            shutil.copytree(tmp_path / "set", where)
            for each in (where, *where.rglob("*")):
                os.chown(each, DAEMON, DAEMON)
        everybodys.chmod(0o777)
        for planted in (foreign, ca / "ca", key / "ca" / "ca-key.pem", holder / "client"):
            os.chown(planted, STRANGER, STRANGER)
            planted.chmod(0o644 if planted.is_file() else 0o777)
        link.symlink_to(place / "real")
        (dangling / "client").parent.mkdir()
        (dangling / "client").symlink_to(place / "elsewhere")
        for path in (link, dangling / "client"):
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        os.chown(dangling, DAEMON, DAEMON)
        cases = dict(
            zip(names, output_as(DAEMON, CERTIFY, *(place / name for name in names)).split("== ")[1:], strict=True)
        )
        assert cases.pop("new") == "made ['client', 'reader']\n"
        assert cases.pop("own") == "made ['reader']\n"
        assert "refused: others than its owner may put files into" in cases.pop("open")
        for case, text in cases.items():
            assert text.startswith("refused: "), (case, text)
            assert case == "link" or f"belongs to user {STRANGER}" in text, (case, text)
        assert not (place / "elsewhere").exists()
        assert not (place / "real" / "reader").exists()


def test_a_mount_that_everybody_writes_is_no_volume_if_it_is_sticky() -> None:
    """In /dev/shm, a mount of root's, others can keep links to files of ours: one with two names is refused."""
    if os.geteuid() != 0 or not Path("/dev/shm").is_mount():
        pytest.skip("it takes root, and /dev/shm as a mount")
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="smb-test-") as kept:
        path = Path(kept.name)
        os.close(open_kept(path))
        second = path.with_name(f"{path.name}-second")
        second.hardlink_to(path)
        try:
            with pytest.raises(InvalidArgumentError, match="others than its owner may put files into /dev/shm"):
                open_kept(path)
        finally:
            second.unlink()
