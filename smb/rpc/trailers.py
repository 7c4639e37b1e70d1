"""The metadata that comes with an error of the coordinator."""

from __future__ import annotations

from typing import Any

# Metadata with each error that the coordinator itself answers. Without it, "unavailable" means that nothing answered.
ANSWERED = "smb-answered"
# Metadata with the outcome of the call: smb.Error.outcome.
OUTCOME = "smb-outcome"
# Metadata of an error from a coordinator that does not lead.
STANDBY = "smb-standby"
# Metadata of an error from a coordinator with too many calls in progress, which has not carried out this one.
BUSY = "smb-busy"


def trailers_of(error: Any) -> dict[str, str]:
    """Return the metadata that came with an error."""
    return dict(error.trailing_metadata() or ())
