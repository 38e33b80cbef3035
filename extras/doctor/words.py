"""What the doctor prints: for each Finding a line, and its causes below.

MINE is the dump that is examined, REFERENCE that of one process (__main__.py).

    step 1 loss              equal
    step 1 gradients         differs: 40 of 40 tensors; first transformer.wte.weight, ...
                             -> all gradients: 2 times: ...         a cause
                             or all gradients: 2 times: ...         another with the same numbers
                             dp and tp have the same size, 2: ...   once: why both fit
    step 1 norm              differs: ...
                             -> the same                            the causes of the line above
"""

import re

from extras.doctor.finding import axes_by_size

INDENT = " " * 24
# {axis of the layout: the word for its ranks in a cause that does not name the axis}
AXES = {"dp": "data rank", "ep": "expert rank", "cp": "context rank", "tp": "tensor rank",
        "pp": "pipeline rank", "microbatches": "microbatch"}


def same_sizes(layout, causes):
    """["dp and tp have the same size, 2: ..."]: axes of one size that the causes name, whose bugs
    make the same numbers."""
    text = " ".join(causes)
    named = [axis for axis, word in AXES.items() if re.search(rf"\b({axis}\b|{word})", text)]
    found = []
    for size, axes in axes_by_size(layout, named).items():
        if len(axes) > 1:
            found.append(f"{' and '.join(axes)} have the same size, {size}: a layout in which they "
                         "differ tells causes apart")
    return found


def lines(findings, layout, deep=True):
    """Yields (line, are MINE's numbers equal there?). findings: Findings (finding.py), each the
    result of one comparison, such as "step 1 gradients", which is called its stage (no stage of a
    pipeline). layout: MINE's. deep: have all known bugs been tried?"""
    last_causes = []  # causes of the last finding that differs
    advised = set()  # lines on axes of the same size
    for finding in findings:
        if finding.equal:
            yield f"{finding.stage:24} {finding.differs or 'equal'}", True
            continue
        yield f"{finding.stage:24} differs: {finding.differs}", False
        # Some causes of a wrong loss or gradient are found by running the step again, once for each
        # bug (a Change, step.py). For a large model the doctor does so only with --deep
        runs_bugs = finding.stage.endswith(("loss", "gradients"))
        if finding.causes and finding.causes == last_causes:
            yield f"{INDENT} -> the same", False
        elif finding.causes:
            first, *others = finding.causes
            yield f"{INDENT} -> {first}", False
            for words in others:
                yield f"{INDENT} or {words}", False
            # One cause may name two axes, too: "2 times REFERENCE's (dp or tp)"
            if others or any(f"{axis} or " in first for axis in AXES):
                for words in same_sizes(layout, finding.causes):
                    if words not in advised:
                        yield f"{INDENT} {words}", False
                        advised.add(words)
        elif runs_bugs and not deep:
            yield f"{INDENT} fits nothing that was tried; --deep tries all known bugs", False
        elif not finding.stage.endswith(("copies", "settings")):
            yield f"{INDENT} fits nothing that is known", False
        last_causes = finding.causes
