"""The store audits a share of the answers that its drafters got: a twin decodes them again beside the sessions."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.remote.stores import drafter, plain, prompts, same, store, store_engine
from tests.stores_net.servers import eventually
from vericache_core.runtime.choose import Choice
from vericache_core.runtime.request import Request
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.service.audit import IdentityAudit

PARAMS = SamplingParams(max_new_tokens=16)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_store_audits_beside_its_sessions(wrong: bool, tmp_path: Path) -> None:
    engine = store_engine(audit_every=1, prefix_store=f"file://{tmp_path}?chunk=128&timeout=60")
    audit = engine.audit
    assert audit is not None
    twins: list[int] = []
    twin, commit = IdentityAudit.twin, Request.commit

    def noted(self: IdentityAudit, ids: list[int], params: SamplingParams) -> Request | None:
        made = twin(self, ids, params)
        if made is not None:
            twins.append(made.number)
        return made

    def changed(self: Request, choice: Choice, logits: Tensor) -> None:
        commit(self, Choice(choice.token ^ 1, choice.margin) if wrong and self.number in twins else choice, logits)

    with (
        patch.object(IdentityAudit, "twin", noted),
        patch.object(Request, "commit", changed),
        store(tmp_path, engine) as server,
        drafter(tmp_path, server.port, compressor="random", keep=0.4) as ours,
    ):
        for number in range(3):
            same(ours.generate(prompts(number + 1)[-1:], PARAMS), plain(prompts(number + 1)[-1:], PARAMS))
            eventually(lambda: audit.audited == number + 1)  # noqa: B023 (called at once)
    assert audit.mismatches == (3 if wrong else 0)
    assert engine.reuse is not None
    assert engine.reuse.counts[""].chunks_saved == 0  # a twin neither takes from the prefix store nor gives to it


def test_what_nobody_drafted_is_not_audited(tmp_path: Path) -> None:
    engine = store_engine(audit_every=1)
    assert engine.audit is not None
    with store(tmp_path, engine) as server, drafter(tmp_path, server.port, remote_mode="remote") as ours:
        same(ours.generate(prompts(2), PARAMS), plain(prompts(2), PARAMS))
    assert engine.audit.audited == 0
