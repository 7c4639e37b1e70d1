"""A night of checks: long forms in turn, each in a fresh clone of HEAD with an environment of its own.

    python -m tests.nightly [--hours 8] [--only NAME ...] [--again] [--list]        or make nightly HOURS=8

Each form has a bound, a share of the hours; what does not fit is told as not run. A form fails, too, if it leaves a
process, a network namespace, a mount or shared memory behind. Ends with a table, the same as JSON, and 0 only if all
held. Ctrl-C ends it; the same call goes on from there, for the same commit. All of it is below build/nightly
(SMB_NIGHTLY_DIR).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.leftovers import Watch, adopt_orphans

ROOT = Path(__file__).parents[1]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_S = 300  # for tests to take down what they started, and for dpkg to finish, once they were told to end
LINGER_S = 10  # for daemons to notice that their owner has gone
PASSED, FAILED, HUNG, LEFT, INTERRUPTED, NOT_RUN = "passed", "FAILED", "HUNG", "LEFT THINGS", "interrupted", "not run"
ENDED = (PASSED, FAILED, HUNG, LEFT)


@dataclass(frozen=True)
class Form:
    """Arguments of make. {fifth_s} is a fifth of the bound, {most_s} nearly all, {half_min} half of it, for forms that
    run as long as asked. {seed} is drawn for each run.
    """

    name: str
    words: str
    share: float  # of the hours, beside the others': the minutes that it took on two slow cores, and a third more
    least: float  # minutes: with a lower bound it is not begun


FORMS = (
    Form("test", "test", 24, 12),
    Form("latest", "test LATEST=1", 60, 30),
    Form("matrix", "matrix", 30, 14),
    Form("sanitized", "sanitized", 46, 23),
    Form("c-test", "c-test SMB_LONG=1", 6, 3),
    Form("aarch64", "c-test ARCH=aarch64 VM=1", 13, 6),
    # Each of four targets has a fifth; the last one is the compiler's.
    Form("fuzz", "fuzz RUNS=-1 LIMIT_S={fifth_s} SEED={seed}", 26, 5),
    Form("model", "model", 21, 10),
    Form("simulate", "simulate SECONDS={most_s} SEED={seed}", 60, 5),
    Form("fault", "fault", 78, 39),
    Form("long", "long", 75, 36),
    Form("soak", "soak MINUTES={half_min} SEED={seed}", 40, 10),  # on SQLite
    Form("soak-etcd", "soak MINUTES={half_min} SEED={seed} SOAK=--etcd", 26, 10),
    Form("day", "day", 12, 6),
    Form("posix", "posix ARGS=--seed={seed}", 20, 10),
    Form("verbs", "verbs", 42, 20),
    Form("ray", "ray", 7, 3),
    Form("vllm", "vllm", 27, 13),
    Form("stacks", "stacks", 18, 9),
    Form("mpi", "mpi", 5, 1),
    Form("types", "types-long", 8, 4),
    Form("docs", "docs", 8, 4),
    Form("wheel", "wheel-test", 9, 4),
    Form("container", "container-test", 10, 5),
    Form("bare", "bare MATRIX=1", 42, 20),
    Form("perf", "perf PERF=--quick", 20, 10),
    Form("scaling", "scaling ARGS=--quick", 6, 3),
)


@dataclass
class Result:
    """The report on one form."""

    name: str
    state: str
    why: str = ""
    seconds: float = 0.0
    bound_s: int = 0
    repeat: str = ""
    log: str = ""
    seeds: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # new, but perhaps of another program of this machine
    tests: dict[str, int] = field(default_factory=dict)  # of pytest: how many passed, and were skipped


def bounds(forms: Sequence[Form], hours: float) -> dict[str, int]:
    """Return each form's bound in seconds; together they are the hours. Of forms that can't all have their least, the
    longest are left out until the others can."""
    chosen = list(forms)
    while chosen:
        minute_s = hours * 3600 / sum(form.share for form in chosen)
        short = [form for form in chosen if int(form.share * minute_s) < form.least * 60]
        if not short:
            return {form.name: int(form.share * minute_s) for form in chosen}
        chosen.remove(max(short, key=lambda form: form.least))
    return {}


def to_do(forms: Sequence[Form], known: dict[str, Result], again: bool) -> list[Form]:
    """Return the forms that have not come to their end, or all of them."""
    return [form for form in forms if again or form.name not in known or known[form.name].state not in ENDED]


def variables(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a form: as in a new shell, without what our own make or environment has set."""
    given = re.findall(r"(?:^| )(\w+)=", ours.get("MAKEFLAGS", ""))
    starts = ("MAKE", "MFLAGS", "SMB_", "VIRTUAL_ENV", "PYTHON")
    return {name: value for name, value in ours.items() if name not in given and not name.startswith(starts)}


def verdict(code: int | None, bound_s: int, left: Sequence[str]) -> tuple[str, str]:
    """Return a form's state and the reason. No exit code: it was ended at its bound."""
    if code is None:
        return HUNG, f"not done after {bound_s} s; if its log shows progress until then, more hours, and --again"
    if code != 0:
        return FAILED, f"exit status {code}"
    return (LEFT, f"{len(left)} left behind") if left else (PASSED, "")


def seeds(log: str) -> list[str]:
    """Return the seeds that a log names, each once."""
    return list(dict.fromkeys(re.findall(r"\bseeds?[ :=]+(\d+(?: to \d+)?)", log, re.I)))


def counts(log: str) -> dict[str, int]:
    """Return how many tests passed and how many were skipped, of all the runs of pytest that a log has."""
    found: dict[str, int] = {}
    for closing in re.findall(r"^(?:=+ )?((?:\d+ [a-z]+, )*\d+ [a-z]+) in [\d.]+s\b", log, re.M):
        for number, what in re.findall(r"(\d+) (passed|skipped)", closing):
            found[what] = found.get(what, 0) + int(number)
    return found


def findings(log: str) -> list[str]:
    """Return the lines of a log that name what failed; else its last ones."""
    pattern = r"(?:\w+: )?FAILED \S+.*|ERROR \S+::.*|make: \S+ failed at this step: .*|.*Sanitizer: .*"
    found = re.findall(rf"^(?:{pattern})$", log, re.M)
    return found[:20] or log.splitlines()[-5:]


def clock(seconds: float) -> str:
    """As in 1:02:03."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def table(results: Sequence[Result]) -> str:
    """Return what ran, how long, with which seeds, and what failed with the command that repeats it."""
    lines = [f"{'form':10} {'state':12} {'time':>8} {'bound':>8} {'passed':>6} {'skipped':>7}  seeds"]
    for one in results:
        passed, skipped = (str(one.tests.get(what, "")) for what in ("passed", "skipped"))
        lines.append(
            f"{one.name:10} {one.state:12} {clock(one.seconds):>8} {clock(one.bound_s):>8} {passed:>6} {skipped:>7}  "
            f"{', '.join(one.seeds[:6])}"
        )
    for one in results:
        if one.unknown:
            lines += ["", f"{one.name}: new meanwhile, of this or another program: {' '.join(one.unknown)}"]
        if one.state != PASSED:
            lines += ["", f"{one.name}: {one.state}" + (f", {one.why}" if one.why else "")]
            lines += [f"    {line}" for line in one.findings]
            lines += [f"    left behind, and removed: {line}" for line in one.left]
            lines += [f"    {key}: {value}" for key, value in (("again", one.repeat), ("log", one.log)) if value]
    return "\n".join(lines)


class Night:
    """One commit's results, and the directory in which its forms run."""

    def __init__(self, directory: Path, commit: str) -> None:
        self.directory, self.commit = directory / commit[:12], commit
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / "results.json"
        self.results: dict[str, Result] = {}
        if self.path.exists():
            told = json.loads(self.path.read_text())["forms"]
            self.results = {one["name"]: Result(**one) for one in told}

    def record(self, result: Result) -> None:
        """Keep a result, on disk, too."""
        self.results[result.name] = result
        told = {"commit": self.commit, "forms": [asdict(one) for one in self.results.values()]}
        self.path.with_suffix(".new").write_text(json.dumps(told, indent=1) + "\n")
        self.path.with_suffix(".new").replace(self.path)

    def run(self, form: Form, bound_s: int) -> None:
        """Run a form and record what came of it; what it left is removed. Ctrl-C is raised again afterwards."""
        tree, log = self.directory / form.name, self.directory / f"{form.name}.log"
        words = [
            f"PYTHON={os.path.realpath(sys.executable)}",
            *form.words.format(
                most_s=bound_s * 9 // 10, fifth_s=bound_s // 5, half_min=bound_s // 120, seed=1 + secrets.randbits(31)
            ).split(),
        ]
        result = Result(form.name, INTERRUPTED, bound_s=bound_s, log=str(log))
        result.repeat = shlex.join(["make", "-C", str(tree), *words])
        began, watch = time.monotonic(), Watch(tree)
        log.unlink(missing_ok=True)
        try:
            self._clone(tree)
            code = self._make(tree, words, log, bound_s, watch, form.name)
            watch.wait_for_all(LINGER_S)
            result.left, result.unknown = watch.clean()
            result.state, result.why = verdict(code, bound_s, result.left)
        except KeyboardInterrupt:  # perhaps during clean: once more, as no other one comes
            result.left, result.unknown = watch.clean()
            raise
        except (OSError, subprocess.CalledProcessError) as error:  # a full disk, say: the other forms may do
            result.left, result.unknown = watch.clean()
            result.state, result.why = FAILED, f"could not be run: {error}"
        finally:
            result.seconds = time.monotonic() - began
            text = log.read_text(errors="replace") if log.exists() else ""
            result.seeds, result.tests = seeds(text), counts(text)
            if result.state != PASSED:
                result.findings = findings(text)
            self.record(result)
        if result.state == PASSED:  # the tree stays, with measurements; an environment is a gigabyte
            for made in (".venv", "build"):
                shutil.rmtree(tree / made, ignore_errors=True)

    def _clone(self, tree: Path) -> None:
        shutil.rmtree(tree, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(ROOT), str(tree)], check=True)
        subprocess.run(["git", "checkout", "--quiet", "--detach", self.commit], cwd=tree, check=True)

    def _make(self, tree: Path, words: list[str], log: Path, bound_s: int, watch: Watch, name: str) -> int | None:
        """Run make, in a process group of its own. Returns its exit code, or None where it had to be ended."""
        began = time.monotonic()
        with log.open("wb") as out:
            child = subprocess.Popen(
                ["make", *words], cwd=tree, env=variables(os.environ), stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            while child.poll() is None and (spent := time.monotonic() - began) < bound_s:
                watch.look(waited_for=child.pid)
                show(f"{name:10} {clock(spent)} of {clock(bound_s)}  {log}", last=False)
                time.sleep(1)
            return child.returncode
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGINT)
                end = time.monotonic() + END_S
                while watch.look(waited_for=child.pid) and time.monotonic() < end:
                    child.poll()
                    time.sleep(0.2)
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()


def show(line: str, last: bool = True) -> None:
    """Print a line; one that is not the last is for a terminal, where the next one replaces it."""
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="\n" if last else "", flush=True)
    elif last:
        print(line, flush=True)


def stop(number: int, frame: object) -> None:
    """Once is enough: what follows takes down what runs, and is not to be cut short."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def pass_over(number: int, frame: object) -> None:
    """Go on."""


def main(arguments: Sequence[str] | None = None, forms: Sequence[Form] = FORMS) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=8.0, help="for what is left to run (8)")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[form.name for form in forms], help="these forms")
    parser.add_argument("--again", action="store_true", help="forms that have a result for this commit, too")
    parser.add_argument("--list", action="store_true", help="say what would run, with bounds and what is known")
    options = parser.parse_args(arguments)
    chosen = [form for form in forms if not options.only or form.name in options.only]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    night = Night(Path(os.environ.get("SMB_NIGHTLY_DIR", ROOT / "build" / "nightly")).resolve(), commit.stdout.strip())
    todo = to_do(chosen, night.results, options.again)
    bound_s = bounds(todo, options.hours)
    if options.list:
        for form in chosen:
            bound = (
                "not again" if form not in todo else clock(bound_s[form.name]) if form.name in bound_s else "no time"
            )
            known = night.results[form.name].state if form.name in night.results else ""
            print(f"{form.name:10} {bound:>9}  {known:12} make {form.words}")
        return 0
    with (night.directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another one runs in {night.directory}") from None
        adopt_orphans()
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        for each in SIGNALS:
            # Passed over, and not ignored: forms would inherit that, and their tests send it.
            signal.signal(each, pass_over if under_nohup and each == signal.SIGHUP else stop)
        print(f"commit {commit.stdout.strip()}, in {night.directory}; changes that are not committed are not in it")
        interrupted = False
        try:
            for form in todo:
                if form.name in bound_s:
                    show(
                        f"{form.name:10} begins, at most {clock(bound_s[form.name])}: {night.directory / form.name}.log"
                    )
                    night.run(form, bound_s[form.name])
                    done = night.results[form.name]
                    show(f"{done.name:10} {done.state} after {clock(done.seconds)}")
                else:
                    night.record(Result(form.name, NOT_RUN, f"needs {form.least:g} minutes: more than its share"))
        except KeyboardInterrupt:
            interrupted = True
        for form in chosen:
            if form.name not in night.results:
                night.record(Result(form.name, NOT_RUN, "interrupted before it"))
    rows = [night.results[form.name] for form in chosen]
    print(f"\n{table(rows)}\n\nas JSON: {night.path}")
    return 130 if interrupted else int(any(row.state != PASSED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
