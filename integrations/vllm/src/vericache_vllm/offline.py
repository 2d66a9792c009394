"""A stock vLLM engine in this process as the verifier, with LMCache as the home of its full KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vericache_core.errors import RemoteError
from vericache_vllm.compat import require_compatible
from vericache_vllm.verdict import VERIFIED, Check, TopTwo, Verdict, judge

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


def verification_params(check: Check, *, use_cache: bool = True) -> SamplingParams:
    """What makes an ordinary request a verification: one greedy token, and two scores for each row of the prompt."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=2 if check.drafts else None,
        skip_reading_prefix_cache=not use_cache,
        extra_args={"kv_transfer_params": {VERIFIED: len(check.verified)}},
    )


def covered(check: Check, output: RequestOutput) -> bool:
    """Whether a cache served the last verified token, so that rows are missing. The connector prevents it; this checks."""
    return bool(check.drafts) and (output.num_cached_tokens or 0) > len(check.verified) - 1


def verdict_of(check: Check, output: RequestOutput, reruns: int = 0) -> Verdict:
    """Read a finished request.

    Raises:
        RemoteError: tokens or rows are missing, or make no sense.
    """
    sent = [*check.verified, *check.drafts]
    if list(output.prompt_token_ids or []) != sent or not output.outputs or len(output.outputs[0].token_ids) != 1:
        raise RemoteError(f"vLLM did not answer a verification of {len(sent)} tokens with one token")
    cached = output.num_cached_tokens or 0
    bonus = output.outputs[0].token_ids[0]
    rows: list[TopTwo] = []
    if check.drafts:
        if output.prompt_logprobs is None or len(output.prompt_logprobs) != len(sent):
            raise RemoteError("vLLM left out the log-probabilities of a verification")
        for scores in output.prompt_logprobs[len(check.verified) :]:
            ranked = sorted((scores or {}).items(), key=lambda item: -item[1].logprob)[:2]
            if len(ranked) != 2:
                raise RemoteError("vLLM left out the log-probabilities of a draft")
            rows.append(((ranked[0][0], ranked[0][1].logprob), (ranked[1][0], ranked[1][1].logprob)))
    return judge(rows, check.drafts, bonus, cached, reruns)


class OfflineVerifier:
    """Verifies with ``llm``.

    Args:
        llm: see :func:`build_llm`.
        salt: isolates cached KV of this verifier's requests from that of others on the same store.
    """

    def __init__(self, llm: LLM, salt: str | None = None) -> None:
        require_compatible("verifier")
        self.llm, self.salt = llm, salt
        self.max_model_len = int(llm.model_config.max_model_len)
        self.vocab_size = int(llm.model_config.get_vocab_size())

    def verify(self, checks: Sequence[Check]) -> list[Verdict]:
        outputs = self._run(checks, use_cache=True)
        again = [number for number, (check, output) in enumerate(zip(checks, outputs, strict=True)) if covered(check, output)]
        for number, output in zip(again, self._run([checks[number] for number in again], use_cache=False), strict=True):
            outputs[number] = output
        return [
            verdict_of(check, output, int(number in again))
            for number, (check, output) in enumerate(zip(checks, outputs, strict=True))
        ]

    def close(self) -> None:
        """End the engine. Do it before its LMCache server ends, or it waits for an answer that nobody gives."""
        self.llm.llm_engine.engine_core.shutdown()

    def _run(self, checks: Sequence[Check], *, use_cache: bool) -> list[RequestOutput]:
        if not checks:
            return []
        prompts: list[Any] = [{"prompt_token_ids": [*check.verified, *check.drafts]} for check in checks]
        for prompt in prompts:
            if self.salt is not None:
                prompt["cache_salt"] = self.salt
        params = [verification_params(check, use_cache=use_cache) for check in checks]
        return list(self.llm.generate(prompts, params, use_tqdm=False))


def build_llm(model: str, kv_server: str | None = None, seconds: float = 10.0, **engine: Any) -> LLM:
    """A vLLM engine whose full KV lives in LMCache.

    Args:
        model: folder or hub id.
        kv_server: ``host:port`` of an LMCache server; ``None`` for an engine without one.
        seconds: longest wait for that server, see :func:`kv_transfer_config`.
        engine: further arguments of ``vllm.LLM``. vLLM's own prefix cache is off unless asked for: device memory then
            holds full KV only while a verification runs.
    """
    require_compatible("verifier")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    settings: dict[str, Any] = {"enable_prefix_caching": False, **engine}
    if kv_server is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**kv_transfer_config(kv_server, seconds))
    return LLM(model=model, **settings)


def kv_transfer_config(kv_server: str, seconds: float = 10.0) -> dict[str, Any]:
    """What ``--kv-transfer-config`` or ``LLM(kv_transfer_config=...)`` is given to use our connector.

    Args:
        kv_server: ``host:port`` of an LMCache server.
        seconds: longest wait for it, and the time between two signs of life; after that KV is recomputed.
    """
    host, _, port = kv_server.rpartition(":")
    extra = {
        "lmcache.mp.host": f"tcp://{host}",
        "lmcache.mp.port": int(port),
        "lmcache.mp.mq_timeout": seconds,
        "lmcache.mp.heartbeat_interval": seconds,
    }
    return {
        "kv_connector": "VeriCacheConnector",
        "kv_connector_module_path": "vericache_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
