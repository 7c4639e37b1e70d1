"""What `make verbs` does: the tests of verbs, here where there is an RDMA device, else in a virtual machine.

    python -m tests.verbs.run [--vm] [PYTEST ARGUMENT...]

Installs the Debian packages that are missing, makes Debian's pyverbs importable in the environment that runs this, and
runs tests/verbs, tests of every transport over verbs (contract.py; all of them with SMB_LONG=1) and what needs netem,
or what the arguments name. Its exit status is pytest's; 127 where neither way can be gone, with what is missing. --vm:
in the virtual machine in any case.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from smb.transport.verbs.devices import DEBIAN
from tests.verbs import vm
from tests.verbs.contract import OF_THE_KERNEL, chosen

LONG = os.environ.get("SMB_LONG") == "1"
LIMIT_S = 14_400.0 if LONG else 3600.0  # of all tests; a loaded machine takes several times as long as a quiet one
SLOWNESS = 6  # deadlines in the virtual machine are so many times as long


def link_pyverbs() -> None:
    """Make Debian's pyverbs, and nothing else of Debian's Python, importable in this environment."""
    link = Path(sysconfig.get_path("platlib")) / "pyverbs"
    if sys.prefix != sys.base_prefix and DEBIAN.exists() and not link.exists():
        link.symlink_to(DEBIAN)


def missing() -> tuple[bool, str]:
    """Return whether pyverbs imports, and what is missing for verbs on this machine, "" where nothing is.

    In a process of its own: what this one failed to import, it would not find later.
    """
    code = (
        "from smb.transport.verbs.devices import look; d = look(); print(d.pyverbs or ''); print(*d.missing, sep='\\n')"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    return bool(told[0]), "\n".join(told[1:])


def default_tests(long: bool) -> list[str]:
    """Return pytest's arguments where the caller named no test."""
    return ["tests/verbs", *(f"tests/{file}" for file in (*chosen(long), *OF_THE_KERNEL))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vm", action="store_true")
    given, arguments = parser.parse_known_args()
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        arguments += default_tests(LONG)
    command = [sys.executable, "-m", "pytest", *arguments]
    variables = {"SMB_TEST_VERBS": "required", "SMB_TEST_FAR": "verbs"}
    problem: vm.VmError | None = None
    try:
        vm.install_packages()
    except vm.VmError as error:
        problem = error
    link_pyverbs()
    importable, lines = missing()
    if importable and not lines and not given.vm:
        return subprocess.run(command, env=os.environ | variables, check=False).returncode
    if importable and problem is None:
        variables["SMB_TEST_SLOWNESS"] = str(SLOWNESS)
        try:
            vm.setup()
            return vm.run([*command, "--timeout", str(120 * SLOWNESS)], LIMIT_S, variables=variables)
        except vm.VmError as error:
            problem = error
    print(
        f"the tests of verbs are NOT RUN.\non this machine: {lines}\nin a virtual machine: {problem}", file=sys.stderr
    )
    return problem.status if problem else 127


if __name__ == "__main__":
    sys.exit(vm.guarded(main))
