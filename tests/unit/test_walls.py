"""The walls between the core and its rooms, as far as import-linter does not hold them (pyproject.toml)."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.walls import (
    ROOMS_OF_C,
    ROOT,
    circles,
    contracts,
    defined_names,
    imports,
    lines,
    loose_contracts,
    reach_ins,
    rooms,
    shared_names,
    shared_structs,
    sources,
)

# Only ever lowered.
REACH_INS_MAX = 11
CIRCLES_MAX, CIRCLES_OF_TYPES_MAX = 0, 5
CORE_LINES_MAX = 50_000
# Users write these with their modules, as smb.torch.hf.Callback.
SHARED_NAMES = {
    "Callback": ("smb/torch/hf.py", "smb/torch/lightning.py"),
    "Collector": ("smb/metrics.py", "smb/train/metrics.py"),
}
# A state with deltas that is read as a file needs PyTorch's reader; smb.train offers the rare schemes to users.
IGNORED_AT_RUN_TIME = [
    "one direction: tools, torch, train and files, client, buffer, call, layout, transport, engine: "
    "smb.files.generations imports smb.torch at run time",
    "room PyTorch: what all modules of smb.torch share: smb.files.generations imports smb.torch at run time",
    "room rare schemes: R2SP and HSGD: smb.train imports smb.train.rare at run time",
]

ROOMS = {
    "files", "RDMA", "dashboard", "data", "etcd", "plan", "overlap", "demo", "integrations", "rare schemes", "bench",
    "doctor", "hosts", "meshes", "publishing", "trainings", "commands", "PyTorch", "certificates",
    "clusters of one machine", "mirrors", "moves", "asynchronous calls", "metrics", "safetensors",
}  # fmt: skip

BOX = """
class Box:
    def __init__(self):
        self._lid = 1

    def _open(self):
        return self._lid

    def like(self, other: Box):
        return other._lid
"""
READER = """
class Reader:
    def __init__(self, box):
        self._box = box
        self._lid = box.lid

    def read(self, box: Box, other):
        return self._box._open() + box._lid + other._lid + self._box._of_another_package + getattr(box, "_open")
"""


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    """The product's, read once."""
    return sources()


def test_reach_ins_grow_fewer(modules: dict[str, ast.Module]) -> None:
    """A private attribute belongs to its module: smb/spi.py has what others need of a client and a buffer."""
    found = reach_ins(modules)
    assert len(found) <= REACH_INS_MAX, "\n".join(map(str, found))


def test_a_reach_in_is_found() -> None:
    """By a call, by a parameter's class, by name; not of the same class, nor what none of our classes has."""
    found = reach_ins({"box.py": ast.parse(BOX), "reader.py": ast.parse(READER)})
    assert {(each.path, each.text) for each in found} == {
        ("reader.py", "self._box._open"),
        ("reader.py", "box._lid"),
        ("reader.py", "getattr(box, '_open')"),
    }


def test_a_class_name_stands_for_one_class(modules: dict[str, ast.Module]) -> None:
    """Whoever reads or searches for a name finds one thing. Our own classes in functions count, too."""
    assert shared_names(modules) == SHARED_NAMES


def test_a_shared_name_is_found() -> None:
    """At any depth, also twice in one module; a name that is used in many modules is none."""
    inner = "def make():\n    class Box: ...\n    return Box\n"
    planted = {"a.py": "class Box: ...\nclass Lid: ...", "b.py": inner, "c.py": "from a import Lid\nLid()"}
    assert shared_names({path: ast.parse(text) for path, text in planted.items()}) == {"Box": ("a.py", "b.py")}
    assert shared_names({"a.py": ast.parse("class Box: ...\n" * 2)}) == {"Box": ("a.py", "a.py")}


def test_a_struct_name_stands_for_one_struct(tmp_path: Path) -> None:
    """In C, too, and also where two files define it each for itself."""
    assert shared_structs(ROOT / "csrc") == {}
    (tmp_path / "a.h").write_text("struct box {\n    int lid;\n};\nstruct lid;\n")
    (tmp_path / "b.c").write_text("enum box { OPEN };\nstruct lid {\n    struct box *box;\n};\n")
    assert shared_structs(tmp_path) == {"box": ("a.h", "b.c")}


def test_no_name_has_a_word_that_the_glossary_refuses(modules: dict[str, ast.Module]) -> None:
    """Neither says what was told, or who is asked. Of all that the product's modules define."""
    found = {
        (path, name)
        for path, tree in modules.items()
        for name in defined_names(tree)
        if re.search(r"(^|_)(told|asking)(_|$)", name)
    }
    assert found == set()
    planted = "def all_told(asking): ...\nclass Box:\n    told: int\n    def open(self): self._told_of = 1"
    assert set(defined_names(ast.parse(planted))) == {"all_told", "asking", "Box", "told", "open", "self", "_told_of"}


def test_circles_grow_fewer() -> None:
    """Modules that import each other can only be understood together."""
    pytest.importorskip("grimp", reason="import-linter")
    assert len(circles(of_types=False)) <= CIRCLES_MAX
    assert len(circles(of_types=True)) <= CIRCLES_OF_TYPES_MAX


def test_contracts_hold_at_run_time() -> None:
    """import-linter can't tell an import for type checkers from one that runs: this looks at what it lets pass."""
    pytest.importorskip("grimp", reason="import-linter")
    assert loose_contracts(contracts(), imports(of_types=False), imports(of_types=True)) == IGNORED_AT_RUN_TIME


def test_a_loose_contract_is_found() -> None:
    """Planted: at run time what is ignored for type checkers, of a room and in the order of layers; for type checkers
    what nobody needs; and an entry that is none any more.
    """
    pytest.importorskip("grimp", reason="import-linter")
    running, typed = imports(of_types=False), imports(of_types=True)
    for importer, module in (
        ("smb.coordinator.service", "smb.coordinator.mirrors.filling"),
        ("smb.coordinator.service", "smb.coordinator.moves.copy_maker"),  # beside what it needs of that room
        ("smb.tensors", "smb.buffer"),
    ):
        assert not running.direct_import_exists(importer=importer, imported=module)
        running.add_import(importer=importer, imported=module)
    assert not typed.direct_import_exists(importer="smb.coordinator.leader", imported="smb.coordinator.mirrors.plans")
    typed.add_import(importer="smb.coordinator.leader", imported="smb.coordinator.mirrors.plans")
    for graph in (running, typed):
        graph.remove_import(importer="memserver.daemon", imported="memserver.metrics")
    found = [each for each in loose_contracts(contracts(), running, typed) if each not in IGNORED_AT_RUN_TIME]
    assert [each.rpartition(": ")[2] for each in found] == [
        "smb.tensors imports smb.buffer at run time",
        "memserver.daemon imports none of it at run time",
        "smb.coordinator.service imports smb.coordinator.mirrors.filling at run time",
        "smb.coordinator.leader imports smb.coordinator.mirrors.plans for type checkers alone",
        "smb.coordinator.service imports smb.coordinator.moves.copy_maker at run time",
    ]


def test_the_core_is_small() -> None:
    """Whoever changes how a read, a round or a role works reads the core. What only some users need is in rooms, and so
    are the engine's arithmetic, its words of locks and its channels, which all users run: each knows nothing of it.
    """
    assert lines()["core"] <= CORE_LINES_MAX


def test_every_room_says_what_it_is(modules: dict[str, ast.Module]) -> None:
    """The first paragraph of a room's package says what it is and what it may touch; all of its lines are counted."""
    found, counted = rooms(), lines()
    assert found.keys() == ROOMS
    assert counted.keys() == {"core", *found, *ROOMS_OF_C.values()}
    for room in set(found) - {"integrations"}:
        said = [import_module(module).__doc__ or "" for module in found[room] if module.startswith("smb")]
        assert any(text.startswith("The room of ") for text in said), room
    for module in found["integrations"]:  # a file or a folder each, not imported here: their packages are large
        path = module.replace(".", "/")
        text = ast.get_docstring(modules[path + ".py" if path + ".py" in modules else path + "/__init__.py"]) or ""
        assert "uses" in text.partition("\n\n")[0], module
    for folder in ROOMS_OF_C:
        headers = (ROOT / "csrc" / folder).glob("*.h")
        assert any("This folder is a room" in header.read_text().replace("\n * ", " ") for header in headers), folder
