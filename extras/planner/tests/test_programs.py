"""The planner's program ends like all others."""

import extras.planner.__main__ as plan
from tests.programs import (
    end_with_one_line_where_the_disk_is_full,
    end_without_a_word_where_nobody_reads,
    leave_ctrl_c_and_errors_to_pytest,
    refuse_an_unknown_flag_before_torch,
)

PRINTS = ["-m extras.planner --help", "-m extras.planner --model gpt2 --gpus 8",
          "-m extras.planner --published"]


def test_an_unknown_flag_is_one_line_before_torch_is_imported():
    refuse_an_unknown_flag_before_torch(["-m extras.planner"])


def test_a_reader_that_has_gone_ends_it_without_a_word():
    end_without_a_word_where_nobody_reads(PRINTS)


def test_a_full_disk_ends_it_with_one_line():
    end_with_one_line_where_the_disk_is_full(PRINTS)


def test_after_it_ctrl_c_and_errors_are_pytests_again(capsys, monkeypatch):
    leave_ctrl_c_and_errors_to_pytest(plan.main, ["planner", "--bogus"], capsys, monkeypatch)
