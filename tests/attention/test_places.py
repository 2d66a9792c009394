"""Where rows read and write: what is kept between layers and steps is what each of them would compute."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.making import descriptor
from vericache_core.attention.paged import AttentionJob
from vericache_core.attention.places import lay_out
from vericache_core.cache.pages import PAGE, PagedRows, pages_for

job_facts = st.tuples(st.integers(1, 5), st.lists(st.integers(0, 300), min_size=2, max_size=2), st.sampled_from([None, 1, 7]))


@given(steps=st.lists(st.lists(job_facts, min_size=1, max_size=4), min_size=1, max_size=4))
def test_places_follow_the_jobs_of_each_layer(steps: list[list[tuple[int, list[int], int | None]]]) -> None:
    """Several layers in turn, some of them alike; pages of an earlier one must not be found in a later one."""
    layer = descriptor(heads=6, dtype=torch.bfloat16)
    for step in [*steps, steps[0], *steps]:
        jobs, first = [], 0
        for count, base, window in step:
            pages = PagedRows(layer, torch.device("cpu"))
            jobs.append(AttentionJob(first, count, pages, np.array(base, dtype=np.int64), max(base), window))
            first += count + 1
        at = lay_out(jobs, first + 2, 2)
        assert at.used.tolist() == [job.first + row for job in jobs for row in range(job.count)]
        for job in jobs:
            mine = slice(job.first, job.first + job.count)
            assert np.array_equal(at.limits[mine], job.limits())
            assert np.array_equal(at.starts[mine], job.starts())
            assert job.pages.capacity == pages_for(int(job.base.max()) + job.count) * PAGE
            for row in range(job.first, job.first + job.count):
                found = slice(at.tables[row], at.tables[row] + len(job.pages.key_addresses))
                assert np.array_equal(at.key_pages[found], job.pages.key_addresses)
                assert np.array_equal(at.value_pages[found], job.pages.value_addresses)
        idle = np.setdiff1d(np.arange(first + 2), at.used)
        assert not at.limits[idle].any()
        assert not at.starts[idle].any()
