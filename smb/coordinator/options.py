"""The options of `smb coordinator`, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from smb.config.parse import parse_address
from smb.config.quotas import Quota
from smb.coordinator.idle_names import IDLE_S, IDLE_S_MAX, IDLE_S_MIN
from smb.coordinator.state import SERVER_LEASE_S, SESSION_LEASE_S
from smb.coordinator.token_issuer import LIFETIME_S
from smb.errors import InvalidArgumentError
from smb.security.credentials import Credentials, check_exposure

ETCD = "etcd://"  # prefix of --state if the records are in etcd
BALANCE_AFTER_S = 20.0  # during a rolling restart roles change anyway
BALANCE_AFTER_S_MAX = 86_400.0
LEADER_LEASE_S = 8  # with 3 s, an election within etcd itself, which takes 1 to 3 s, cost the coordinator its lead
LEADER_LEASE_S_MIN, LEADER_LEASE_S_MAX = 2, 600
SERVER_LEASE_S_MIN, SERVER_LEASE_S_MAX = 2.0, 600.0  # as for sessions; no data is lost by a longer one, but time
SESSION_LEASE_S_MIN, SESSION_LEASE_S_MAX = 1.0, 86_400.0  # a busy host misses shorter ones; longer ones never end


@dataclass(frozen=True, slots=True)
class OwnPorts:
    """The ports beside the one for all, at the same host; 0: there is none."""

    servers: int = 0  # that only memory servers and operators use
    sessions: int = 0  # for renewals of clients' sessions and tokens


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    listen: str
    state: str
    metrics: str
    ready_file: Path | None = None
    session_lease_s: float = SESSION_LEASE_S
    server_lease_s: float = SERVER_LEASE_S
    stripe_bytes: int = 0
    checksum: bool = False
    credentials: Credentials | None = None
    insecure: bool = False
    metrics_token_file: Path | None = None
    token_lifetime_s: float = LIFETIME_S
    idle_names_s: float | None = None  # None: IDLE_S, or the session lease if that is longer
    balance_after_s: float = BALANCE_AFTER_S  # 0: never
    quotas: Mapping[str, Quota] = field(default_factory=dict)  # by namespace
    etcd_credentials: Path | None = None
    leader_lease_s: int = LEADER_LEASE_S
    servers: str | None = None  # where memory servers renew; None: a free port of the host of `listen`
    sessions: str | None = None  # where clients renew, with credentials; None: likewise

    @property
    def idle_s(self) -> float:
        """How long a name must have been unused before it is freed, in seconds."""
        return max(IDLE_S, self.session_lease_s) if self.idle_names_s is None else self.idle_names_s

    def check(self) -> None:
        """Raise InvalidArgumentError for values out of range or without credentials where these are required."""
        for address in (self.listen, self.servers, self.sessions):
            if address is not None:
                check_exposure("a coordinator", parse_address(address)[0], self.credentials, self.insecure)
        lease_s, idle_s = self.session_lease_s, self.idle_s
        if not SESSION_LEASE_S_MIN <= lease_s <= SESSION_LEASE_S_MAX:
            raise InvalidArgumentError(
                f"--session-lease must be from {SESSION_LEASE_S_MIN:g} to {SESSION_LEASE_S_MAX:g} seconds, "
                f"not {lease_s:g}"
            )
        if not SERVER_LEASE_S_MIN <= self.server_lease_s <= SERVER_LEASE_S_MAX:
            raise InvalidArgumentError(
                f"--server-lease must be from {SERVER_LEASE_S_MIN:g} to {SERVER_LEASE_S_MAX:g} seconds, not "
                f"{self.server_lease_s:g}"
            )
        if not IDLE_S_MIN <= idle_s <= IDLE_S_MAX:
            raise InvalidArgumentError(
                f"--idle-names must be from {IDLE_S_MIN:g} to {IDLE_S_MAX:g} seconds, not {idle_s:g}"
            )
        if not 0 <= self.balance_after_s <= BALANCE_AFTER_S_MAX:
            raise InvalidArgumentError(
                f"--balance-after must be from 0 to {BALANCE_AFTER_S_MAX:g} seconds, not {self.balance_after_s:g}"
            )
        if idle_s < lease_s:
            raise InvalidArgumentError(
                f"--idle-names must be at least --session-lease ({lease_s:g} seconds), not {idle_s:g}: "
                f"a client that is away for less comes back to its locks and barriers"
            )
        if not LEADER_LEASE_S_MIN <= self.leader_lease_s <= LEADER_LEASE_S_MAX:
            raise InvalidArgumentError(
                f"--leader-lease must be from {LEADER_LEASE_S_MIN} to {LEADER_LEASE_S_MAX} seconds, not "
                f"{self.leader_lease_s}; use less than 8 only if etcd's own elections are quicker"
            )
