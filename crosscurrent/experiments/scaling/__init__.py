"""What training costs at a size that nobody has tried yet: a model of memory and time per step, from one GPU to many.

docs/scaling.md says what it assumes, and what of it was measured.
"""

from crosscurrent.experiments.scaling.machine import GPUS, Assumptions, Gpu
from crosscurrent.experiments.scaling.memory import AUTOCAST, FLOAT32, Precision, StepMemory, step_memory
from crosscurrent.experiments.scaling.plan import Plan, best_plan
from crosscurrent.experiments.scaling.shapes import KINDS, SHAPES, Kind, Subject, make_subject
from crosscurrent.experiments.scaling.tables import plan_table

__all__ = [
    "AUTOCAST",
    "FLOAT32",
    "GPUS",
    "KINDS",
    "SHAPES",
    "Assumptions",
    "Gpu",
    "Kind",
    "Plan",
    "Precision",
    "StepMemory",
    "Subject",
    "best_plan",
    "make_subject",
    "plan_table",
    "step_memory",
]
