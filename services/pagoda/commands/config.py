"""`pagoda config show | validate | schema`: the settings of `pagoda serve`, and where each comes from."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table

from pagoda.commands import serve
from pagoda.settings.flags import add_model_argument, add_options, given_flags
from pagoda.settings.resolving import json_schema, origins, resolve

# Tiers whose settings may be in the same file.
TIERS = ("gateway", "engine-core", "worker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print every value and its source", allow_abbrev=False)
    show.add_argument("--json", action="store_true", dest="as_json", help="as JSON")
    validate = actions.add_parser("validate", help="check all sources, of serve and of all tiers", allow_abbrev=False)
    for sub in (show, validate):
        add_model_argument(sub)
        add_options(sub, "serve")
    actions.add_parser("schema", help="JSON Schema of the settings file", allow_abbrev=False)


def main(arguments: argparse.Namespace) -> int:
    if arguments.action == "schema":
        print(json.dumps(json_schema(), indent=2))
        return 0
    flags = given_flags(arguments, "serve")
    settings = resolve("serve", flags)
    if arguments.action == "show":
        rows = list(origins(settings))
        if arguments.as_json:
            print(json.dumps(rows, indent=2))
        else:
            table = Table("section", "option", "value", "source", box=None)
            for row in rows:
                table.add_row(row["section"], row["option"], json.dumps(row["value"]), row["source"])
            Console().print(table)
    else:
        for tier in TIERS:
            resolve(tier, flags, complete=False)
        serve.check(settings)
    return 0
