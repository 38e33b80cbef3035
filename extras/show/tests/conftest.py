"""Says what to do where test_docs.py fails in a fork."""


def pytest_terminal_summary(terminalreporter):
    if any("test_docs.py" in report.nodeid for report in terminalreporter.stats.get("failed", ())):
        terminalreporter.write_line("test_docs.py compares README.md, docs/ and this repository as "
                                    "it stands: in a fork, delete it")
