"""How many actors and blocks a generate job works with."""

from pathlib import Path

import pytest

from eagle3_ray.generate import Pool, _pool
from eagle3_ray.plan import PartitionPlan, Plan, TargetTokens
from eagle3_ray.sglang.probe import ServerFacts

SERVER = ServerFacts("http://one", "v1", 1_000_000, 256, 4000, 4096, {}, (), ())
PLAN = Plan(
    Path("plan"),
    [PartitionPlan("B1", 1000, 0, 0, 0, 1000, 1000, 100_000, 200)],
    TargetTokens([], "text", [1], [1]),
)
"""1,000 prompts of 100 tokens; with answers of at most 400 tokens a request counts as 200."""


@pytest.mark.parametrize(
    ("servers", "most", "cpus", "pool"),
    [
        (1, 1, 64, Pool(1, 6, 2)),  # 256 requests run; three times as many rows stand in 6 blocks of 2 x 64
        (1, 4, 64, Pool(2, 6, 4)),  # ready for four servers: 1,024 requests, 512 to an actor, 2 x 6 x 4 x 64 rows
        (4, 4, 64, Pool(2, 6, 4)),
        (1, 64, 64, Pool(8, 6, 4)),  # no more than max_in_flight
        (1, 4, 1, Pool(2, 6, 4)),
        (1, 64, 1, Pool(2, 12, 8)),  # half of a CPU is left to the tasks that read and write
    ],
)
def test_a_pool_is_large_enough_for_the_servers_that_may_come(servers: int, most: int, cpus: float, pool: Pool) -> None:
    assert _pool(4096, 400, [SERVER] * servers, most, PLAN, cpus) == pool
