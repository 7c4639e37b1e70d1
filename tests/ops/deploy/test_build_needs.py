"""csrc/check-build-needs.sh, with interpreters and compilers that lack something, and the Makefile that calls it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "csrc/check-build-needs.sh"
# What the script itself runs, and nothing else is on its PATH: no python3, no compiler.
TOOLS = ("sh", "sed", "grep", "cat", "dirname", "mktemp", "rm", "tail")
OURS = Path(sys._base_executable)  # type: ignore[attr-defined]  # the one that this environment was made with
HEADERS = {"stdio.h": "libc6-dev", "openssl/ssl.h": "libssl-dev"}
DEBIAN = "on Debian and Ubuntu: apt-get install "


class Machine:
    """A PATH of few programs, and a temporary directory where nothing may stay."""

    def __init__(self, work: Path) -> None:
        self.path, self.temporary, self.work = work / "bin", work / "tmp", work
        self.path.mkdir()
        self.temporary.mkdir()
        for tool in TOOLS:
            (self.path / tool).symlink_to(shutil.which(tool) or tool)

    def program(self, name: str, text: str) -> None:
        """A shell script on the PATH."""
        (self.path / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.path / name).chmod(0o755)

    def python(self, patch: str = "", name: str = "python3") -> None:
        """An interpreter that runs `patch` before what it is asked to."""
        patched = self.work / f"{name}.py"
        patched.write_text(f"import os, sys, sysconfig\n{patch}\nexec(sys.argv[2])\n")
        self.program(name, f'exec {OURS} {patched} "$@"')

    def compiler(self, options: str = "") -> None:
        """The compiler that the interpreter names, with options before its own."""
        name = (sysconfig.get_config_var("CC") or "cc").split()[0]
        self.program(Path(name).name, f'PATH=/usr/bin:/bin exec {shutil.which(name)} {options} "$@"')

    def check(self, *python: str, **variables: str) -> list[str]:
        """The lines that the script prints; [] only if it also says that all is there."""
        environment = {"PATH": str(self.path), "TMPDIR": str(self.temporary), **variables}
        command = [str(self.path / "sh"), str(SCRIPT), *(python or ("python3",))]
        before = sorted(SCRIPT.parent.iterdir())
        run = subprocess.run(command, env=environment, cwd=self.work, capture_output=True, text=True, timeout=60)
        assert run.stdout == ""
        assert (run.returncode == 0) == (run.stderr == ""), run.stderr
        assert list(self.temporary.iterdir()) == []
        assert sorted(SCRIPT.parent.iterdir()) == before
        lines = run.stderr.splitlines()
        assert not lines or lines[0] == "Soft Memory Box cannot be built here yet. Nothing was installed."
        return lines[1:]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_silent_where_all_is_there(machine: Machine) -> None:
    """An interpreter with venv and headers, and a compiler: no word, 0; several words may name the interpreter."""
    machine.python()
    machine.compiler()
    assert machine.check() == []
    machine.program("env", 'exec "$@"')
    assert machine.check("env", "python3") == []


def test_all_that_is_missing_is_told_at_once(machine: Machine) -> None:
    """Where nothing is, each thing has its line and its package, and one command installs all that README names."""
    lines = machine.check(CC="no-such-cc")
    assert [line.split(",")[0] for line in lines[:-2]] == [
        "  missing: Python 3.10 or newer",
        "  missing: its venv",
        "  missing: C compiler no-such-cc",
        *(f"  missing: {header}" for header in HEADERS if not (Path("/usr/include") / header).exists()),
        "  missing: Python.h",
    ]
    assert "there is no python3; package python3" in lines[0]
    packages = lines[-2].removeprefix(DEBIAN).split()
    assert set(packages) - set(HEADERS.values()) == {"python3", "python3-venv", "gcc", "python3-dev"}
    assert set(lines[-1].removeprefix("on Fedora: dnf install ").split()) - {"glibc-devel", "openssl-devel"} == {
        *("python3", "gcc", "python3-devel")
    }
    readme = (ROOT / "README.md").read_text()
    command = next(line for line in readme.splitlines() if "apt-get install" in line)
    assert {*HEADERS.values(), *packages} - {"python3"} <= set(command.replace("`", " ").split())


# An interpreter of the system's, and the one that is its python3.
SYSTEM = "os.path.realpath = lambda p, **options: '/usr/bin/python3.12' if p == sys.executable else p"
DEFAULT = SYSTEM.replace("p == sys.executable", "p in (sys.executable, '/usr/bin/python3')")


@pytest.mark.parametrize(
    ("patch", "said", "packages"),
    [
        (
            "sys.version_info = (3, 9, 2)",
            "missing: Python 3.10 or newer, needed to run everything: python3 is 3.9",
            "",
        ),
        ("sys.modules['ensurepip'] = None", "missing: venv of python3, needed to install packages: ", ""),
        ("sys.modules['ssl'] = None", "missing: ssl of python3, needed to fetch packages over TLS: ", ""),
        ("sysconfig.get_path = lambda n: '/no/headers'", "missing: Python.h, of the headers of python3", ""),
        (f"{DEFAULT}; sys.modules['ensurepip'] = None", "venv of python3", "python3-venv"),
        (f"{DEFAULT}; sysconfig.get_path = lambda n: '/no/headers'", "missing: Python.h", "python3-dev"),
        (
            f"{SYSTEM}; sys.version_info = (3, 12, 4); sys.modules['ensurepip'] = None"
            "; sysconfig.get_path = lambda n: '/no/headers'",
            "venv of python3",
            "python3.12-venv python3.12-dev",
        ),
    ],
)
def test_what_the_interpreter_lacks(machine: Machine, patch: str, said: str, packages: str) -> None:
    """It is named, with a package only where the interpreter is the system's: of just that version."""
    machine.python(patch)
    machine.compiler()
    lines = machine.check()
    assert said in lines[0]
    assert [line.removeprefix(DEBIAN) for line in lines if line.startswith(DEBIAN)] == ([packages] if packages else [])
    assert len([line for line in lines if "missing" in line]) == len(packages.split()) or len(lines) == 1


def test_free_threaded_builds_are_refused(machine: Machine) -> None:
    """One sentence says so, and nothing else is asked of that interpreter."""
    machine.python(
        "get = sysconfig.get_config_var; sysconfig.get_config_var = lambda n: n == 'Py_GIL_DISABLED' or get(n)"
    )
    machine.compiler()
    (line,) = machine.check(CC="gcc" if (machine.path / "gcc").exists() else "cc")
    assert "python3 is free-threaded, which is not supported yet" in line


def test_an_interpreter_that_does_not_run(machine: Machine) -> None:
    """What it says itself is passed on, as with a shim of a version that is not there."""
    machine.program("python3", "echo 'shim: python3: no such version' >&2; exit 127")
    assert "python3 does not run: shim: python3: no such version" in machine.check(CC="no-such-cc")[0]


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (None, "missing: C compiler"),
        ("-nostdinc", "missing: stdio.h, of the C library's headers, for the engine; package libc6-dev"),
        ("-no-such-option", "which does not work here: "),
        ("-include no-such-file.h", "which does not work here: "),
        ("-Wl,--no-such-option", "missing: a C compiler that works"),
    ],
)
def test_what_the_compiler_lacks(machine: Machine, compiler: str | None, said: str) -> None:
    """No compiler, one without the C library's headers, one that fails: each is told apart."""
    machine.python()
    if compiler is not None:
        machine.compiler(compiler)
    lines = machine.check()
    assert said in lines[0]
    if compiler == "-nostdinc":
        assert "missing: openssl/ssl.h, of OpenSSL's headers, for TLS in the engine; package libssl-dev" in lines[1]


def copy_build_files(tree: Path) -> Path:
    """What `make install` and `make demo` read before they build anything."""
    (tree / "csrc").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "setup.cfg"):
        shutil.copy2(ROOT / name, tree / name)
    shutil.copy2(SCRIPT, tree / "csrc")
    protos = ("smb/rpc/control.proto", "smb/coordinator/etcd/etcd.proto")
    others = ("csrc/build_engine.py", "examples/demo-requirements.txt", "tests/support/install.sh")
    for name in (*protos, *others):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    return tree


def test_make_asks_before_it_makes_anything(machine: Machine) -> None:
    """`make demo` in a copy of the tree on such a machine fails with these lines, and leaves the tree as it was."""
    tree = copy_build_files(machine.work / "tree")
    before = sorted(tree.rglob("*"))
    make = shutil.which("make")
    assert make is not None
    environment = {"PATH": str(machine.path), "TMPDIR": str(machine.temporary), "CC": "no-such-cc"}
    run = subprocess.run([make, "demo"], cwd=tree, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    *lines, failed = run.stderr.splitlines()
    assert lines[1:] == machine.check(CC="no-such-cc")
    assert failed.startswith("make: ***")
    assert run.stdout == ""
    assert sorted(tree.rglob("*")) == before


# In place of Python: makes an environment without uv, whose pip notes what it does, and does what the variable PIP_DOES
# says. There $shell is the process of make that installs.
FAKE_PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
cat >"$3/bin/python" <<'END'
#!/bin/sh
case "$*" in *" uv") exit 1 ;; esac
echo one package >>.venv/packages
shell=$(cut -d " " -f 4 /proc/$PPID/stat)
eval "$PIP_DOES"
END
chmod +x "$3/bin/python"
"""


def test_make_uses_no_half_environment(tmp_path: Path) -> None:
    """After an installation that was killed the environment is made anew; after one that failed, gone on with."""
    tree = copy_build_files(tmp_path)
    for path, text in (("csrc/check-build-needs.sh", "#!/bin/sh\n"), ("python", FAKE_PYTHON)):
        (tree / path).write_text(text)
        (tree / path).chmod(0o755)

    def install(pip_does: str) -> tuple[int, int]:
        """Return make's exit status, and how many packages the environment then has."""
        # A shell can't trap a SIGINT that was ignored from the start, as it is in a script's background.
        command = ["env", "--default-signal=INT", "make", "--no-print-directory", "install", "CONSTRAINTS="]
        run = subprocess.run(
            command, cwd=tree, capture_output=True, text=True,
            env={"PATH": os.environ["PATH"], "PYTHON": "./python", "PIP_DOES": pip_does}, timeout=60,
        )  # fmt: skip
        assert ("failed at this step" in run.stderr) == (pip_does == "exit 1" and run.returncode != 0), run.stderr
        return run.returncode, len((tree / ".venv/packages").read_text().splitlines())

    assert install("exit 1") == (2, 1)
    assert install("kill -KILL $shell") == (2, 2)
    assert install("kill -INT $shell; exit 1") == (2, 1)
    assert install("exit 1") == (2, 1)
    assert install("true") == (0, 2)
    assert install("exit 1") == (0, 2)  # all is there: pip is not asked
