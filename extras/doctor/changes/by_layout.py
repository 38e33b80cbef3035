"""All Changes that a step's layout can have: known bugs that are more than other weights of terms.

    model.py         any layout: wrong forms of attention, norms, activation, rotary angles, loss
    tensor.py        --tp: f and g, biases of rows, q k v as one
    vocabulary.py    --tp: words of the embedding's and the head's slices, the loss
    sequence.py      --tp --sp: all-gather and reduce-scatter, positions, targets
    context.py       --cp: masks and sums of attention, positions, targets, means
    experts.py       --experts: gates, order of rows, capacity, the balance loss
    pipeline.py      --pp: what crosses a boundary

Each is tried by running the step (step.py). A Change of the loss runs forward first; if the loss
does not fit, backward is not run. To add a bug: write what it does to a rank's model, and add a
Change with it to its file's list.
"""

from extras.doctor.changes.context import context_changes
from extras.doctor.changes.experts import expert_changes
from extras.doctor.changes.model import model_changes
from extras.doctor.changes.pipeline import pipeline_changes
from extras.doctor.changes.sequence import sequence_changes
from extras.doctor.changes.tensor import tensor_changes
from extras.doctor.changes.vocabulary import vocabulary_changes


def changes(step):
    """The Changes of a SimulatedStep's model and layout."""
    config = step.config
    layout = step.layout
    T = layout["tp"]
    N = layout["cp"]
    sp = layout["sp"] and T > 1
    found = []
    if T > 1:
        found += tensor_changes(config, T, sp)
        found += vocabulary_changes()
    if sp:
        found += sequence_changes()
    if N > 1:
        found += context_changes(step)
    if config.n_experts:
        found += expert_changes(config, layout)
    if layout["pp"] > 1:
        found += pipeline_changes(step)
    return found + model_changes(config, N)
