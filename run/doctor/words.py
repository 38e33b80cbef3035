"""What the doctor prints."""

from collections import Counter

SIZES = ("dp", "ep", "cp", "tp", "pp", "microbatches")


def lines(findings, layout):
    """The lines to print, one finding after the other; yields (line, is it equal?). layout: of
    MINE's dump."""
    printed = []  # causes of the finding before
    advised = False
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
        if len(causes) > 1 and not advised:
            for words in same_sizes(layout):
                yield f"{'':24} {words}: a layout in which they differ tells causes apart", False
                advised = True
        printed = finding.causes


def same_sizes(layout):
    """Words for the axes that have one size, and so make different bugs look alike."""
    counts = Counter(layout[axis] for axis in SIZES if layout[axis] > 1)
    for size, count in counts.items():
        if count > 1:
            yield " and ".join(axis for axis in SIZES if layout[axis] == size) + f" are all {size}"
