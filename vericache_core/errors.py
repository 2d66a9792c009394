"""One family of errors: each says what is wrong, why, and what to do about it.

A command line maps ``exit_code`` to the process status: 2 for a request that could never have worked
(usage), 1 for a failure while doing something reasonable.
"""

from __future__ import annotations


class VeriCacheError(Exception):
    """Base of every error that VeriCache raises on purpose.

    ``str(error)`` is one line: the message, then the cause and the hint where they are known.
    """

    exit_code = 1

    def __init__(self, message: str, *, cause: str | None = None, hint: str | None = None) -> None:
        self.message, self.cause, self.hint = message, cause, hint
        super().__init__(message)

    def __str__(self) -> str:
        text = self.message
        if self.cause:
            text += f" ({self.cause})"
        if self.hint:
            text += f"; hint: {self.hint}"
        return text


def describe(error: BaseException) -> str:
    """Somebody else's exception in one line, for a log or as a cause."""
    return f"{type(error).__name__}: {error}"


class UsageError(VeriCacheError):
    """The request itself is wrong; nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value is unknown, out of range, or in conflict with another."""


class OptionError(UsageError):
    """A compressor option is unknown or has a bad value."""


class UnknownCompressorError(UsageError):
    """No installed plugin carries this compressor name."""


class PromptError(UsageError):
    """A prompt is empty, too long for the model, or of the wrong type."""


class UnsupportedModelError(UsageError):
    """The model has something that cannot be run exactly; the message names it."""


class MissingDependencyError(UsageError):
    """An optional dependency that this request needs is not installed."""


class ConformanceRequiredError(UsageError):
    """``require_conformant`` is set and the compressor holds no valid conformance passport."""


class PluginLoadError(VeriCacheError):
    """An installed plugin could not be imported or did not describe itself properly."""


class PluginConflictError(VeriCacheError):
    """Two installed distributions claim the same compressor name."""


class ApiVersionError(VeriCacheError):
    """A plugin was written for an API version that this core does not speak."""


class IdentityError(VeriCacheError):
    """The row-invariance probe failed, so ``identity="bitwise"`` cannot be promised here."""


class CompressorFault(VeriCacheError):
    """A compressor raised, or returned something that breaks the contract."""


class PayloadError(VeriCacheError):
    """Serialized KV is truncated, corrupt, of another version, or not ours."""


class SwapError(VeriCacheError):
    """Full KV could not be written to or read back from its tier."""


class StoreError(VeriCacheError):
    """A prefix store could not do what was asked; the caller goes on without it."""


class StoreTimeout(StoreError):
    """A prefix store did not answer before the deadline; a late answer is discarded."""


class StoreUnusable(StoreError):
    """A prefix store cannot be used the way it is set up, and waiting does not help."""


class StoreFull(StoreError):
    """A prefix store has no room for a blob, even after evicting what it may."""


class RemoteError(VeriCacheError):
    """The other side of a link refused, broke off or answered with something that makes no sense."""


class RemoteRefused(RemoteError):
    """The other side works and says no: to who asks, to what was asked for, or to asking for more."""


class NonFiniteError(VeriCacheError):
    """The model produced NaN (or only -inf) where a token had to be chosen."""
