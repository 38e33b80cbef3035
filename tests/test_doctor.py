"""The doctor (run/doctor/): planted bugs are named, right runs are not, words say what was planted."""

import re

import pytest
import torch

from model import build
from run.doctor.causes import RIGHT, changes, gradient
from run.doctor.diagnose import diagnose
from run.doctor.dump import read_dump
from run.doctor.step import Step
from run.doctor.threads import World
from run.doctor.words import lines
from sizes import GPTConfig
from tests import bugs
from tests.harness import FULL, VOCAB, equals_one_process
from tests.harness import _train as train_two
from tests.planted import planted
