"""`make image` by a real container engine, and a cluster of containers of the image.

    python -m tests.ops.deploy.image        as root, with podman, runc and mmdebstrap, and wheels in dist/; about five
                                            minutes, 2 GB below /var/tmp or TMPDIR

The base is made of Debian's packages, so no registry is asked. Debian's packages and Python's come from where this
machine gets them. Images are kept in a folder of their own, which is removed.
"""

from __future__ import annotations

import configparser
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import smb
from tests.ops.deploy.chroot import base_system

ROOT = Path(__file__).parents[3]
NEEDED = ("podman", "runc", "mmdebstrap")
BASE = "localhost/smb-base"
COORDINATOR, METRICS = "127.0.0.1:17470", "127.0.0.1:19470"
MEMORY_METRICS = "127.0.0.1:19471"
PROGRAM = """
import os, smb, time
assert os.getuid() == 10001
with smb.connect() as client:
    while not any(server.alive for server in client.servers()):
        time.sleep(0.1)
    buffer = client.create("w", 1000)
    buffer.fill(2)
    buffer.accumulate(buffer.read())
    assert buffer.read().sum() == 4000
    client.delete("w")
"""
STORAGE = """[storage]
driver = "vfs"
runroot = "{work}/run"
graphroot = "{work}/images"
"""


class Engine:
    """podman with images in a folder of its own, and with limits that any machine allows."""

    def __init__(self, work: Path) -> None:
        (work / "storage.conf").write_text(STORAGE.format(work=work))
        # Steps of a build run in a chroot, which needs no further rights, and none is kept as a layer: a copy of all.
        self.environment = os.environ | {
            "CONTAINERS_STORAGE_CONF": str(work / "storage.conf"),
            "BUILDAH_ISOLATION": "chroot",
            "BUILDAH_LAYERS": "false",
        }

    def __call__(self, *words: str) -> str:
        """Run a command of podman; return what it printed."""
        done = subprocess.run(
            self._command(*words), env=self.environment, stdout=subprocess.PIPE, text=True, timeout=900
        )
        if done.returncode != 0:
            raise SystemExit(f"podman {' '.join(words)} ended with {done.returncode}")
        return done.stdout.strip()

    def status(self, *words: str) -> int:
        """Run a command of podman; return its exit status."""
        quiet = subprocess.DEVNULL
        return subprocess.run(
            self._command(*words), env=self.environment, stdout=quiet, stderr=quiet, timeout=60
        ).returncode

    def _command(self, *words: str) -> list[str]:
        return ["podman", "--cgroup-manager", "cgroupfs", "--runtime", "runc", *words]

    def run(self, *words: str) -> str:
        """Run a container of the image on this machine's network."""
        limits = (
            f"--ulimit={name}={value}:{value}"
            for name, number in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC))
            if (value := min(resource.getrlimit(number)[1], 4096)) > 0
        )
        # Health is asked for by the caller, as podman's timers need systemd.
        return self("run", "--network", "host", "--health-interval", "disable", *limits, *words)

    @contextmanager
    def daemon(self, name: str, options: list[str], command: list[str]) -> Iterator[None]:
        """Run a daemon of the image until the end of the block, and see that it ends in order then."""
        image = f"soft-memory-box:{smb.__version__}"
        self.run("--detach", "--name", name, *options, image, *command)
        try:
            yield
            self("stop", "--time", "30", name)
            ended = self("inspect", "--format", "{{.State.ExitCode}}", name)
            assert ended == "0", f"{name} ended with {ended}"
        except BaseException:
            subprocess.run(self._command("logs", name), env=self.environment, check=False)
            raise
        finally:
            self("rm", "--force", name)


def until(reached: Callable[[], bool], what: str) -> None:
    """Wait for something. Raises AssertionError after a minute."""
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.2)


def make_base(engine: Engine, work: Path) -> str:
    """Make a base of Debian's packages; return its name with its digest."""
    root = work / "base"
    base_system(root, ["ca-certificates"])
    config = configparser.ConfigParser()
    config.read("/etc/pip.conf")
    wanted = {key[4:].lower().replace("_", "-"): value for key, value in os.environ.items() if key.startswith("PIP_")}
    config["global"] = dict(config["global"] if config.has_section("global") else {}) | wanted
    config["global"].pop("find-links", None)  # a folder of this machine
    with (root / "etc/pip.conf").open("w") as file:
        config.write(file)
    apart = [f"--exclude=./{name}/*" for name in ("proc", "sys", "dev")]
    subprocess.run(["tar", "-C", root, "-cf", work / "base.tar", *apart, "."], check=True)
    engine("import", "--quiet", str(work / "base.tar"), BASE)
    return f"{BASE}@{engine('image', 'inspect', '--format', '{{.Digest}}', BASE)}"


def build(engine: Engine, base: str) -> None:
    """Make the image as docs/install.md says, and look at what it says about itself."""
    command = ["make", "--no-print-directory", "image", "ENGINE=podman", f"BASE={base}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800, env=engine.environment)
    (found,) = json.loads(engine("image", "inspect", f"soft-memory-box:{smb.__version__}"))
    assert found["User"] == "10001:10001", found["User"]
    assert found["Labels"]["org.opencontainers.image.version"] == smb.__version__, found["Labels"]
    print(f"the image has {found['Size'] / 2**20:.0f} MiB", flush=True)


def try_out(engine: Engine) -> None:
    """A coordinator, a memory server and a client in a container each: as the image's user, with its health check."""
    image = f"soft-memory-box:{smb.__version__}"
    for missing in ("gcc", "pip"):
        assert engine.run("--rm", image, "sh", "-c", f"command -v {missing} || echo none") == "none", missing
    memory = "--mount=type=tmpfs,destination=/memory,tmpfs-size=64m,U=true"
    coordinator = ["smb", "coordinator", "--listen", COORDINATOR]
    server = ["smb-memserver", "--coordinator", COORDINATOR, "--capacity", "16MiB", "--name", "image"]
    with (
        engine.daemon("smb-coordinator", ["--env", f"SMB_COORDINATOR_METRICS={METRICS}"], coordinator),
        engine.daemon("smb-memserver", [memory, "--env", f"SMB_MEMSERVER_METRICS={MEMORY_METRICS}"], server),
    ):
        for name in ("smb-coordinator", "smb-memserver"):
            until(functools.partial(_is_healthy, engine, name), f"the health of {name}")
        client = ["--env", f"SMB_COORDINATOR={COORDINATOR}", image, "python3", "-c", PROGRAM]
        engine.run("--rm", *client)
    print("the image serves", flush=True)


def _is_healthy(engine: Engine, name: str) -> bool:
    return engine.status("healthcheck", "run", name) == 0


def main() -> None:
    """Build in a new directory, try it out, and remove it."""
    if os.geteuid() != 0 or any(shutil.which(each) is None for each in NEEDED):
        sys.exit(f"needs root and Debian's {', '.join(NEEDED)}")
    work = Path(tempfile.mkdtemp(prefix="smb-image-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    work.chmod(0o755)
    engine = Engine(work)
    try:
        build(engine, make_base(engine, work))
        try_out(engine)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
