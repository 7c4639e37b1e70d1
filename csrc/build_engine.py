"""Builds the compiled and generated parts: the engine's cffi module, smb._direct, and the gRPC code. Called by
setuptools (see pyproject.toml)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent.parent
MODULE = "smb._engine"
# The engine's folders, in the order of the layers; python/ is a separate extension.
FOLDERS = ("base", "channel", "kernels", "sync", "memory", "server", "client", "async")
# The public headers in csrc/smb, each after the headers whose types it uses.
FACE = ("types", "tls", "kernels", "segment", "server", "client", "async")
# -ffp-contract=off: a fused multiply-add rounds once where numpy rounds twice. -fno-trapping-math lets comparisons
# become vector selects; it changes no result. No -march: users run our wheels on other machines (see kernels.c).
# -Werror for all warnings is only for our tests (make test), because users may have compilers that we have not tried.
COMPILE_ARGS = [
    "-std=c11",
    "-O3",
    "-g1",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror=implicit-function-declaration",  # the linker does not notice it: a module may lack what Python has
    "-D_GNU_SOURCE",
    "-pthread",
    "-fstack-protector-strong",
]
# These flags make a memory fault harder to exploit: checked calls of the C library, read-only tables of functions,
# marked targets of jumps (x86's CET, Arm's BTI and PAC) if the compiler supports them.
# tests/ops/deploy/test_hardening.py checks in the built files that they were used.
LINK_ARGS = ["-pthread", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]
FORTIFY = ("-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")
BRANCHES = ("-fcf-protection=full", "-mbranch-protection=standard")


def sources() -> list[str]:
    """Return the engine's sources, relative to the root."""
    return [f"csrc/{folder}/{path.name}" for folder in FOLDERS for path in sorted((ROOT / "csrc" / folder).glob("*.c"))]


def declarations() -> str:
    """Return the parts of the public headers that Python sees."""
    found = []
    for name in FACE:
        text = (ROOT / "csrc" / "smb" / f"{name}.h").read_text()
        match = re.search(r"/\* cffi: begin \*/(.*)/\* cffi: end \*/", text, re.S)
        assert match, f"csrc/smb/{name}.h has lost its cffi marks"
        found.append(match.group(1))
    return "".join(found)


def make_grpc_code() -> None:
    """Write *_pb2.py and its stub beside each .proto, and control_pb2_grpc.py."""
    import grpc_tools
    from grpc_tools import protoc

    include = Path(grpc_tools.__file__).parent / "_proto"
    for proto, services in (("smb/rpc/control.proto", True), ("smb/coordinator/etcd/etcd.proto", False)):
        arguments = ["protoc", f"-I{ROOT}", f"-I{include}", f"--python_out={ROOT}", f"--pyi_out={ROOT}"]
        arguments += [f"--grpc_python_out={ROOT}"] if services else []
        if protoc.main([*arguments, str(ROOT / proto)]) != 0:
            raise SystemExit(f"protoc could not compile {proto}")


class BuildPythonCode(build_py):
    """build_py that first generates the gRPC code."""

    def finalize_options(self) -> None:
        """Generate the code before setuptools lists the modules."""
        make_grpc_code()
        super().finalize_options()


class BuildEngine(build_ext):
    """build_ext for the engine (cffi's wrapper and the sources in one shared object) and for direct.c. Both use
    the limited API of Python 3.10, so the same files serve every newer Python.
    """

    def build_extension(self, ext: Extension) -> None:
        """Write cffi's wrapper into the build folder, then compile it with the engine's sources."""
        # Flags for compiler and linker, separated by spaces and placed after all others, for special builds:
        # "-DSMB_FAILPOINTS" or "-O1 -fsanitize=address,undefined" (tests/support/builds.py). Users need none.
        extra = os.environ.get("SMB_ENGINE_FLAGS", "").split()
        ext.depends = [str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.[hi]*")]
        ext.include_dirs = ["csrc"]
        ext.define_macros = [("Py_LIMITED_API", "0x030A0000")]
        hardening = self.hardening(extra)
        ext.extra_compile_args = [*COMPILE_ARGS, *hardening, *extra]
        ext.extra_link_args = [*LINK_ARGS, *extra]
        if ext.name == MODULE:
            self.add_engine(ext)
        else:
            # CPython's macros for tables of members do not initialize the last fields.
            ext.extra_compile_args += ["-Wno-missing-field-initializers", "-Wno-cast-function-type"]
        super().build_extension(ext)

    def copy_extensions_to_source(self) -> None:
        """Copy the modules into the tree, and remove those of a build for one Python, which Python would prefer."""
        for stale in (ROOT / "smb").glob("_*.cpython-*.so"):
            stale.unlink()
        super().copy_extensions_to_source()

    def hardening(self, extra: list[str]) -> list[str]:
        """Return the hardening flags that this compiler and this build support."""
        # The C library's checks need optimization, and hide faults from the sanitizers.
        unfit = "-O0" in extra or any(flag.startswith("-fsanitize") for flag in extra)
        found = [] if unfit else list(FORTIFY)
        return found + [flag for flag in BRANCHES if self.compiler_takes(flag)]

    def compiler_takes(self, flag: str) -> bool:
        """Whether the compiler accepts the flag, tried on an almost empty file."""
        empty = Path(self.build_temp) / "smb_empty.c"
        empty.parent.mkdir(parents=True, exist_ok=True)
        empty.write_text("typedef int smb_empty;\n")
        command = [*self.compiler.compiler_so, "-Werror", flag, "-c", str(empty), "-o", str(empty.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True).returncode == 0  # noqa: S603

    def add_engine(self, ext: Extension) -> None:
        """Write cffi's wrapper into the build folder and name the sources."""
        from cffi import FFI

        ffi = FFI()
        ffi.cdef(declarations())
        ffi.set_source(MODULE, "\n".join(f'#include "smb/{name}.h"' for name in FACE))
        wrapper = Path(self.build_temp) / "smb_engine_wrapper.c"
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        ffi.emit_c_code(str(wrapper))
        ext.libraries = ["ssl", "crypto"]
        ext.sources = [*sources(), str(wrapper)]
        # cffi's own code has unused parameters and functions.
        ext.extra_compile_args += ["-Wno-unused-parameter", "-Wno-unused-function"]


if __name__ == "__main__":
    sys.stdout.write(declarations())
