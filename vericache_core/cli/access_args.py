"""Arguments of commands that others call over a network: who may come, and TLS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_core.errors import UsageError

if TYPE_CHECKING:
    import argparse


def add_access_arguments(access: argparse._ArgumentGroup, insecure: str, whose: str = "") -> None:
    """Declare tokens and TLS.

    Args:
        access: the group that they go into.
        insecure: help of ``--insecure``.
        whose: behind the help of ``--tls-cert``.
    """
    access.add_argument("--token-file", metavar="FILE", help="lines TENANT:TOKEN or TOKEN; one tenant sees nothing of another")
    access.add_argument("--tls-cert", metavar="FILE", help=f"PEM certificate{whose}")
    access.add_argument("--tls-key", metavar="FILE", help="PEM key of the certificate")
    access.add_argument("--plaintext", action="store_true", help="no TLS beyond this machine: something else guards the link")
    access.add_argument("--insecure", action="store_true", help=insecure)


def check_pair(args: argparse.Namespace) -> None:
    """UsageError where a certificate or its key is missing."""
    if (args.tls_cert is None) != (args.tls_key is None):
        raise UsageError("--tls-cert and --tls-key go together")


def check_tls(args: argparse.Namespace, near: bool, behind: str) -> None:
    """UsageError where others could listen in, unless ``near``, and nobody said that something guards the link: ``behind``."""
    if not near and args.tls_cert is None and not args.plaintext:
        raise UsageError(f"{args.listen} without TLS", hint=f"--tls-cert and --tls-key, or --plaintext behind {behind}")
