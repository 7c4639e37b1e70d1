"""The options of `smb coordinator`, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from smb.config.parse import parse_address
from smb.config.quotas import Quota
from smb.coordinator.idle_names import IDLE_S, IDLE_S_MAX, IDLE_S_MIN
from smb.coordinator.state import SESSION_LEASE_S
from smb.coordinator.token_issuer import LIFETIME_S
from smb.errors import InvalidArgumentError
from smb.security.credentials import Credentials, check_exposure

ETCD = "etcd://"  # what --state begins with where the records are in etcd
LEADER_LEASE_S = 8  # with 3 s an election within etcd itself, of 1 to 3 s, cost the coordinator its lead
LEADER_LEASE_S_MIN, LEADER_LEASE_S_MAX = 2, 600
SESSION_LEASE_S_MIN, SESSION_LEASE_S_MAX = 1.0, 86_400.0  # below, a client on a busy host loses it; above, it is none


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """The options of `smb coordinator`."""

    listen: str
    state: str
    metrics: str
    ready_file: Path | None = None
    session_lease_s: float = SESSION_LEASE_S
    stripe_bytes: int = 0
    checksum: bool = False
    credentials: Credentials | None = None
    insecure: bool = False
    metrics_token_file: Path | None = None
    token_lifetime_s: float = LIFETIME_S
    idle_names_s: float | None = None  # IDLE_S, or the lease where that is longer
    quotas: Mapping[str, Quota] = field(default_factory=dict)  # by namespace
    etcd_credentials: Path | None = None
    leader_lease_s: int = LEADER_LEASE_S

    @property
    def idle_s(self) -> float:
        """How long a name must not have been used."""
        return max(IDLE_S, self.session_lease_s) if self.idle_names_s is None else self.idle_names_s

    def check(self) -> None:
        """Raise InvalidArgumentError for what cannot be."""
        check_exposure("a coordinator", parse_address(self.listen)[0], self.credentials, self.insecure)
        lease_s, idle_s = self.session_lease_s, self.idle_s
        if not SESSION_LEASE_S_MIN <= lease_s <= SESSION_LEASE_S_MAX:
            raise InvalidArgumentError(
                f"--session-lease {lease_s:g}: use {SESSION_LEASE_S_MIN:g} to {SESSION_LEASE_S_MAX:g} seconds"
            )
        if not IDLE_S_MIN <= idle_s <= IDLE_S_MAX:
            raise InvalidArgumentError(f"--idle-names {idle_s:g}: use {IDLE_S_MIN:g} to {IDLE_S_MAX:g} seconds")
        if idle_s < lease_s:
            raise InvalidArgumentError(
                f"--idle-names {idle_s:g}: use at least --session-lease, {lease_s:g} seconds: "
                f"a client that is away for less comes back to its locks and barriers"
            )
        if not LEADER_LEASE_S_MIN <= self.leader_lease_s <= LEADER_LEASE_S_MAX:
            raise InvalidArgumentError(
                f"--leader-lease {self.leader_lease_s}: use {LEADER_LEASE_S_MIN} to {LEADER_LEASE_S_MAX} seconds, "
                f"less than 8 only where etcd's own elections are quicker"
            )
