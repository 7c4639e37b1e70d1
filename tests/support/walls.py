"""The walls between the core and its rooms, in figures: `python -m tests.support.walls`.

It tells the lines of the core and of each room, the circles of imports, the class names that stand for several classes,
and the private attributes that other modules take. pyproject.toml has the rooms: import-linter's contracts whose name
begins with "room". The engine's rooms are folders of csrc that others enter by few headers
(tests/unit/engine/test_includes.py).
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from grimp import ImportGraph

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("smb", "memserver")
_ENDINGS = {".py", ".js", ".css", ".html"}
_ENDINGS_OF_C = {".c", ".h", ".inc"}
# The public headers in csrc/smb, and the folder that defines what each declares.
HEADERS_OF_C = {
    "types": "base",
    "tls": "channel",
    "kernels": "kernels",
    "segment": "memory",
    "server": "server",
    "client": "client",
    "async": "async",
}
# The folders of csrc that are rooms.
ROOMS_OF_C = {
    "async": "asynchronous calls",
    "channel": "secure channels",
    "kernels": "arithmetic",
    "sync": "words of locks and versions",
}
_OWN = ("self", "cls")
_OF_TORCH = "_version"  # of a tensor: how often it was changed in place. Our Pin has an attribute of that name
_STRUCT = re.compile(r"^(?:struct|union|enum) (\w+) \{", re.MULTILINE)


@dataclass(frozen=True)
class Taken:
    """A private attribute of another class's object, and the module that takes it."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def sources(root: Path = ROOT) -> dict[str, ast.Module]:
    """Return the product's modules by their paths. What the build generates is left out."""
    enabled = gc.isenabled()
    gc.disable()  # nothing of it is garbage, and looking through it took two thirds of the time
    try:
        return {
            str(path.relative_to(root)): ast.parse(path.read_text())
            for package in PACKAGES
            for path in sorted((root / package).rglob("*.py"))
            if "_pb2" not in path.name
        }
    finally:
        if enabled:
            gc.enable()


def reach_ins(modules: dict[str, ast.Module]) -> list[Taken]:
    """Return where a module takes a private attribute that classes of other modules have.

    An attribute that a class of the same module has too counts as the module's own: two objects of one class, and
    classes that share a file, know each other. It counts all the same where the object is a parameter whose annotation
    is a class of another module. Attributes that none of our classes has are another package's.
    """
    # Walking through a module takes longer than all that is asked of its nodes.
    nodes = {path: [*ast.walk(tree)] for path, tree in modules.items()}
    members = {path: _private_members(found) for path, found in nodes.items()}
    private = {name for of_class in members.values() for names in of_class.values() for name in names} - {_OF_TORCH}
    return [found for path in modules for found in _taken(path, nodes[path], members[path], private)]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _members(node: ast.AST) -> Iterator[str]:
    """Yield what one node says that a class has."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        if isinstance(node.value, ast.Name) and node.value.id in _OWN:
            yield node.attr
    elif isinstance(node, ast.AnnAssign | ast.Assign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
        if node.value is not None and "__slots__" in {each.id for each in targets if isinstance(each, ast.Name)}:
            yield from (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))


def _private_members(nodes: Sequence[ast.AST]) -> dict[ast.ClassDef, set[str]]:
    """Return the private attributes of each of a module's classes."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return {one: {name for node in ast.walk(one) for name in _members(node) if _is_private(name)} for one in classes}


def _taken(
    path: str, nodes: Sequence[ast.AST], members: Mapping[ast.ClassDef, set[str]], private: set[str]
) -> Iterator[Taken]:
    # A protocol describes another module's class.
    own = {name for one, names in members.items() if "Protocol" not in map(ast.unparse, one.bases) for name in names}
    classes = {one.name for one in members}
    strangers = {
        id(name)
        for function in nodes
        if isinstance(function, ast.FunctionDef)
        for name in _of_other_classes(function, classes)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute):
            value, name = node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            value, what = node.args[0], node.args[1]
            name = what.value if isinstance(what, ast.Constant) else ""
        else:
            continue
        if name in private and not _is_self(value) and (name not in own or id(value) in strangers):
            yield Taken(path, node.lineno, ast.unparse(node))


def _is_self(value: ast.expr) -> bool:
    """Whether it is the object itself, or its class, or what it inherits."""
    return (isinstance(value, ast.Name) and value.id in _OWN) or ast.unparse(value) == "super()"


def _of_other_classes(function: ast.FunctionDef, classes: set[str]) -> Iterator[ast.Name]:
    """Yield each use of a parameter that is annotated with a class of another module."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    others = {
        each.arg
        for each in arguments
        if isinstance(each.annotation, ast.Name) and each.annotation.id not in {*classes, "object", "Any"}
    }
    for node in ast.walk(function) if others else ():
        if isinstance(node, ast.Name) and node.id in others:
            yield node


def shared_names(modules: dict[str, ast.Module]) -> dict[str, tuple[str, ...]]:
    """Return the class names that stand for several classes, each with the paths of the modules that define them."""
    found: dict[str, list[str]] = {}
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return {name: tuple(paths) for name, paths in sorted(found.items()) if len(paths) > 1}


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of what a module defines: functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def shared_structs(csrc: Path) -> dict[str, tuple[str, ...]]:
    """Return the names of structs, unions and enums of C that stand for several, each with the files that define them,
    some of them only for themselves.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(path for path in csrc.rglob("*.*") if path.suffix in {".c", ".h", ".inc"}):
        for name in _STRUCT.findall(path.read_text()):
            found.setdefault(name, []).append(str(path.relative_to(csrc)))
    return {name: tuple(paths) for name, paths in sorted(found.items()) if len(paths) > 1}


def contracts(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return import-linter's contracts."""
    found: list[dict[str, Any]] = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    return found


def rooms(root: Path = ROOT) -> dict[str, tuple[str, ...]]:
    """Return the modules and packages of each room."""
    found: dict[str, tuple[str, ...]] = {}
    for contract in contracts(root):
        name, is_room, _ = contract["name"].removeprefix("room ").partition(":")
        if contract["name"].startswith("room ") and is_room:
            found[name] = (*found.get(name, ()), *contract["protected_modules"])
    return found


def lines(root: Path = ROOT) -> Counter[str]:
    """Return the product's lines by room; those of no room are the core's. The build's own files are left out."""
    of_room = {tuple(module.split(".")): room for room, modules in rooms(root).items() for module in modules}
    for folder, room in ROOMS_OF_C.items():
        headers = {header for header, of in HEADERS_OF_C.items() if of == folder}
        of_room |= {("csrc", folder): room, **{("csrc", "smb", header): room for header in headers}}
    counted: Counter[str] = Counter()
    for folder, endings in (*((package, _ENDINGS) for package in PACKAGES), ("csrc", _ENDINGS_OF_C)):
        for path in sorted((root / folder).rglob("*.*")):
            if path.suffix in endings and "_pb2" not in path.name:
                parts = path.relative_to(root).with_suffix("").parts
                within = (of_room.get(parts[:count]) for count in range(len(parts), 0, -1))
                counted[next((room for room in within if room), "core")] += len(path.read_text().splitlines())
    return counted


def imports(*, of_types: bool) -> ImportGraph:
    """Return who imports what; `of_types`: type checkers' imports, too."""
    import grimp  # with import-linter, which only `make lint` needs

    return grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=not of_types)


def loose_contracts(contracts: Iterable[Mapping[str, Any]], running: ImportGraph, typed: ImportGraph) -> list[str]:
    """Return what contracts permit beside what they need. import-linter sees all imports, and so permits at run time
    what is meant for type checkers alone.

    `running` are the imports at run time, `typed` has those of type checkers, too. The latter ones that a contract is
    about have to be its `ignore_imports`, and whoever is in `allowed_importers` has to import its modules at run time.
    """
    found: list[str] = []
    for contract in contracts:
        name, room = contract["name"], contract.get("protected_modules", ())
        ignored = {tuple(each.split(" -> ")) for each in contract.get("ignore_imports", ())}
        at_run_time, by_types = (
            {
                (importer, module)
                for module in _within(graph, room)
                for importer in graph.find_modules_that_directly_import(module)
            }
            for graph in (running, typed)
        )
        found += [
            f"{name}: {importer} imports {module} at run time"
            for importer, module in sorted(ignored)
            if running.direct_import_exists(importer=importer, imported=module)
        ]
        found += [
            f"{name}: {importer} imports {module} for type checkers alone"
            for importer, module in sorted(by_types - at_run_time - ignored)
            if not _is_within(importer, room)
        ]
        found += [
            f"{name}: {allowed} imports none of it at run time"
            for allowed in contract.get("allowed_importers", ())
            if not any(_is_within(importer, [allowed]) for importer, _ in at_run_time)
        ]
    return found


def _within(graph: ImportGraph, packages: Collection[str]) -> list[str]:
    return [module for module in graph.modules if _is_within(module, packages)]


def _is_within(module: str, packages: Collection[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def circles(*, of_types: bool) -> list[list[str]]:
    """Return the modules that import each other in a circle, in groups; `of_types`: by type checkers' imports, too."""
    graph = imports(of_types=of_types)
    imports_of = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    reached = {module: _reached(imports_of, module) for module in imports_of}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in imports_of
        if module in reached[module]
    }
    return sorted(map(list, groups))


def _reached(imports: Mapping[str, set[str]], start: str) -> set[str]:
    """Return what a module imports, and what that imports, and so on."""
    found: set[str] = set()
    to_come = [start]
    while to_come:
        fresh = imports[to_come.pop()] - found
        found |= fresh
        to_come += fresh
    return found


def _show() -> None:
    counted = lines()
    for room in ("core", *sorted(counted.keys() - {"core"})):
        print(f"{counted[room]:7,} lines  {room}")
    for of_types, of_what in ((False, "at run time"), (True, "with those of type checkers")):
        found = circles(of_types=of_types)
        print(f"circles of imports {of_what}: {len(found)}")
        print(*(f"    {', '.join(circle)}" for circle in found), sep="\n")
    shared = shared_names(sources())
    print(
        f"class names of several classes: {len(shared)}",
        *(f"    {name}: {', '.join(shared[name])}" for name in shared),
        sep="\n",
    )
    taken = reach_ins(sources())
    print(f"private attributes that other modules take: {len(taken)}", *(f"    {each}" for each in taken), sep="\n")


if __name__ == "__main__":
    _show()
