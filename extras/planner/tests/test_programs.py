"""The planner's program ends like all others."""

import extras.planner.__main__ as plan
from tests.programs import (
    leave_ctrl_c_and_errors_to_pytest,
    refuse_an_unknown_flag_before_torch,
)


def test_an_unknown_flag_is_one_line_before_torch_is_imported():
    refuse_an_unknown_flag_before_torch(["-m extras.planner"])


def test_after_it_ctrl_c_and_errors_are_pytests_again(capsys, monkeypatch):
    leave_ctrl_c_and_errors_to_pytest(plan.main, ["planner", "--bogus"], capsys, monkeypatch)
