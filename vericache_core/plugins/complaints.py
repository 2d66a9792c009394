"""What a user is told when a name leads to no compressor, or to several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vericache_core.errors import PluginConflictError, UnknownCompressorError
from vericache_core.plugins.discovery import Candidate
from vericache_core.plugins.fields import did_you_mean
from vericache_core.plugins.spec import is_valid_name


def unknown_compressor(name: str, usable: Sequence[str], disabled: Mapping[str, str]) -> UnknownCompressorError:
    """Return the error for a name that cannot be used; ``disabled`` maps names that are switched off to the reason."""
    if name in disabled:
        return UnknownCompressorError(f"compressor {name!r} is installed but disabled", cause=disabled[name])
    near = did_you_mean(str(name), usable)
    hints = [f"did you mean {near!r}?"] if near else []
    hints.append(f"installed: {', '.join(usable) or 'none'}")
    if disabled:
        hints.append(f"disabled: {', '.join(sorted(disabled))}")
    if is_valid_name(name):
        # "try", because whether such a package exists is not known here.
        hints.append(f"try: pip install vericache-compressor-{name}")
    return UnknownCompressorError(f"unknown compressor {name!r}", hint="; ".join(hints))


def conflict(name: str, claims: Sequence[Candidate]) -> PluginConflictError:
    """Return the error for a name that several distributions claim, with the way out."""
    titles = " and ".join(sorted(claim.title for claim in claims))
    return PluginConflictError(
        f"compressor name {name!r} is claimed by {titles}",
        hint="uninstall one, or disable it by the name of its distribution: [plugins] disable = [...]",
    )
