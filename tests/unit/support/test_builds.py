"""tests/support/builds.py: its builds are what they are called, and no sanitizer's report passes unseen."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.builds import ROOT, Build, build, run_tests
from tests.support.trees import sources
from tests.verbs.run import default_tests

OVERRUN = """
import sys
from smb._engine import ffi, lib
print(sys.modules["smb._engine"].__file__, flush=True)
numbers = ffi.new("int64_t[]", 4096)
lib.smb_kernel_apply(lib.SMB_INT64, lib.SMB_SUM, numbers, numbers, {count}, 1.0)
"""
REOPENED = """
import sys
from pathlib import Path
from memserver.engine import Engine
for _ in range(2):
    engine = Engine(1, loops=1, capacity_bytes=1 << 20)
    engine.open_journal(Path(sys.argv[1]))
    print("opened", flush=True)
    engine.close()
"""

# Prints whether the checker is in each process, and what of it the next would inherit.
WHERE = """
import multiprocessing, os, subprocess, sys
def has():
    return "libasan" in open("/proc/self/maps").read()
def tell(to):
    to.put(has())
if __name__ == "__main__":
    ours = "print('libasan' in open('/proc/self/maps').read())"
    tool = subprocess.run(["sh", "-c", "cat /proc/self/maps"], capture_output=True, text=True, check=True).stdout
    behind = subprocess.run(["sh", "-c", '"$@"', "sh", sys.executable, "-c", ours], capture_output=True, text=True)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=tell, args=(answers,))
    process.start()
    spawned = answers.get()
    process.join()
    print(has(), spawned, behind.stdout.strip(), "libasan" in tool, os.environ.get("LD_PRELOAD"), sys.argv[1:])
"""
# A build takes 95 s on a slow machine with nothing beside it; who comes first pays for it.
pytestmark = pytest.mark.timeout(400)

# Forms whose recipe names their tests. `make verbs` chooses by itself; what others give pytest, `make test` runs, too.
FROM_RECIPES = ("sanitized", "fault")

PACKED = """
import sys
from setuptools.command.egg_info import FileList
files = FileList()
for line in open("MANIFEST.in"):
    if not line.startswith("#"):
        files.process_template_line(line.strip())
sys.stdout.write("\\n".join(files.files))
"""


def run(made: Build, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script on the build, or, without an environment, on what is installed."""
    environment = os.environ | made.environment | variables
    command = [sys.executable, "-c", script, *arguments]
    directory = made.packages if made.environment else ROOT
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def sanitized() -> Build:
    made = build("sanitized")
    made.forget_reports()
    return made


def test_a_source_distribution_has_all_that_the_build_reads() -> None:
    """setuptools by itself takes only the sources that pyproject.toml names."""
    done = subprocess.run([sys.executable, "-c", PACKED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    needed = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in {".c", ".h", ".inc", ".py"}]
    assert len(needed) > 30
    assert sorted(done.stdout.split()) == sorted(str(path.relative_to(ROOT)) for path in needed), done.stderr


def test_the_sanitized_engine_reports_a_planted_overrun(sanitized: Build) -> None:
    """One element past the end is found; up to the end is not."""
    good = run(sanitized, OVERRUN.format(count=4096))
    assert (good.returncode, good.stderr) == (0, "")
    assert Path(good.stdout.strip()).is_relative_to(sanitized.packages)
    sanitized.check_reports()
    assert run(sanitized, OVERRUN.format(count=4097)).returncode != 0
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        sanitized.check_reports()
    sanitized.forget_reports()


def test_the_checker_is_in_our_processes_and_in_no_tool(sanitized: Build, tmp_path: Path) -> None:
    """A Python that starts from a Python, spawned or behind a shell, has it; the shell has not."""
    (tmp_path / "where.py").write_text(WHERE)
    environment = os.environ | sanitized.environment
    command = [sys.executable, str(tmp_path / "where.py"), "a word", ""]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True True True False None ['a word', '']\n", done.stderr
    sanitized.check_reports()


def test_a_build_has_every_file_of_the_repository(sanitized: Build) -> None:
    """Tests find beside the packages what they find in the tree: measurements, examples, manifests. No links, or those
    that copy a folder would copy a link."""
    assert {Path("perf/netlab.py"), Path("examples/minilm.py"), Path("deploy/container/Containerfile")} < set(sources())
    assert [path for path in sources() if not (sanitized.packages / path).is_file()] == []
    assert not any(path.is_symlink() for path in sanitized.packages.iterdir())


def recipe(form: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that `make FORM` ends with, in this Python, and the variables that it sets."""
    others = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "TESTS"}
    command = ["make", "--no-print-directory", "--dry-run", form]
    told = subprocess.run(command, cwd=ROOT, env=others, capture_output=True, text=True, timeout=60, check=True).stdout
    words = shlex.split(told.splitlines()[-1])
    variables = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))
    program, *arguments = words[len(variables) :]
    return [sys.executable, *(["-m", "pytest"] if Path(program).name == "pytest" else []), *arguments], variables


@pytest.mark.parametrize("form", [*FROM_RECIPES, "verbs"])
def test_the_tests_of_each_long_form_load_in_its_tree(form: str) -> None:
    """Nobody looks at a long form for weeks: a file that its tree lacks, or a test that moved, is found here."""
    if form in FROM_RECIPES:
        command, variables = recipe(form)
    else:
        command, variables = [sys.executable, "-m", "pytest", *default_tests(long=True)], {"SMB_TEST_FAR": "verbs"}
    done = subprocess.run(
        [*command, "--collect-only", "-q"], cwd=ROOT, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_frames_find_nothing_in_the_sanitized_engine(sanitized: Build) -> None:
    """Malformed ones, the server under the sanitizers. `make sanitized` runs all of tests/engine/wire and tests/api so,
    clients included."""
    assert run_tests("sanitized", ["tests/engine/wire/test_malformed.py"]) == 0


def test_failpoints_are_in_their_build_and_in_no_other(tmp_path: Path) -> None:
    """An armed point kills the one, and is nothing to the other."""
    made = build("failpoints")
    armed = {"SMB_ENGINE_FAILPOINT": "recovery.slots_done"}
    assert run(made, REOPENED, str(tmp_path / "journal")).stdout == "opened\nopened\n"
    killed = run(made, REOPENED, str(tmp_path / "journal"), **armed)
    assert killed.returncode == -signal.SIGKILL
    installed = Build(made.directory, {})
    assert run(installed, REOPENED, str(tmp_path / "journal"), **armed).returncode == 0


@pytest.mark.parametrize("kind", ["failpoints", "sanitized"])
def test_a_build_that_is_up_to_date_stays(kind: str) -> None:
    """Nothing is compiled or copied twice."""
    made = build(kind)
    engine = next((made.packages / "smb").glob("_engine*.so"))
    before = engine.stat().st_mtime_ns, (made.packages / "smb" / "client.py").stat().st_mtime_ns
    build(kind)
    assert (engine.stat().st_mtime_ns, (made.packages / "smb" / "client.py").stat().st_mtime_ns) == before
