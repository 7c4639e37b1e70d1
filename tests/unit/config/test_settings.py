"""smb.config.settings: flags, variables and the file's keys come from one table."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import smb
from smb.config.settings import SETTINGS, find, read_file, switch_of, text_of, use_file
from smb.errors import InvalidArgumentError
from smb.tools.cli.main import app

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set before a test, nor after it what a file put into the environment."""
    for variable in [*os.environ]:
        if variable.startswith("SMB_"):
            monkeypatch.delenv(variable)
    for setting in SETTINGS.values():  # recorded, so that it is taken back at the end
        monkeypatch.setenv(setting.variable, "")
        monkeypatch.delenv(setting.variable)
    monkeypatch.setenv("SMB_CONFIG", "")


def write(path: Path, text: str) -> Path:
    file = path / "smb.toml"
    file.write_text(text)
    return file


def shown(*arguments: str, variables: dict[str, str] | None = None) -> dict[str, Any]:
    """What `smb config` says, by setting."""
    answer = CliRunner().invoke(app, ["config", "--json", *arguments], env=variables or {})
    assert answer.exit_code == 0, answer.output
    return {f"{entry['section']}.{entry['key']}": entry for entry in json.loads(answer.stdout)["settings"]}


def test_a_variable_counts_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    """`smb config` tells each value and where it stands: variable, FILE:LINE, or default."""
    file = write(tmp_path, '[memserver]\n# room\ncapacity = "2GiB"\nloops = 3\n\n[coordinator]\nchecksum = true\n')
    entries = shown("--config", str(file), variables={"SMB_MEMSERVER_LOOPS": "5"})
    seen = {name: (entries[name]["value"], entries[name]["from"]) for name in entries}
    assert seen["memserver.capacity"] == ("2GiB", f"{file}:3")
    assert seen["memserver.loops"] == ("5", "SMB_MEMSERVER_LOOPS")
    assert seen["coordinator.checksum"] == ("1", f"{file}:7")
    assert seen["memserver.weight"] == (1.0, "default")


def test_a_flag_counts_before_both(tmp_path: Path) -> None:
    """`smb ls -c` asks the address given, not that of the variable or the file; without it the variable's, then the
    file's, whether the file is named before the command, after it, or by SMB_CONFIG.
    """
    file = str(write(tmp_path, '[cluster]\ncoordinator = "127.0.0.1:1"\n'))

    def asked(*arguments: str, **variables: str) -> str:
        error = CliRunner().invoke(app, arguments, env=variables).exception
        assert isinstance(error, smb.UnavailableError)
        match = re.search(r"no coordinator answers at (\S+)", str(error))
        assert match
        return match[1]

    assert asked("ls", "--config", file, "-c", "127.0.0.1:3", SMB_COORDINATOR="127.0.0.1:2") == "127.0.0.1:3"
    assert asked("ls", "--config", file, SMB_COORDINATOR="127.0.0.1:2") == "127.0.0.1:2"
    assert asked("ls", "--config", file) == "127.0.0.1:1"
    assert asked("--config", file, "ls") == "127.0.0.1:1"
    assert asked("ls", SMB_CONFIG=file) == "127.0.0.1:1"


def test_a_program_reads_the_file_that_the_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """smb.connect takes from it what no variable says, and leaves the environment as it is; a bad value is refused
    with its place, from wherever it comes.
    """
    file = write(tmp_path, '[cluster]\ncoordinator = "127.0.0.1:1"\n[client]\ntransport = "tcp"\nchecksum = false\n')
    assert find("client.transport") is None
    monkeypatch.setenv("SMB_CONFIG", str(file))
    assert (text_of("client.transport"), switch_of("client.checksum")) == ("tcp", False)
    monkeypatch.setenv("SMB_CHECKSUM", "1")
    assert switch_of("client.checksum") is True
    with pytest.raises(smb.UnavailableError, match=r"127\.0\.0\.1:1 "):
        smb.connect(timeout=2.0)  # a busy machine needs a moment to be refused
    assert "SMB_COORDINATOR" not in os.environ
    monkeypatch.setenv("SMB_CHECKSUM", "perhaps")
    with pytest.raises(InvalidArgumentError, match='SMB_CHECKSUM=perhaps: must be 1 or 0, not "perhaps"'):
        smb.connect("127.0.0.1:1")


def test_another_file_takes_the_first_ones_place(tmp_path: Path) -> None:
    """What a file put into the environment is gone when another is used; what somebody set since stays."""
    (tmp_path / "a.toml").write_text("[memserver]\nloops = 1\nweight = 2\n")
    (tmp_path / "b.toml").write_text("[client]\n")
    use_file(tmp_path / "a.toml")
    os.environ["SMB_MEMSERVER_WEIGHT"] = "3"
    use_file(tmp_path / "b.toml")
    assert "SMB_MEMSERVER_LOOPS" not in os.environ
    assert os.environ["SMB_MEMSERVER_WEIGHT"] == "3"


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ('[memserver]\n\ncapcity = "1GiB"', 3, '"capcity" is not a setting of .memserver.; did you mean capacity'),
        ("[memservers]\n", 1, '"memservers" is not a section; did you mean memserver'),
        ("# x\nmemserver = 3\n", 2, r"write \[memserver\]"),
        ('[memserver]\nloops = "two"\n', 2, "loops = 'two': it must be a whole number"),
        ("[memserver]\nloops = true\n", 2, "it must be a whole number"),
        (
            '[memserver]\nname = "a"\ncapacity = "1 GiBi"\n',
            3,
            "capacity = '1 GiBi': a size must be a number and a unit, .* not '1 GiBi'",
        ),
        ('[coordinator]\nlisten = "here"\n', 2, "an address must be HOST:PORT"),
        ("[coordinator]\nstripe = 5000\n", 2, "must be a multiple of 4096"),
        ("[coordinator]\nchecksum = 1\n", 2, "it must be true or false"),
        ('[client]\ntransport = "fast"\n', 2, "transport must be one of .*, not 'fast'"),
        ("memserver.weight = -1\n", 1, "use a number from"),
        ('memserver = { weight = 1, log_level = "loud" }\n', 1, 'must be one of debug, .*not "loud"'),
        ("[memserver]\nname = unquoted\n", 2, "Invalid value"),
        ('[memserver]\nname = "open', 2, "."),
    ],
)
def test_mistakes_in_the_file_are_told_with_their_line(tmp_path: Path, text: str, line: int, told: str) -> None:
    """A wrong name, type, value or syntax is refused with FILE:LINE and what would do."""
    file = write(tmp_path, text)
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(str(file))}:{line}: .*{told}"):
        read_file(file)


def test_sizes_may_be_numbers(tmp_path: Path) -> None:
    """A size is text or bytes."""
    assert read_file(write(tmp_path, "[memserver]\ncapacity = 65536\n"))["memserver.capacity"].text == "65536"


def test_misspelt_variables_are_told() -> None:
    """`smb config` fails with the variable that may have been meant."""
    answer = CliRunner().invoke(app, ["config"], env={"SMB_MEMSERVER_CAPCITY": "1"})
    assert answer.exit_code == 1
    assert "did you mean SMB_MEMSERVER_CAPACITY?" in answer.stderr
    answer = CliRunner().invoke(app, ["config"], env={"SMB_JOB_ETCD": "etcd://here:1/x"})  # of deploy/slurm
    assert (answer.exit_code, "SMB_JOB" in answer.stderr) == (0, False)
    assert "--tls-" not in answer.stdout  # no command takes one


def test_every_setting_is_documented() -> None:
    """docs/commands.md has every variable of the table."""
    text = (ROOT / "docs/commands.md").read_text()
    assert [setting.variable for setting in SETTINGS.values() if f"`{setting.variable}`" not in text] == []
