"""Faults that the simulation has found: what was seen, why, and what keeps them from coming back.

A seed is a history only as long as dice and rules are thrown in the same order. So each row also
names the test at the lowest level that shows the fault without any dice; the seeds run on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Regression:
    """One fault. `invariant` is by what it was noticed."""

    seed: int
    invariant: str
    symptom: str
    cause: str
    kept_by: str
    """File and test, below tests/."""


REGRESSIONS: Final = (
    Regression(
        0, "I20", "a put ended up to a second after its deadline",
        "pulls took all the time left; giving plans up and the last probe came on top",
        "unit/test_kvstore_client_writes.py::test_a_put_among_the_dead_ends_by_its_deadline",
    ),
    Regression(
        16, "I20", "a read ended seconds after its deadline",
        "each report of a suspect was given a second of its own",
        "unit/test_kvstore_client_reads.py::test_suspects_are_reported_within_the_deadline",
    ),
    Regression(
        67, "I20", "a read ended after its deadline",
        "each renewal was given all the time that was left when the first began",
        "unit/test_kvstore_client_reads.py::test_renewals_take_their_time_from_the_read",
    ),
    Regression(
        9, "liveness", "a page stayed a miss for ever, and could not be put again",
        "a flipped bit in a record looked like a newer page, so nobody reported it",
        "simulation/test_simulation_readers.py::test_a_flipped_record_bit_is_a_miss_and_reported",
    ),
    Regression(
        11, "liveness", "a reported page was never dropped",
        "the check of a damaged record ended with an exception",
        "unit/test_workers_verification.py::test_a_flipped_bit_of_the_record_shows",
    ),
    Regression(
        23, "I18", "a seal stayed unreported",
        "only the report line had broken: no new registration brought it again",
        "unit/test_workers_pulls.py::"
        "test_a_seal_that_nobody_answered_is_reported_again_with_the_next_heartbeat",
    ),
    Regression(
        3652, "IndexError", "a worker's core raised",
        "an unanswered seal was looked for in a chunk cut anew for a larger class",
        "unit/test_workers_pulls.py::test_a_seal_whose_chunk_was_cut_anew_is_not_reported_again",
    ),
    Regression(
        203, "I18", "extents stayed quarantined for ever",
        "an inventory left out what had a damaged record; its place was given to another class",
        "unit/test_workers_record_table.py::"
        "test_a_damaged_record_is_listed_as_something_nobody_can_serve",
    ),
    Regression(
        495, "I18", "extents were counted as held for ever",
        "what a new leader takes for free is never asked for again",
        "unit/test_workers_membership.py::"
        "test_extents_that_readers_held_are_counted_anew_after_a_registration",
    ),
    Regression(
        32, "I18", "a put waited for nobody",
        "its connection had closed while its owner had another one",
        "unit/test_master_sessions.py::"
        "test_an_answer_held_back_for_a_closed_connection_is_forgotten",
    ),
    Regression(
        24, "I16", "columns of a run differed in length",
        "two sealed records of one page in one inventory were both adopted",
        "unit/test_master_adoption.py::"
        "test_of_two_records_of_one_page_one_is_adopted_and_one_is_fenced",
    ),
    Regression(
        54, "IndexError", "a master's core raised while it expired runs",
        "a hole was due in the same tick as the child that took it along",
        "unit/test_master_reclaim.py::test_a_hole_whose_time_is_up_goes_with_its_last_child",
    ),
    Regression(
        51, "I29", "a removed page came back with its worker",
        "a lost worker's replicas were cleaned out of the tree, so the remove found nothing",
        "unit/test_master_lenders.py::test_nor_does_one_removed_while_its_worker_is_lost",
    ),
    Regression(
        31, "I29", "a removed page came back after a takeover",
        "a new master knew of no holder before the first registration",
        "unit/test_master_lenders.py::"
        "test_a_page_removed_while_its_worker_is_unknown_does_not_return",
    ),
    Regression(
        212, "I18", "a tombstone stayed for ever",
        "one number stood for the extents of several parts, which come free one by one",
        "unit/test_master_tombstones.py::test_a_row_stays_until_every_extent_is_free",
    ),
    Regression(
        1105, "I29", "a page that had expired came back after its removal",
        "its record was sealed until its lease ended, and the remove did not look there",
        "unit/test_master_lenders.py::test_nor_one_that_had_expired_and_is_not_freed_yet",
    ),
    Regression(
        305, "I16", "a run ended with holes, and pages were lost",
        "a whole replica was evicted because another segment had some of its pages",
        "unit/test_master_victims.py::test_a_copy_without_some_pages_replaces_no_other",
    ),
    Regression(
        73, "I9", "an extent was freed under a lease",
        "a replica that returned to a page known by another replica forgot its leases",
        "unit/test_master_adoption.py::"
        "test_leases_on_what_returns_are_kept_though_the_page_is_known_by_another_copy",
    ),
    Regression(
        507, "I9", "an extent was freed under a lease",
        "pages removed during an inventory were freed by a time that knew no leases",
        "unit/test_master_removal.py::"
        "test_what_is_removed_during_an_inventory_is_freed_after_its_lease",
    ),
    Regression(
        21314,
        "I9",
        "an extent was planned under a lease",
        "a seal reported twice, of a page removed in between, was answered with PLAN_CLOSED: "
        "the worker freed the extent on its own",
        "unit/test_master_puts.py::"
        "test_a_repeated_report_of_a_page_that_was_removed_meanwhile_frees_nothing",
    ),
    Regression(
        4560, "I18", "a run never expired",
        "it was split while overdue; the half without the open put was forgotten",
        "unit/test_master_reclaim.py::"
        "test_the_half_of_an_overdue_run_that_waits_for_nothing_expires",
    ),
    Regression(
        410, "I29", "a removed page came back with the next start of its worker",
        "a free that the disk had refused counted as done: no inventory listed the page",
        "unit/test_workers_commands.py::test_what_a_disk_did_not_take_stays_what_it_was",
    ),
    Regression(
        114, "I18", "a segment was joining for ever",
        "a disk that could not be read was offered as empty, and planned in by another class",
        "unit/test_workers_membership.py::"
        "test_a_medium_is_told_of_once_its_inventory_has_ended_or_instead",
    ),
    Regression(
        94, "liveness", "a page on a disk stayed a miss for ever",
        "its staged copy had rotted, and was shown to every reader after the first",
        "unit/test_workers_staging.py::test_a_staged_copy_that_a_reader_doubts_is_found_no_more",
    ),
    Regression(
        29, "I20", "a call ended a fifth of a second after its deadline",
        "a look whether another master leads was given its time on top of that of the call",
        "unit/test_kvstore_rpc_search.py::test_a_look_at_others_takes_its_time_from_the_call",
    ),
    Regression(
        374, "I20", "a decode worker that had read two pages ahead was told that there is only one",
        "fewer pages of its prompt were staged than had been put before",
        "unit/test_master_parts_ahead.py"
        "::test_who_has_read_more_than_is_staged_then_is_told_so_and_not_refused",
    ),
)  # fmt: skip
