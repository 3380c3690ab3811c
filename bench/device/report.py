"""What a section says: one line per figure, written as it is known, so that a section that dies leaves what it had."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MARK = "@line "  # before a line's JSON on a section's standard output; everything else there is talk
MET, MISSED = "met", "missed"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One figure.

    Attributes:
        what: Of what.
        value: What was measured; None where it could not be, and `note` says why.
        unit: Of `value`, `ceiling` and `bar`. Times are better when they are less, everything else when it is more.
        ceiling: What the machine can do at best, measured in the same run; None where nothing bounds it.
        bar: What is to be reached; None where nothing was promised.
        note: How it was measured, where that is not plain.
    """

    what: str
    value: float | None
    unit: str
    ceiling: float | None = None
    bar: float | None = None
    note: str = ""

    @property
    def less_is_better(self) -> bool:
        return self.unit in ("s", "ms", "us", "mismatches", "failed")

    @property
    def share(self) -> float | None:
        """How near to the ceiling; where there is none, how much of the bar."""
        if self.value is None:
            return None
        if self.ceiling is not None:
            over, under = (self.ceiling, self.value) if self.less_is_better else (self.value, self.ceiling)
            return over / under if under else None
        return self.value / self.bar if self.bar else None

    @property
    def verdict(self) -> str:
        if self.bar is None or self.value is None:
            return ""
        return MET if (self.value <= self.bar if self.less_is_better else self.value >= self.bar) else MISSED

    def as_data(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share, "verdict": self.verdict}


def say(line: Line) -> None:
    """Hand a line to whoever runs this section."""
    print(MARK + json.dumps(asdict(line)), flush=True)


def heard(text: str) -> Line | None:
    """The line that a section has said, if this is one."""
    return Line(**json.loads(text[len(MARK) :])) if text.startswith(MARK) else None


def attempt(what: str, measure: Callable[..., Iterable[Line] | None], *arguments: object) -> None:
    """Say the lines of one measurement; one that fails says so, and costs no other its turn."""
    try:
        for line in measure(*arguments) or ():
            say(line)
    except Exception as error:  # noqa: BLE001 - whatever it was, the traceback is there and the others go on
        traceback.print_exc()
        reason = str(error).splitlines()[0] if str(error) else ""
        say(Line(what=what, value=None, unit="", note=f"{type(error).__name__}: {reason}"[:300]))


def table(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """All sections as text. `sections`: name -> {"state", "reason", "seconds", "lines": [Line.as_data()]}."""
    rows = [("", "measured", "ceiling", "share", "bar", "")]
    for name, section in sections.items():
        told = f"{section['state']} in {section['seconds']:.0f} s" if section["seconds"] else section["state"]
        rows.append((f"-- {name}: {told}" + (f", {section['reason']}" if section["reason"] else ""), *[""] * 5))
        rows += [_row(data) for data in section["lines"]]
    widths = [max((len(row[i]) for row in rows if row[1] or not i), default=0) for i in range(6)]
    widths[0] = max((len(row[0]) for row in rows if row[1]), default=0)
    return "\n".join(_joined(row, widths) for row in rows)


def _joined(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell.rjust(width) for cell, width in zip(row[1:5], widths[1:5], strict=True)]
    return "  ".join((row[0].ljust(widths[0]), *cells, row[5])).rstrip()


def _row(data: Mapping[str, Any]) -> tuple[str, ...]:
    unit = data["unit"]
    if data["value"] is None:
        return data["what"], "none", "", "", "", data["note"]
    share = "" if data["share"] is None else f"{100 * data['share']:.0f} %"
    told = " ".join(filter(None, (data["verdict"], data["note"])))
    return data["what"], f"{_number(data['value'])} {unit}", _number(data["ceiling"]), share, _number(data["bar"]), told


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def talk(*words: object) -> None:
    """For whoever watches."""
    print(*words, file=sys.stderr, flush=True)
