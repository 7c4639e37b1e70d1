"""The room of the dashboard: the coordinator's page at / and its JSON, which `smb top` (smb/tools/cli/top.py) draws in
a terminal. It reads the coordinator's state and what it receives by smb.coordinator.dashboard_interface; it decides
nothing. `leader` makes it, and no other module of the coordinator imports it.

`history`, `states` and `trainings` keep observations, `diagnosis` finds problems, `overview` makes the one view model
of all that, and `server` serves the view model and the page.
"""
