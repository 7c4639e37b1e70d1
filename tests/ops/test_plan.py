"""`smb plan` as a user meets it: its table, its JSON, its picture, and what it says of wrong usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import smb
from smb.errors import Error
from smb.tools.cli.main import app
from smb.train.scheme import SCHEMES

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "examples/plan/model.toml"
LINK = ("--link", "1Gbit", "--rtt", "1ms")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"SMB_COORDINATOR": None, "COLUMNS": "200"})


def test_a_table(tmp_path: Path) -> None:
    """A row for each number of workers, scheme and overlap; then what follows."""
    answer = plan(str(SPEC), "--workers", "8,1", *LINK, "--servers", "2", "--schemes", "bsp,diloco", "--every", "100")
    assert answer.exit_code == 0, answer.output
    lines = answer.output.splitlines()
    assert lines[0].startswith("vgg-like: 10 layers, 18.2 MiB of parameters; a step of b samples computes")
    assert "links of 1Gbit, round trip 1ms; memory servers: 2; contributions exact" in lines[1]
    rows = [line.split() for line in lines if line.strip().startswith(("1 ", "8 "))]
    assert [row[:2] for row in rows[:8]] == [["1", "bsp"]] * 3 + [["1", "diloco"]] + [["8", "bsp"]] * 3 + [
        ["8", "diloco"]
    ]
    assert [row[2].rstrip("*:") for row in rows[4:8]] == ["none", "forward", "both", "none"]
    assert rows[7][3] == "100"
    assert [row[0] for row in rows[8:]] == ["1", "8"]
    assert "* an exchange behind the passes of a step: overlap=" in answer.output
    late = ("--fragments", "4", "--delay", "5", "--step-wire", "int8")
    answer = plan(str(SPEC), *LINK, "--schemes", "diloco", "--every", "100", *late)
    assert "DiLoCo in 4 fragments, taken over 5 steps later; its step int8" in answer.output.splitlines()


def test_rows_with_more_workers_than_a_training_takes_are_marked() -> None:
    """Those that the scheme's table of members has slots for are not marked."""
    limits = {name: SCHEMES[name].MEMBERS_MAX for name in ("bsp", "r2sp", "asp")}
    assert limits == {"bsp": 512, "r2sp": 128, "asp": 512}
    workers = "72,128,129,512,513"
    arguments = (str(SPEC), "--workers", workers, *LINK, "--schemes", ",".join(limits))
    answer = plan(*arguments)
    assert answer.exit_code == 0, answer.output
    rows = [line.split()[:3] for line in answer.output.splitlines()]
    for name, most in limits.items():
        shown = [f"{count}{'!' if int(count) > most else ''}" for count in workers.split(",")]
        assert [row[0] for row in rows if row[1:] == [name, "none"]] == shown, answer.output
    assert (
        "! a training refuses that many workers: it has at most so many members at a time: 128 with r2sp; 512 with "
        "asp, bsp (the ranks of one mesh= are one member)"
    ) in answer.output
    found = json.loads(plan(*arguments, "--json").stdout)["predictions"]
    assert all(row["over_limit"] == (row["workers"] > limits[row["scheme"]]) for row in found)
    assert all(row["members_max"] == limits[row["scheme"]] for row in found)
    told = " ".join(plan("--help").output.replace("│", " ").split())
    assert "a training has at most 512 at a time, with r2sp 128" in told
    assert "refuses" not in plan(str(SPEC), "--workers", "72,128", *LINK, "--schemes", "bsp,diloco").output


def test_a_process_that_is_slower_than_its_link() -> None:
    """It bounds what a worker moves, and is told as what does."""
    arguments = (str(SPEC), "--workers", "4", "--link", "100Gbit", "--servers", "16", "--schemes", "bsp")
    shown = plan(*arguments, "--client-limit", "100Mbit")
    assert shown.exit_code == 0, shown.output
    assert "links of 100Gbit, round trip 0.2ms, at most 100Mbit for each worker's process" in shown.output
    slow, usual = (
        json.loads(plan(*arguments, "--json", *more).stdout)["predictions"][0]
        for more in (("--client-limit", "100Mbit"), ())
    )
    assert slow["bound_by"] == "worker's process"
    assert usual["bound_by"] != "worker's process"
    assert slow["iteration_s"] > 3 * usual["iteration_s"]


def test_meshes_are_marked(tmp_path: Path) -> None:
    """A spec with fully connected layers has rows of meshes; JSON has their ranks, and the layers in its spec."""
    spec = tmp_path / "connected.toml"
    spec.write_text(
        "batch = 4\n[[layers]]\nparameters = 1000\nforward_ms = 10\nbackward_ms = 20\n"
        '[[layers]]\nparameters = 4_000_000\nforward_ms = 1\nbackward_ms = 2\nkind = "fc"\ninputs = 2000\n'
    )
    arguments = (str(spec), "--workers", "16", *LINK, "--servers", "workers", "--schemes", "bsp")
    shown = plan(*arguments).output
    assert "bsp, as a mesh of 16" in shown
    assert "smb.torch.join(mesh=) does not take overlap= yet" in shown
    found = json.loads(plan(*arguments, "--json").stdout)
    assert {row["mesh"] for row in found["predictions"]} == {1, 16}
    assert found["spec"]["layers"][1]["inputs"] == 2000
    assert "mesh" not in plan(str(SPEC), "--workers", "16", *LINK).output


def test_json_can_be_planned_again(tmp_path: Path) -> None:
    """Its "spec" is a spec, with which the predictions are the same."""
    arguments = ("--workers", "1,4", *LINK, "--wire", "int8", "--json")
    first = json.loads(plan(str(SPEC), *arguments).stdout)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(first["spec"]))
    second = json.loads(plan(str(again), *arguments).stdout)
    for one, other in zip(first["predictions"], second["predictions"], strict=True):
        assert (other["scheme"], other["overlap"], other["bound_by"]) == (
            one["scheme"],
            one["overlap"],
            one["bound_by"],
        )
        assert other["iteration_s"] == pytest.approx(one["iteration_s"], rel=1e-9)
    assert {row["workers"] for row in first["predictions"]} == {1, 4}
    assert first["advice"][1]["diloco_every"] >= 1
    assert first["network"]["rtt_s"] == 0.001


def test_no_torch_for_a_spec() -> None:
    """It is a second's wait."""
    code = (
        "import sys; from typer.testing import CliRunner; from smb.tools.cli.main import app;"
        f"answer = CliRunner().invoke(app, ['plan', {str(SPEC)!r}, '--link', '1Gbit']);"
        "print(answer.exit_code, 'torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["0", "False", "False"]


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib")
    picture = tmp_path / "plan.svg"
    answer = plan(str(SPEC), "--workers", "16", *LINK, "--schemes", "asp", "--plot", str(picture))
    assert answer.exit_code == 0, answer.output
    assert f"plot: {picture}" in answer.output
    assert "<svg" in picture.read_text()
    answer = plan(str(SPEC), *LINK, "--plot", str(tmp_path / "plan.nothing"))
    assert isinstance(answer.exception, Error)
    assert "cannot write the plot" in str(answer.exception)


def test_a_script_is_measured() -> None:
    """The example; times are of this machine."""
    pytest.importorskip("torch", reason="PyTorch")
    answer = plan(str(ROOT / "examples/plan/script.py"), "--batch", "8", *LINK, "--json")
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["spec"]["batch"] == 8
    assert len(found["spec"]["layers"]) == 4
    assert found["parameters_bytes"] == 4 * (64 * 256 + 256 + 256 * 256 + 256 + 2 * 256 + 256 * 10 + 10)
    assert found["compute"]["fixed_s"] + found["compute"]["sample_s"] > 0


def test_a_cluster_is_measured() -> None:
    """And nothing is left in it."""
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster:
        answer = plan(str(SPEC), "--coordinator", cluster.address, "--workers", "2", "--json")
        assert answer.exit_code == 0, answer.output
        network = json.loads(answer.stdout)["network"]
        assert 0 < network["call_s"] < 0.1
        assert network["worker_per_s"] >= network["server_per_s"] > 1e6
        assert cluster.address in network["source"]
        with smb.connect(cluster.address) as client:
            assert client.list() == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((str(SPEC),), "pass --link, such as 10Gbit"),
        (
            (str(SPEC), "--coordinator", "127.0.0.1:1", "--rtt", "1ms"),
            "--server-link, --rtt and --client-limit need --link",
        ),
        (
            (str(SPEC), "--coordinator", "127.0.0.1:1", "--client-limit", "1Gbit"),
            "--server-link, --rtt and --client-limit need --link",
        ),
        ((str(SPEC), *LINK, "--client-limit", "4GB"), "a link's rate must be in bits a second"),
        (
            (str(SPEC), "--link", "fast"),
            "a link's rate must be in bits a second, such as 10Gbit or 400Mbit, not 'fast'",
        ),
        ((str(SPEC), *LINK, "--rtt", "20"), "such as 20ms or 50us, not '20'"),
        ((str(SPEC), *LINK, "--servers", "none"), "--servers must be a positive integer or 'workers', not none"),
        (
            (str(SPEC), *LINK, "--workers", "1,,2"),
            "--workers must be integers from 1 to 100000, separated by commas, not 1,,2",
        ),
        ((str(SPEC), *LINK, "--workers", "0"), "separated by commas, not 0"),
        ((str(SPEC), *LINK, "--schemes", "adam"), "unknown scheme 'adam'; known are bsp, asp"),
        ((str(SPEC), *LINK, "--wire", "int3"), "wire must be one of exact, bfloat16, float16, int8, int4, not 'int3'"),
        ((str(SPEC), *LINK, "--step-wire", "int3"), "step_wire must be one of exact"),
        ((str(SPEC), *LINK, "--fragments", "51"), "fragments must be a whole number from 1 to every=50"),
        (
            (str(SPEC), *LINK, "--fragments", "2", "--schemes", "bsp,asp"),
            "are settings of diloco, which --schemes does not include",
        ),
        ((str(SPEC), *LINK, "--batch", "8", "--global-batch", "8"), "not both"),
        (("model.txt", *LINK), "model.txt must be a script (.py) or a spec (.toml, .json)"),
        (("no.toml", *LINK), "no.toml: No such file"),
        (("no.py", *LINK), "no.py does not exist"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], error: str) -> None:
    """Exit code 2, and a sentence."""
    answer = plan(*arguments)
    assert answer.exit_code == 2, answer.output
    said = " ".join(answer.output.replace("│", " ").split())
    assert error in said
