"""Goal: a paged store does to rows what every other store does, bit for bit, though each of them was on disk between
any two calls.

Method: the tests of the other stores, as they are, for the parts that a paged store has; each test is either listed
here, or listed as one of parities, of rows that come back, or of priorities, which it has not.
"""

from __future__ import annotations

import pytest
import test_conformance
import test_conformance_captures
from fetching import FetchingStore, HoldingStore
from test_conformance import (  # noqa: F401
    test_every_optimizer_updates_as_its_twin,
    test_gather_gives_weights_also_twice,
    test_of_a_row_assigned_twice_the_first_counts,
    test_only_rows_never_touched_are_assigned,
    test_pushes_are_summed_in_the_order_of_the_list,
    test_records_are_read_and_written_in_pieces,
    test_rows_begin_with_values_that_follow_from_the_seed,
    test_touched_rows_are_those_that_changed,
)
from test_conformance_captures import (  # noqa: F401
    test_a_capture_has_what_changed_or_all_that_ever_did,
    test_captured_rows_load_anywhere,
    test_chunks_keep_to_their_size,
    test_every_change_is_one,
    test_holes_are_taken_and_left_out,
    test_rows_that_are_aside_can_go_first,
    test_there_is_room_for_some_tenants,
    test_two_tenants_get_their_own_rows,
    test_values_are_those_of_the_instant,
    test_what_was_not_durable_is_dirty_again,
    test_what_was_taken_does_not_change,
)

pytestmark = pytest.mark.parametrize("build", [FetchingStore, HoldingStore], ids=["Tiered", "TieredWhole"])

NOT_OURS = {
    "test_sizes": "parities take room",
    "test_memory_is_the_callers_again": "flushes",
    "test_rows_are_loaded_where_they_live": "pending rows",
    "test_changes_are_flushed_group_by_group": "flushes",
    "test_pending_rows_are_counted": "pending rows",
    "test_touched_rows_of_a_group_are_found_in_pieces": "groups",
    "test_a_wrong_call_changes_nothing": "calls of every part",
    "test_a_wrong_call_changes_nothing_at_a_store_that_comes_back": "rows that come back",
    "test_another_ring_is_refused": "parities",
    "test_steps_matter_only_to_those_who_count_them": "pending rows",
    "test_rows_that_come_back_are_dirty": "rows that come back",
}


def test_every_test_is_here_or_not_ours(build: object) -> None:
    for module in (test_conformance, test_conformance_captures):
        names = {name for name in vars(module) if name.startswith("test_")}
        assert names - set(globals()) <= set(NOT_OURS)
