"""The law of csrc: which folder may include which. The same direction as import-linter keeps in Python."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# A folder includes itself, the public header smb.h and what stands here. Clients know no server, and servers no client.
MAY_INCLUDE = {
    "base": set(),
    "memory": {"base"},
    "server": {"base", "memory"},
    "client": {"base", "memory"},
    "python": {"base", "memory", "client"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def breaches(csrc: Path) -> list[str]:
    """Return what breaks the law, a line each."""
    found = []
    for path in sorted(path for path in csrc.rglob("*.*") if path.suffix in {".c", ".h", ".inc"}):
        name = path.relative_to(csrc)
        folder = name.parts[0]
        if str(name) == "smb.h":
            found += [f"{name} includes {included}" for included in INCLUDE.findall(path.read_text())]
        elif len(name.parts) != 2 or folder not in MAY_INCLUDE:
            found.append(f"{name} is in no folder of the law")
        else:
            for included in INCLUDE.findall(path.read_text()):
                allowed = included == "smb.h" or Path(included).parent.name in MAY_INCLUDE[folder] | {folder}
                if not allowed or not (csrc / included).is_file():
                    found.append(f"{name} includes {included}")
    return found


def test_the_engine_keeps_the_law() -> None:
    """Base knows nobody, memory only base, and client and server never each other."""
    assert (ROOT / "csrc" / "smb.h").is_file()
    assert breaches(ROOT / "csrc") == []


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
        ("smb.h", "base/clock.h"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, included: str) -> None:
    """Each rule by itself, in a tree that keeps all others."""
    for name in ("smb.h", "base/clock.h", "memory/segment.h", "client/link.h", "server/gate.h", file):
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
    assert len(breaches(tmp_path)) == 2


def test_each_file_has_its_header_and_lines_of_at_most_100() -> None:
    """A .c without one defines functions of smb.h alone, or is a Python module; clang-format leaves long comments."""
    sources = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in {".c", ".h", ".inc"}]
    without = {path.name for path in sources if path.suffix == ".c" and not path.with_suffix(".h").is_file()}
    assert without == {"connect.c", "direct.c", "pending.c"}
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
