"""Answers to look-ups while training goes on: a copy of the weights that follows what a run publishes.

with Replica("s3://bucket/published") as replica:
    vectors = replica.lookup("user", [3, 1, 4])
"""

from regrow.serving.replica import Replica

__all__ = ["Replica"]
