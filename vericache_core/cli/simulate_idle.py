"""Flags of ``vericache simulate`` that would do nothing beside others."""

from __future__ import annotations

from typing import Final

from vericache_core.cli.idle import IdleFlags

_OF_SWAPS: Final = ("swap", "ring", "background", "tier", "host_memory")
_OF_THE_FLEET: Final = ("slow_link", "fast_link", "latency", "sharing", "scatter", "paths", "expanded")
_OF_A_RUN: Final = (
    *("devices", "count", "kv_memory", "host_memory", "hazard", "hazard_turn", "swap", "background", "window", "mode"),
    *("scheduler", "tier", "requests", "rate", "prompt_tokens", "new_tokens", "trace", "prefill", "seed", "search_windows"),
    *("drafters", "proposer", "proposal_share", "proposal_hazard"),
)
_OF_A_PROPOSER: Final = ("proposal_share", "proposal_hazard")
IDLE: Final = (
    IdleFlags(_OF_A_RUN, lambda args: args.compare, "--compare simulates what its file says was measured"),
    IdleFlags(_OF_THE_FLEET, lambda args: args.drafters is None, "it is of the remote scenario, which --drafters asks for"),
    IdleFlags(
        ("mode", "scheduler", "tier", "ring", "background", "host_memory", "prefill", "hazard_turn", "search_windows"),
        lambda args: args.drafters is not None,
        "the remote scenario, which --drafters asks for, has none of it",
    ),
    IdleFlags(
        ("proposer",), lambda args: args.drafters is not None, "the remote scenario, which --drafters asks for, has none"
    ),
    IdleFlags(_OF_A_PROPOSER, lambda args: args.proposer == "none", "it says how good a --proposer is"),
    IdleFlags(("scatter",), lambda args: args.sharing == 1, "no two requests have one prompt"),
    IdleFlags(
        ("count",),
        lambda args: args.calibration is not None and args.kv_memory is not None,
        "--calibration has the costs and --kv-memory the room",
    ),
    IdleFlags(("keep", "hazard", "hazard_turn", *_OF_SWAPS), lambda args: args.mode == "plain", "--mode plain drafts nothing"),
    IdleFlags(_OF_SWAPS, lambda args: args.mode == "pinned", "--mode pinned swaps nothing"),
    IdleFlags(("background",), lambda args: args.scheduler == "lockstep", "--scheduler lockstep verifies all together"),
    IdleFlags(("background",), lambda args: not args.ring, "without --ring the whole cache comes ahead of the verify"),
    IdleFlags(("host_memory",), lambda args: args.tier == "disk", "--tier disk keeps full KV in files"),
    IdleFlags(("hazard_turn",), lambda args: "/" not in args.hazard, "--hazard has no slash, so it never changes"),
)
