"""The room of the dashboard: the coordinator's page at / and its JSON, which `smb top` (smb/tools/cli/top.py) draws in
a terminal. It reads the coordinator's state and what it is told by smb.coordinator.dashboard_interface, and nothing is
decided by it. `leader` makes it; no other module of the coordinator imports it.

`history`, `states` and `trainings` keep what was seen, `diagnosis` says what is wrong, `overview` makes the one view
model of it, `server` serves that and the page.
"""
