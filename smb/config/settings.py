"""All settings in one table, from which flags, SMB_* variables and the keys of the configuration file are made.

A setting `capacity` of section `memserver` is `--capacity`, `SMB_MEMSERVER_CAPACITY`, and `capacity` below
`[memserver]` in the file. The sections `cluster` and `client` do not appear in the variable's name. A flag overrides a
variable, a variable overrides the file, and the file overrides the default. To add a setting, add a line to the table.

The file is TOML, named by --config or SMB_CONFIG. Each reader reads and checks the whole file, so that the first daemon
finds mistakes in other sections too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smb.config.limits import SETTINGS_BYTES_MAX, STRIPE_BYTES_MULTIPLE
from smb.config.parse import check_weight, parse_address, parse_addresses, parse_bytes
from smb.config.quotas import parse_quotas
from smb.config.transports import check_choice
from smb.config.untrusted import parse_toml, quoted, read_text, shortened
from smb.errors import InvalidArgumentError

CONFIG_VARIABLE = "SMB_CONFIG"
DEFAULT_COORDINATOR = "127.0.0.1:7070"  # for clients and commands; `smb up` and `smb coordinator` listen there
# Variables that are not settings: the file's own name, the owner of a LocalCluster's daemon, a variable that the engine
# reads when the library loads, and variables that tests set.
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "SMB_OWNER_PID", "SMB_ISA", "SMB_FAILPOINT", "SMB_FAILPOINTS_ALLOWED"})
SECTIONS = {
    "cluster": "what all parts of a cluster need",
    "client": "programs and commands that use it",
    "coordinator": "smb coordinator",
    "memserver": "smb-memserver",
    "verbs": "which RDMA device is used, and how, by programs and memory servers",
}
_PREFIXED = ("coordinator", "memserver", "verbs")
_FLAGLESS = ("client", "verbs")
_JOB = "SMB_JOB_"  # prefix of the variables of a batch job's script: deploy/slurm
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `kind` is the type in the file: str, int, float or bool; a size may be a str or an int.

    `check` takes the value as text and raises InvalidArgumentError. Conditions beyond the text, such as whether a
    directory exists, are checked where the value is used.
    """

    section: str
    key: str
    kind: type[str] | type[int] | type[float] | type[bool]
    default: Any
    help: str
    check: Callable[[str], object] = str
    metavar: str | None = None

    @property
    def name(self) -> str:
        """Section and key, for example "memserver.capacity"."""
        return f"{self.section}.{self.key}"

    @property
    def variable(self) -> str:
        prefix = f"{self.section}_" if self.section in _PREFIXED else ""
        return f"SMB_{prefix}{self.key}".upper()

    @property
    def flag(self) -> str:
        """The option of the daemon or the commands that take the setting; empty if there is none: because programs pass
        it to smb.connect, because it is for RDMA, or because it is one of the three files that --credentials names.
        """
        return "" if self.section in _FLAGLESS or self.key.startswith("tls_") else "--" + self.key.replace("_", "-")


@dataclass(frozen=True, slots=True)
class FoundSetting:
    """A setting's value as text, and where it was found: a variable's name, or FILE:LINE."""

    text: str
    where: str


def _one_of(choices: Iterable[str]) -> Callable[[str], object]:
    choices = tuple(choices)

    def check(text: str) -> None:
        if text.lower() not in choices:
            raise InvalidArgumentError(f'must be one of {", ".join(choices)}, not "{text}"')

    return check


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(f'must be a number, not "{text}"') from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f'must be a whole number, not "{text}"') from None


def _switch(text: str) -> bool:
    if text.lower() not in ("", "0", "1", "false", "true"):
        raise InvalidArgumentError(f'must be 1 or 0, not "{text}"')
    return text.lower() in ("1", "true")


def _weight(text: str) -> None:
    check_weight("a weight of", _number(text))


def _stripe(text: str) -> None:
    if parse_bytes(text) % STRIPE_BYTES_MULTIPLE:
        raise InvalidArgumentError(f'must be a multiple of {STRIPE_BYTES_MULTIPLE} bytes, not "{text}"')


def _quotas(text: str) -> None:
    parse_quotas(text.split())


def _address_or_none(text: str) -> None:
    if text:
        parse_address(text)


def _transport(text: str) -> None:
    check_choice(text)


def private_memory(around: str = "/dev/shm") -> str:  # noqa: S108 - the system's place for shared memory
    """Return the path of this user's own directory in a directory for all users; see
    smb/daemon/private_directory.py."""
    return f"{around}/smb-{os.geteuid()}"


_READY_HELP = "File for a JSON object (address, metrics, name, pid), written once it serves{}; removed at the stop."
_LOG_HELP = "debug, info, warning or error."
_FORMAT_HELP = "text, or json: one JSON object in a line."
_PAGES_HELP = "Where /metrics and /healthz are served."

_TABLE = (
    Setting(
        "cluster", "coordinator", str, None,
        "The coordinator's address; if several stand by for each other, all of them, separated by commas.",
        parse_addresses, "HOST:PORT",
    ),
    Setting(
        "cluster", "credentials", str, None,
        "Directory with ca.pem, cert.pem and key.pem: its own certificate, and the authority that it trusts. A daemon "
        "with credentials accepts only peers with a certificate of that authority.",
        metavar="DIR",
    ),
    Setting("cluster", "tls_ca", str, None, "The authority's certificate, in place of ca.pem there.", metavar="FILE"),
    Setting("cluster", "tls_cert", str, None, "Its own certificate, in place of cert.pem there.", metavar="FILE"),
    Setting("cluster", "tls_key", str, None, "Its own key, in place of key.pem there.", metavar="FILE"),
    Setting(
        "cluster", "deny", str, None,
        "Directory with deny.txt and crl.pem: certificates that are refused although they are good. Read again when "
        "they change. Default: that of ca.pem.",
        metavar="DIR",
    ),
    Setting(
        "cluster", "insecure", bool, False,
        "Listen to other machines without credentials: everybody who can connect may read, change and delete, and "
        "see the dashboard.",
        _switch,
    ),
    Setting(
        "cluster", "metrics_token_file", str, None,
        "A file with a secret token, which other machines need for metrics and dashboard. Without it only this "
        "machine can see them.",
        metavar="FILE",
    ),
    Setting("client", "transport", str, "auto", "auto, shm, verbs or tcp; overrides the program's choice.", _transport),
    Setting("client", "checksum", bool, None, "A CRC-32C with every frame. Default: the coordinator's.", _switch),
    Setting(
        "client", "client_metrics", str, None, "Where a program serves its metrics. Default: nowhere.", parse_address,
        "HOST:PORT",
    ),
    Setting(
        "client", "log", str, None,
        "debug, info, warning or error: what the library logs. Default: warning, and info of joins to trainings.",
        _one_of(LOG_LEVELS),
    ),
    Setting(
        "client", "trace", bool, False,
        "Spans of OpenTelemetry for steps, calls on buffers and calls to the coordinator (the extra otel).", _switch,
    ),
    Setting("client", "train_host", str, None, "The host a worker of HSGD belongs to. Default: the machine's name."),
    Setting(
        "coordinator", "listen", str, DEFAULT_COORDINATOR,
        "Where clients and memory servers connect; port 0: a free one.", parse_address, "HOST:PORT",
    ),
    Setting(
        "coordinator", "state", str, "./smb-state",
        "Where the records are kept: a directory, created if missing, or etcd://HOST:PORT,HOST:PORT/PREFIX, with which "
        "several coordinators stand by for each other.",
        metavar="DIR",
    ),
    Setting(
        "coordinator", "etcd_credentials", str, None,
        "Directory with ca.pem, cert.pem and key.pem for etcd; and a file `user`, NAME:PASSWORD, if etcd has roles.",
        metavar="DIR",
    ),
    Setting(
        "coordinator", "leader_lease", int, 8,
        "How long a silent leader stays the leader in etcd; another one leads a second later.",
        _whole, "SECONDS",
    ),
    Setting("coordinator", "metrics", str, "127.0.0.1:9470", _PAGES_HELP, parse_address, "HOST:PORT"),
    Setting("coordinator", "ready_file", str, None, _READY_HELP.format(""), metavar="FILE"),
    Setting(
        "coordinator", "session_lease", float, 30.0,
        "How long a client may stay silent before its session ends and its locks are released.",
        _number, "SECONDS",
    ),
    Setting(
        "coordinator", "server_lease", float, 6.0,
        "How long a memory server may stay silent before it counts as gone and its copies are made elsewhere.",
        _number, "SECONDS",
    ),
    Setting(
        "coordinator", "servers", str, None,
        "Where memory servers renew their leases, beside all calls of clients. They begin at --listen, and "
        "stay there if they cannot reach this port. Default: a free port of --listen's host.",
        parse_address, "HOST:PORT",
    ),
    Setting(
        "coordinator", "sessions", str, None,
        "With credentials: where clients renew their sessions and tokens, beside all other calls. They begin at "
        "--listen, and stay there if they cannot reach this port. Default: a free port of --listen's host.",
        parse_address, "HOST:PORT",
    ),
    Setting(
        "coordinator", "idle_names", float, None,
        "How long a named lock or barrier may stay unused before its memory is freed; its next use creates it again. "
        "Default: 60, or --session-lease if that is longer.",
        _number, "SECONDS",
    ),
    Setting(
        "coordinator", "balance_after", float, 20.0,
        "How long no memory server may have come or gone before primaries of buffers with two copies are balanced, "
        "slowly and without moving data; 0: only by smb rebalance.",
        _number, "SECONDS",
    ),
    Setting(
        "coordinator", "stripe", str, None,
        "Stripe of buffers that are created without one: bytes on one server before the next one follows; a "
        "multiple of 4096. Default: 256KiB, and 1MiB for buffers over 8 GiB.",
        _stripe, "SIZE",
    ),
    Setting(
        "coordinator", "checksum", bool, False,
        "Have all clients use a CRC-32C in every frame, unless their own setting differs.", _switch,
    ),
    Setting(
        "coordinator", "quota", str, None,
        "Limit for the buffers whose names begin with NAMESPACE/: their bytes together, and their number. *: each "
        "namespace without a limit of its own. Repeat the flag; elsewhere separate them by spaces.",
        _quotas, "NAMESPACE=BYTES[,BUFFERS]",
    ),
    Setting(
        "coordinator", "token_lifetime", float, 3600.0,
        "With credentials: lifetime of the right to a buffer; clients renew it.", _number, "SECONDS",
    ),
    Setting("coordinator", "log_level", str, "info", _LOG_HELP, _one_of(LOG_LEVELS), "LEVEL"),
    Setting("coordinator", "log_format", str, "text", _FORMAT_HELP, _one_of(("text", "json")), "text|json"),
    Setting(
        "coordinator", "audit_log", str, None,
        "File to which a JSON line is appended for each change: who created, deleted, renamed, drained, moved, freed "
        "or kicked what. Default: the log.",
        metavar="FILE",
    ),
    Setting(
        "memserver", "listen", str, "127.0.0.1:0", "Where clients connect; port 0: a free one.", parse_address,
        "HOST:PORT",
    ),
    Setting(
        "memserver", "control", str, "",
        "Address for the coordinator, and for clients with RDMA. Set it if a firewall must let it through. Default: a "
        "free port of --listen's host.",
        _address_or_none, "HOST:PORT",
    ),
    Setting("memserver", "capacity", str, "1GiB", "Memory to offer, e.g. 512MiB or 64GiB.", parse_bytes, "SIZE"),
    Setting(
        "memserver", "memory_dir", str, private_memory(),
        "Directory on tmpfs or hugetlbfs for the segments, writable only for the server's user. If its name is smb-UID "
        "with the user's number, it is created if missing.",
        metavar="DIR",
    ),
    Setting("memserver", "metrics", str, "127.0.0.1:0", _PAGES_HELP, parse_address, "HOST:PORT"),
    Setting(
        "memserver", "name", str, "",
        "This server's name. Keep it over restarts: segments and clients find the server by its name. Default: "
        "the host's name.",
        metavar="NAME",
    ),
    Setting(
        "memserver", "loops", int, 0, "Threads that serve data, 1 to 64; 0: one per core, at most 8.", _whole, "N"
    ),
    Setting(
        "memserver", "weight", float, 1.0,
        "Share of the traffic of new buffers, relative to the other servers: for example its bandwidth, in one unit "
        "for all servers.",
        _weight, "NUMBER",
    ),
    Setting(
        "memserver", "copy_rate", str, "512MiB",
        "Bytes per second at most for making lost copies (--replicas 2) again; 0: no limit.",
        parse_bytes, "BYTES",
    ),
    Setting(
        "memserver", "zone", str, "",
        "The server's location: its rack or site. Two copies lie in two zones if there is room. Readers and relays "
        "prefer sources in their zone.",
        metavar="NAME",
    ),
    Setting(
        "memserver", "host_name", str, "",
        "The machine: servers with one name of it hold no two copies of a segment if others have room. Default: the "
        "kernel's boot id, which all containers of a machine share.",
        metavar="NAME",
    ),
    Setting(
        "memserver", "advertise", str, "",
        "Host name or address by which clients reach this server. Default: --listen's host; for 0.0.0.0 this host's "
        "address towards the coordinator.",
        metavar="HOST",
    ),
    Setting(
        "memserver", "data_tls", str, "auto",
        "TLS for data on TCP. auto: if there are credentials; off: never, for an isolated network; on: always, and no "
        "RDMA, which does not encrypt.",
        _one_of(("auto", "on", "off")), "auto|on|off",
    ),
    Setting(
        "memserver", "verbs", str, "auto",
        "RDMA. auto: if this host has an active device; off: never.",
        _one_of(("auto", "off")), "auto|off",
    ),
    Setting("memserver", "ready_file", str, None, _READY_HELP.format(" and registered"), metavar="FILE"),
    Setting("memserver", "log_level", str, "info", _LOG_HELP, _one_of(LOG_LEVELS), "LEVEL"),
    Setting("memserver", "log_format", str, "text", _FORMAT_HELP, _one_of(("text", "json")), "text|json"),
    Setting("verbs", "device", str, "", "An RDMA device, as `rdma link` shows it. Default: one with an active port."),
    Setting("verbs", "port", int, None, "Its port. Default: the first that is active.", _whole),
    Setting("verbs", "gid_index", int, None, "Which address of the port. Default: RoCE v2 over IPv4 first.", _whole),
    Setting("verbs", "mtu", int, None, "256 to 4096 bytes. Default: the port's.", _whole),
    Setting("verbs", "service_level", int, 0, "0 to 15; over RoCE the priority.", _whole),
)  # fmt: skip
SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _TABLE}

# The values that `use_file` has put into the environment, by variable.
_put: dict[str, FoundSetting] = {}


def find(name: str) -> FoundSetting | None:
    """Return the current value of a setting such as "client.transport", or None for its default.

    The value is that of its variable, or else of the file that SMB_CONFIG names. An empty variable counts as not set.
    Raises InvalidArgumentError for an invalid value, and for any mistake in the file; the message says where it is.
    """
    setting = SETTINGS[name]
    text = os.environ.get(setting.variable)
    if text:
        put = _put.get(setting.variable)
        found: FoundSetting | None = put if put and put.text == text else FoundSetting(text, setting.variable)
    else:
        path = os.environ.get(CONFIG_VARIABLE)
        found = read_file(Path(path)).get(name) if path else None
    if found:
        _check(setting, found.text, _shown(setting, found))
    return found


def text_of(name: str) -> str | None:
    """Return the current text of a setting, or None for its default. Raises as `find` does."""
    found = find(name)
    return found.text if found else None


def switch_of(name: str) -> bool | None:
    """Return whether a switch is on; None if it is not set. Raises as `find` does."""
    found = find(name)
    return _switch(found.text) if found else None


def variables_of(section: str) -> dict[str, str]:
    """Return the current values of a section, by variable. Raises as `find` does."""
    found = {setting.variable: find(setting.name) for setting in _TABLE if setting.section == section}
    return {variable: value.text for variable, value in found.items() if value}


def file_variables() -> set[str]:
    """Return the variables that the configuration file has set here: SMB_CONFIG, and those that `use_file` set."""
    return {CONFIG_VARIABLE, *_put}


def use_file(path: Path) -> None:
    """Set the variables of the file's settings for this process and its children, unless they are set already, and set
    SMB_CONFIG to the file. The values of a file used before are removed. Raises InvalidArgumentError, naming the line.
    """
    settings = read_file(path)
    for variable, found in _put.items():
        if os.environ.get(variable) == found.text:
            del os.environ[variable]
    _put.clear()
    os.environ[CONFIG_VARIABLE] = str(path.absolute())
    for name, found in settings.items():
        variable = SETTINGS[name].variable
        if not os.environ.get(variable):
            os.environ[variable] = found.text
            _put[variable] = found


def read_file(path: Path) -> dict[str, FoundSetting]:
    """Return the settings in a file, by name. Raises InvalidArgumentError: FILE:LINE, what is wrong, what is
    allowed."""
    try:
        text = read_text(path, SETTINGS_BYTES_MAX)
        tables = parse_toml(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"cannot read the configuration: {error}") from None
    except OSError as error:
        raise InvalidArgumentError(f"cannot read the configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{path}: the file must be UTF-8, as TOML requires") from None
    except ValueError as error:
        if not str(error).endswith(")"):
            raise InvalidArgumentError(f"{path}: {error}") from None
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1  # "(at end of document)"
        what = shortened(re.sub(r"\s*\(at [^)]*\)", "", str(error)))
        raise InvalidArgumentError(f"{path}:{line}: {what}") from None
    lines = _TomlLines(text)
    settings: dict[str, FoundSetting] = {}
    for section, table in tables.items():
        where = f"{path}:{lines.of(section)}"
        if section not in SECTIONS:
            raise InvalidArgumentError(f'{where}: "{shortened(section)}" is not a section; {_known(section, SECTIONS)}')
        if not isinstance(table, dict):
            raise InvalidArgumentError(f"{where}: {section} is a section: write [{section}], and settings below it")
        for key, value in table.items():
            where = f"{path}:{lines.of(section, key)}"
            setting = SETTINGS.get(f"{section}.{key}")
            if setting is None:
                keys = [setting.key for setting in _TABLE if setting.section == section]
                raise InvalidArgumentError(
                    f'{where}: "{shortened(key)}" is not a setting of [{section}]; {_known(key, keys)}'
                )
            settings[setting.name] = FoundSetting(_text(setting, value, where), where)
    return settings


def strangers() -> list[str]:
    """Return the SMB_* variables of the environment that are unknown: they are probably misspelt."""
    known = {setting.variable for setting in _TABLE} | OTHER_VARIABLES
    ours = (variable for variable in os.environ if variable.startswith("SMB_") and not variable.startswith(_JOB))
    return sorted(variable for variable in ours if variable not in known)


def nearest(variable: str) -> str | None:
    """Return the known variable that was probably meant; None if none is similar."""
    import difflib

    return next(iter(difflib.get_close_matches(variable, [setting.variable for setting in _TABLE], 1)), None)


def _text(setting: Setting, value: Any, where: str) -> str:
    """Return the value as the text of a variable."""
    shown = f"{where}: {setting.key} = {quoted(value)}"
    fits = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, (int, float)) and not isinstance(value, bool),
        str: isinstance(value, str) or (setting.metavar == "SIZE" and type(value) is int),
    }
    if not fits[setting.kind]:
        kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}
        raise InvalidArgumentError(f"{shown}: it must be {kinds[setting.kind]}")
    text = str(int(value)) if isinstance(value, bool) else str(value)
    _check(setting, text, shown)
    return text


def _shown(setting: Setting, found: FoundSetting) -> str:
    variable = found.where == setting.variable
    return f"{found.where}={found.text}" if variable else f"{found.where}: {setting.key} = {found.text!r}"


def _check(setting: Setting, text: str, shown: str) -> None:
    try:
        setting.check(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{shown}: {error}") from None


def _known(name: str, names: Iterable[str]) -> str:
    import difflib

    names = list(names)
    close = difflib.get_close_matches(shortened(name), names, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


class _TomlLines:
    """Finds the line of a section or key in a TOML text, because tomllib does not report lines."""

    _HEADER = re.compile(r"\s*\[+\s*[\"']?([\w-]+)[\"']?")
    _KEY = re.compile(r"\s*[\"']?([\w-]+)[\"']?\s*(?:\.\s*[\"']?([\w-]+)[\"']?\s*)?=")

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str, str], int] = {}
        section = ""
        for number, line in enumerate(text.splitlines(), 1):
            if header := self._HEADER.match(line):
                section = header[1]
                self._lines.setdefault((section, ""), number)
            elif key := self._KEY.match(line):
                outer, inner = key[1], key[2] or ""
                name = (section, outer) if section else (outer, inner)
                self._lines.setdefault(name, number)
                self._lines.setdefault((name[0], ""), number)

    def of(self, section: str, key: str = "") -> int:
        return self._lines.get((section, key)) or self._lines.get((section, ""), 1)
