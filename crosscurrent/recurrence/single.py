"""One token per row: its equations need no solver. Every solver is exact on it, and this is what each would compute."""

import torch

from crosscurrent.recurrence.iteration import ALL
from crosscurrent.recurrence.problem import Problem, Solution, SolverReport
from crosscurrent.recurrence.schedule import INITIAL


def solve_single(problem: Problem, solver_name: str) -> Solution:
    """The solution of a call of one token per row, with as few operations as there can be: decoding makes this call.

    Args:
        problem: of T = 1.
        solver_name: for the report, the solver that the caller chose.
    """
    plan, core, state = problem.plan, problem.core, problem.state
    read = state.register[:, None]
    if plan.stages[0].any_initial:
        read = torch.where((plan.source == INITIAL)[..., None], problem.initial()[:, None], read)
    z = problem.fused(problem.inputs, read, ALL)
    outputs, past = core.run(z, ALL, core.start(keeps_entries=False))
    carried = problem.carried(outputs, read, ALL)
    # What does not write leaves behind what it read, whether or not it was fused with it.
    register = torch.where(plan.writes[..., None], carried, read)
    registers = register if problem.keeps_registers else None
    report = SolverReport(solver_name, 1, exact=True, converged=True, residuals=outputs.new_zeros(0))
    return Solution(outputs, problem.final_state(register[:, 0]), past, report, registers)
