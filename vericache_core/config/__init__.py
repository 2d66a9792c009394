"""The engine's configuration: its settings, the layers they come from, and what does not go together."""

from vericache_core.config.conflicts import without_effect
from vericache_core.config.files import config_schema, read_file
from vericache_core.config.layers import CONTROLS, ENV_PREFIX, ResolvedConfig, load_config, read_env, resolve_config
from vericache_core.config.settings import EngineConfig, replace

__all__ = [
    "CONTROLS",
    "ENV_PREFIX",
    "EngineConfig",
    "ResolvedConfig",
    "config_schema",
    "load_config",
    "read_env",
    "read_file",
    "replace",
    "resolve_config",
    "without_effect",
]
