"""`smb config`: the settings in force, and the source of each."""

from __future__ import annotations

from typing import Annotated

import typer

from smb.errors import InvalidArgumentError
from smb.tools.cli.options import Json
from smb.tools.cli.output import console, print_error, print_json, table


def config(
    section: Annotated[
        str,
        typer.Option(
            "--section",
            metavar="NAME",
            help="Only cluster, client, coordinator, memserver or verbs.",
            show_default=False,
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Show all settings: their values here, and where each comes from.

    A value comes from a variable, from a line of the file that --config or SMB_CONFIG names, or is the default. Exit
    code 1 if a value is bad, or a variable looks like a misspelt setting.

    Example: smb config --section memserver
    """
    from smb.config.settings import SECTIONS, SETTINGS, find, nearest, strangers

    if section and section not in SECTIONS:
        raise typer.BadParameter(f"unknown section {section!r}; known are {', '.join(SECTIONS)}")
    wrong = []
    shown = []
    for setting in SETTINGS.values():
        if section not in ("", setting.section):
            continue
        try:
            found = find(setting.name)
        except InvalidArgumentError as error:
            wrong.append(str(error))
            continue
        entry = {"section": setting.section, "key": setting.key, "flag": setting.flag, "variable": setting.variable}
        value = found.text if found else setting.default
        shown.append(entry | {"value": value, "from": found.where if found else "default"})
    for variable in strangers():
        meant = nearest(variable)
        wrong.append(f"{variable} is set but is not a setting" + (f"; did you mean {meant}?" if meant else ""))
    if as_json:
        print_json({"settings": shown, "wrong": wrong})
    else:
        rows = table("SETTING", "VALUE", "FROM", "FLAG", "VARIABLE")
        for entry in shown:
            value = "-" if entry["value"] in (None, "") else str(entry["value"])
            rows.add_row(
                f"{entry['section']}.{entry['key']}", value, entry["from"], entry["flag"] or "-", entry["variable"]
            )
        console().print(rows)
    for message in wrong:
        print_error(message)
    if wrong:
        raise typer.Exit(1)
