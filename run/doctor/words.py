"""What the doctor prints."""


def lines(findings):
    """The lines to print, one finding after the other; yields (line, is it equal?)."""
    printed = []  # causes of the finding before
    for finding in findings:
        if finding.equal:
            yield f"{finding.stage:24} {finding.differs or 'equal'}", True
            continue
        yield f"{finding.stage:24} differs: {finding.differs}", False
        if not finding.causes and not finding.stage.endswith("copies"):
            yield f"{'':24} fits nothing that is known", False
        causes = ["the same"] if finding.causes == printed != [] else finding.causes
        for i, words in enumerate(causes):
            yield f"{'':24} {'or' if i else '->'} {words}", False
        printed = finding.causes
