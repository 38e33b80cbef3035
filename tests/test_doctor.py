"""The doctor (run/doctor/): planted bugs are named, right runs are not."""

import pytest

from run.doctor.diagnose import diagnose
from run.doctor.dump import read_dump
from tests import bugs
from tests.harness import FULL


@pytest.fixture(scope="module")
def examine(corpus, tmp_path_factory):
    """examine(changes, setting, **flags): the Findings on a layout's dump. References are made once
    each."""
    folder = tmp_path_factory.mktemp("dumps")
    references = {}

    def run(changes=(), setting=(), **flags):
        alone = {**bugs.alone_of(flags), "dtype": "float64"}
        key = repr((alone, setting))
        if key not in references:
            where = folder / f"reference-{len(references)}"
            references[key] = read_dump(bugs.dump_run(corpus, where, setting, **alone))
        mine = read_dump(bugs.dump_run(corpus, folder / "mine", (*setting, *changes), **flags))
        return list(diagnose(references[key], mine))

    return run


RIGHT_RUNS = bugs.RIGHT_RUNS if FULL else bugs.RIGHT_RUNS[::5]


@pytest.mark.parametrize("flags", RIGHT_RUNS, ids=str)
def test_a_right_run_is_equal_and_has_no_name(examine, flags):
    findings = examine(**flags)
    assert all(finding.equal and not finding.causes for finding in findings), findings
