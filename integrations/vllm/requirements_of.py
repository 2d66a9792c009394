# ruff: noqa: INP001 (a script, not a package)
"""Print what a wheel requires, less some packages: ``python requirements_of.py WHEEL [NAME-OR-PREFIX* ...]``.

The CPU build of vLLM pins torch's ``+cpu`` local version and asks for torchvision, torchaudio and torchcodec, which text
models do not need; installing it without dependencies and the rest by this list leaves the installed torch alone.
"""

from __future__ import annotations

import fnmatch
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement


def requirements(wheel: Path, without: list[str]) -> list[str]:
    """``Requires-Dist`` of ``wheel`` that hold without extras, except names that match a pattern of ``without``."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = HeaderParser().parsestr(archive.read(metadata).decode())
    found = []
    for line in message.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not any(fnmatch.fnmatch(requirement.name.lower(), pattern) for pattern in without):
            requirement.marker = None
            found.append(str(requirement))
    return found


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in requirements(Path(sys.argv[1]), sys.argv[2:])))
