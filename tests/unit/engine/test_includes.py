"""The law of csrc: which folder may include which. The same direction as import-linter keeps in Python."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.builds import build
from tests.support.walls import HEADERS_OF_C, ROOMS_OF_C

ROOT = Path(__file__).resolve().parents[3]
# A folder includes itself and what stands here, and their public headers. Clients know no server, servers no client.
MAY_INCLUDE = {
    "base": set(),
    "channel": {"base"},
    "kernels": {"base"},
    "sync": {"base"},
    "memory": {"base", "kernels", "sync"},
    "server": {"base", "channel", "kernels", "sync", "memory"},
    "client": {"base", "channel", "kernels", "sync", "memory"},
    "async": {"base", "kernels", "memory", "client"},
    "python": {"base", "kernels", "memory", "client"},
}
# The headers by which other folders enter a room, beside its public header. A room stands on the core, and no other
# folder includes it; or it is a library, which includes csrc/base alone.
DOORS: dict[str, set[str]] = {
    "async": set(),
    "channel": {"channel/access.h", "channel/bond.h", "channel/channel.h", "channel/tls.h"},
    "kernels": {"kernels/kernels.h"},
    "sync": {"sync/sync.h", "sync/sync_words.h"},
}
# Files whose functions call each other in a circle: the three parts of one segment's words, under one mutex. Who gets
# the publisher's lock begins a version, a version that is published or unpinned hands that lock on, and a wait for
# either that times out hears which version there is.
CIRCLES = [{"sync/sync_lock", "sync/sync_queue", "sync/sync_version"}]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def folder_of(file: str) -> str:
    """Return the folder whose part a file is: of a public header, the one that defines what it declares."""
    path = Path(file)
    return HEADERS_OF_C.get(path.stem, "") if path.parent.name == "smb" else path.parent.name


def breaches(csrc: Path) -> list[str]:
    """Return what breaks the law, a line each."""
    found = []
    for path in sorted(path for path in csrc.rglob("*.*") if path.suffix in {".c", ".h", ".inc"}):
        name = path.relative_to(csrc)
        folder = folder_of(str(name))
        if len(name.parts) != 2 or folder not in MAY_INCLUDE:
            found.append(f"{name} is in no folder of the law")
            continue
        for included in INCLUDE.findall(path.read_text()):
            allowed = folder_of(included) in MAY_INCLUDE[folder] | {folder}
            private = name.parts[0] == "smb" and not included.startswith("smb/")
            room = Path(included).parent.name
            if room in DOORS and name.parts[0] != room and included not in DOORS[room]:
                allowed = False
            if not allowed or private or not (csrc / included).is_file():
                found.append(f"{name} includes {included}")
    return found


def test_the_engine_keeps_the_law() -> None:
    """Base knows nobody, memory only what is under it, and client and server never each other."""
    assert {path.stem for path in (ROOT / "csrc" / "smb").iterdir()} == set(HEADERS_OF_C)
    assert breaches(ROOT / "csrc") == []


Symbols = dict[str, tuple[set[str], set[str]]]


def symbols(csrc: Path, objects: Path) -> Symbols:
    """Return the symbols that each folder's files, folder/name, define and those that they use. `objects` has what was
    compiled, in the same folders.
    """
    folders = [folder for folder in MAY_INCLUDE if folder != "python"]  # which takes Python's headers
    sources = [path.relative_to(csrc) for folder in folders for path in sorted((csrc / folder).glob("*.c"))]
    made = [str(objects / source.with_suffix(".o")) for source in sources]
    listed = subprocess.run(["nm", "-P", *made], check=True, capture_output=True, text=True).stdout
    found: Symbols = {}
    for source, lines in zip(sources, re.split(r"^.*\.o:\n", listed, flags=re.MULTILINE)[1:], strict=True):
        kinds = [line.split()[:2] for line in lines.splitlines() if line]
        defined = {name for name, kind in kinds if kind in "TDBR"}
        found[str(source.with_suffix(""))] = (defined, {name for name, kind in kinds if kind == "U"})
    return found


def calls(found: Symbols) -> list[str]:
    """Return each use of a symbol that the law does not allow, a line each. A function may be declared anywhere, so
    includes alone do not tell.
    """
    return [
        f"{file} uses {other}'s {name}"
        for file, (_, used) in found.items()
        for other, (defined, _) in found.items()
        if folder_of(other) not in MAY_INCLUDE[folder_of(file)] | {folder_of(file)}
        for name in sorted(used & defined)
    ]


def circles(found: Symbols) -> list[set[str]]:
    """Return the sets of files whose functions call each other in a circle, one set for each."""
    uses = {
        file: {other for other, (defined, _) in found.items() if other != file and used & defined}
        for file, (_, used) in found.items()
    }
    reached: dict[str, set[str]] = {}
    for file in uses:
        seen, ahead = set[str](), set(uses[file])
        while ahead:
            seen |= ahead
            ahead = {after for one in ahead for after in uses[one]} - seen
        reached[file] = seen
    rings = {frozenset({file} | {other for other in reached[file] if file in reached[other]}) for file in uses}
    return [set(ring) for ring in rings if len(ring) > 1]


def declared_elsewhere(csrc: Path, found: Symbols) -> list[str]:
    """Return each function of a public header that another folder than the header's defines, or none, a line each."""
    defined = {(folder_of(file), name) for file, (names, _) in found.items() for name in names}
    function = re.compile(r"^[a-z][\w *]*?\b(smb_\w+)\(", re.MULTILINE)
    return [
        f"{name}.h declares {declared}"
        for name, folder in HEADERS_OF_C.items()
        if (csrc / "smb" / f"{name}.h").is_file()
        for declared in function.findall((csrc / "smb" / f"{name}.h").read_text())
        if (folder, declared) not in defined
    ]


# More than 5 s: the build with failpoints is compiled if nobody has yet, in the long form with optimization.
@pytest.mark.timeout(900)
def test_the_engine_calls_as_it_includes() -> None:
    """The same law for what the linker resolves, and no file calls back to one that calls it."""
    found = symbols(ROOT / "csrc", build("failpoints").directory / "objects" / "csrc")
    assert len(found) > 80
    assert sum(len(defined) for defined, _ in found.values()) > 500
    assert calls(found) == []
    assert declared_elsewhere(ROOT / "csrc", found) == []
    assert circles(found) == CIRCLES


def test_rooms_stand_on_the_core_or_on_base_alone() -> None:
    """The engine works without the former; the latter know nothing of buffers, links and servers."""
    assert ROOMS_OF_C.keys() == DOORS.keys() <= MAY_INCLUDE.keys()
    used = {each for allowed in MAY_INCLUDE.values() for each in allowed}
    assert {room for room in DOORS if MAY_INCLUDE[room] != {"base"}} == DOORS.keys() - used


def test_a_call_against_the_law_is_found(tmp_path: Path) -> None:
    """A public header of base declares what memory defines, and base calls it."""
    for name, text in {
        "smb/types.h": "int smb_deep(void);\nint smb_known(void);\n",
        "memory/deep.c": '#include "smb/types.h"\nint smb_deep(void) { return smb_known(); }\n',
        "base/known.c": '#include "smb/types.h"\nint smb_known(void) { return 0; }\n',
        "base/breach.c": '#include "smb/types.h"\nint breach(void) { return smb_deep(); }\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert breaches(tmp_path) == []
    for source in tmp_path.glob("*/*.c"):
        command = ["cc", "-c", f"-I{tmp_path}", str(source), "-o", str(source.with_suffix(".o"))]
        subprocess.run(command, check=True)
    found = symbols(tmp_path, tmp_path)
    assert calls(found) == ["base/breach uses memory/deep's smb_deep"]
    assert declared_elsewhere(tmp_path, found) == ["types.h declares smb_deep"]


def test_a_circle_is_found() -> None:
    """Of two files and of three; not files that several call, nor one that calls itself."""
    found: Symbols = {
        "server/a": ({"a"}, {"b", "leaf"}),
        "server/b": ({"b"}, {"c", "leaf"}),
        "server/c": ({"c"}, {"a"}),
        "client/d": ({"d"}, {"e"}),
        "client/e": ({"e"}, {"d", "printf"}),
        "base/leaf": ({"leaf"}, {"leaf"}),
    }
    assert sorted(circles(found), key=len) == [{"client/d", "client/e"}, {"server/a", "server/b", "server/c"}]


@pytest.mark.parametrize(
    ("file", "included"),
    [
        ("base/clock.h", "memory/segment.h"),
        ("memory/segment.h", "client/link.h"),
        ("server/gate.c", "client/link.h"),
        ("client/link.c", "server/gate.h"),
        ("python/direct.c", "server/gate.h"),
        ("client/link.c", "link.h"),  # without its folder
        ("client/link.c", "client/gone.h"),
        ("base/clock.h", "smb/segment.h"),
        ("server/gate.c", "smb/client.h"),
        ("smb/segment.h", "smb/client.h"),
        ("smb/segment.h", "memory/segment.h"),
        ("client/link.c", "async/order.h"),
        ("server/gate.c", "sync/sync_lock.h"),  # not a door
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, included: str) -> None:
    """Each rule by itself, in a tree that keeps all others."""
    headers = [f"smb/{name}.h" for name in HEADERS_OF_C]
    private = ("memory/segment.h", "client/link.h", "server/gate.h", "async/order.h", "sync/sync_lock.h")
    for name in (*headers, "base/clock.h", *private, file):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#include <stdint.h>\n")
    assert breaches(tmp_path) == []
    (tmp_path / file).write_text(f'#include "{included}"\n')
    assert breaches(tmp_path) == [f"{file} includes {included}"]


def test_a_file_outside_the_folders_is_found(tmp_path: Path) -> None:
    """There is no room without a rule."""
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "misc.c").write_text("")
    (tmp_path / "misc.c").write_text("")
    (tmp_path / "smb").mkdir()
    (tmp_path / "smb" / "other.h").write_text("")  # a public header that HEADERS_OF_C does not know
    assert len(breaches(tmp_path)) == 3


def test_each_file_has_its_header_and_lines_of_at_most_100() -> None:
    """A .c without one defines public functions alone, or is a Python module; clang-format leaves long comments."""
    sources = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in {".c", ".h", ".inc"}]
    without = {path.name for path in sources if path.suffix == ".c" and not path.with_suffix(".h").is_file()}
    assert without == {"connect.c", "direct.c", "pending.c", "roles.c"}
    long = [
        f"{path}:{i}" for path in sources for i, line in enumerate(path.read_text().split("\n"), 1) if len(line) > 100
    ]
    assert long == []


def test_documents_and_comments_name_files_that_are_there() -> None:
    """A file that moves takes its name along everywhere."""
    named = re.compile(r"csrc/[a-z_0-9/]+\.(?:c|h|inc|py|sh)\b")
    places = [path for top in ("docs", "smb", "memserver", "perf") for path in (ROOT / top).rglob("*.*")]
    texts = [path for path in [*ROOT.glob("*.*"), *places] if path.suffix in {".md", ".py", ".proto", ".toml"}]
    found = {name: path for path in texts for name in named.findall(path.read_text())}
    assert len(found) > 20
    assert {name: str(path) for name, path in found.items() if not (ROOT / name).is_file()} == {}
