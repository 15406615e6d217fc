"""Goal: a job that cannot be is refused at once, with the reason; not as a cluster that is never ready.

Method: real servers. Nothing is timed: what waits for the ten minutes that a cluster may take to be ready fails by the
time that a test has.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers import job, table

from regrow.errors import ConnectionLost, UserError
from regrow.launch.cluster import LocalCluster

pytestmark = pytest.mark.live


def test_jobs_that_cannot_be() -> None:
    unknown: Any = "adamw"
    odd: Any = "many"
    with LocalCluster(servers=2) as cluster:
        with pytest.raises(UserError, match="this job cannot be declared: Invalid enum value 'adamw'"):
            cluster.client(job(table(kind=unknown), servers=2))
        with pytest.raises(UserError, match="this job cannot be declared: Expected `int`, got `str`"):
            cluster.client(job(table(rows=odd), servers=2))
        with pytest.raises(UserError, match="this job cannot be declared: table 't0': rows must be between 1 and "):
            cluster.client(job(table(rows=0), servers=2))
        with pytest.raises(ConnectionLost, match="the job is for 3 servers, this cluster has 2"):
            cluster.client(job(servers=3))
        assert cluster.client(job(servers=2), worker=0).records(0, 0, 1).shape == (1, 2)
