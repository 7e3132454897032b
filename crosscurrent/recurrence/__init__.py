"""One idea: a causal stack of layers whose tokens also read a state carried from earlier tokens.

Three things vary independently: the architecture (`fuse`, a core, `carry`), the `schedule` (which position a token
reads) and the solver (how the equations are solved for known tokens). Start with `sequential.py`: it is the definition.
This package needs PyTorch only.
"""

from crosscurrent.recurrence.carry import BoundedSum, Carry, LastOutput, NormalizedSum, ResidualCarry
from crosscurrent.recurrence.compiling import compiled_steps
from crosscurrent.recurrence.fuse import Fuse, GatedFusion, GatesRead, Merge
from crosscurrent.recurrence.gradients import GRADIENT_RULES, GradientRule, Implicit, LastPasses
from crosscurrent.recurrence.jacobi import Jacobi
from crosscurrent.recurrence.kernels import use_triton
from crosscurrent.recurrence.problem import ColumnCore, ConvergenceError, Core, Problem, Solution, SolverReport
from crosscurrent.recurrence.schedule import PADDING, Plan, Schedule, Stage, Tokens
from crosscurrent.recurrence.sequential import Sequential
from crosscurrent.recurrence.single import solve_single
from crosscurrent.recurrence.solver import SOLVERS, Solver, as_solver, solver_from_dict, solver_to_dict
from crosscurrent.recurrence.state import RecurrentState
from crosscurrent.recurrence.steps import fixed_weights
from crosscurrent.recurrence.sweeps import Sweeps

__all__ = [
    "GRADIENT_RULES",
    "PADDING",
    "SOLVERS",
    "BoundedSum",
    "Carry",
    "ColumnCore",
    "ConvergenceError",
    "Core",
    "Fuse",
    "GatedFusion",
    "GatesRead",
    "GradientRule",
    "Implicit",
    "Jacobi",
    "LastOutput",
    "LastPasses",
    "Merge",
    "NormalizedSum",
    "Plan",
    "Problem",
    "RecurrentState",
    "ResidualCarry",
    "Schedule",
    "Sequential",
    "Solution",
    "Solver",
    "SolverReport",
    "Stage",
    "Sweeps",
    "Tokens",
    "as_solver",
    "compiled_steps",
    "fixed_weights",
    "solve_single",
    "solver_from_dict",
    "solver_to_dict",
    "use_triton",
]
