"""The room of mirrors: who fills which mirror of a published state from whom. It uses the coordinator's records and
state, and writes nothing that is stored. `leader` makes its `Mirrors`, which the service asks by its methods; no other
module imports the room.

`filling` keeps what relays report and gives them their plans, `plans` says which plan holds for which versions, `trees`
and `tree_packing` compute one (pure), `link_rates` learns how fast servers' links are. The processes that carry a plan
out are smb/relay.
"""
