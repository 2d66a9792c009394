"""vLLM's door to LMCache as the home of the full KV, for verification requests.

A verification needs logits from its last verified token on. vLLM computes none for tokens whose KV comes from a cache,
and returns memory that nobody wrote in their place. So a request that says how many of its tokens are verified gets at
most ``verified - 1`` of them from LMCache: the lookup itself is cut short, because LMCache loads all that a lookup found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from vericache_vllm.compat import require_compatible
from vericache_vllm.verdict import VERIFIED

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class VeriCacheConnector(LMCacheMPConnector):
    """LMCache's connector that never serves the last verified token of a request, nor anything after it.

    Requests without ``kv_transfer_params["vericache_verified"]`` are served as ever.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None) -> None:
        require_compatible("connector")
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._servable: dict[str, int] = {}
            self._submit = self.scheduler_adapter.maybe_submit_lookup_request
            self.scheduler_adapter.maybe_submit_lookup_request = self._submit_cut

    def _submit_cut(self, request_id: str, token_ids: list[int], **facts: Any) -> None:
        self._submit(request_id, token_ids=token_ids[: self._servable.get(request_id)], **facts)

    def _note(self, request: Request) -> None:
        verified = (request.kv_transfer_params or {}).get(VERIFIED)
        if request.skip_reading_prefix_cache:
            # vLLM will not use what is found, and so never give back the locks that finding takes.
            self._servable[request.request_id] = 0
        elif verified is not None:
            self._servable[request.request_id] = max(0, int(verified) - 1)

    def on_new_request(self, request: Request) -> None:
        if self.role == KVConnectorRole.SCHEDULER:
            self._note(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._note(request)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._servable.pop(request.request_id, None)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return answer
