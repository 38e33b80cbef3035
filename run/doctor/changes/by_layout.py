"""The changes that a layout may have."""

from run.doctor.changes.context import context_changes
from run.doctor.changes.experts import expert_changes
from run.doctor.changes.model import model_changes
from run.doctor.changes.pipeline import pipeline_changes
from run.doctor.changes.sequence import sequence_changes
from run.doctor.changes.tensor import tensor_changes
from run.doctor.changes.vocabulary import vocabulary_changes


def changes(step):
    """The Changes of a step's layout."""
    config = step.config
    layout = step.layout
    T = layout["tp"]
    C = layout["cp"]
    sp = layout["sp"] and T > 1
    found = []
    if T > 1:
        found += tensor_changes(config, sp)
        found += vocabulary_changes()
    if sp:
        found += sequence_changes()
    if C > 1:
        found += context_changes()
    if config.n_experts:
        found += expert_changes(layout)
    if layout["pp"] > 1:
        found += pipeline_changes(step)
    return found + model_changes(config, C)
