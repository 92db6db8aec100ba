"""Exact inference by a linear program: supplement B of the paper, with HiGHS.

An energy made of straight pieces is a tower of maxima of affine functions, in which every unit
rises with the units below it. Minimising it is the linear program in which each unit is a variable
above its pieces: `pieces` reads them off an energy, `program` is the program, and here is the
solver.
"""

from dataclasses import dataclass

import torch

from icnn.solvers.cutting_planes import regions_of
from icnn.solvers.pieces import check_pieces, writer
from icnn.solvers.problem import Problem, Record, Tangent
from icnn.solvers.program import Program
from icnn.solvers.solution import Status

TOL = 1e-7


@dataclass(frozen=True)
class LinearProgram:
    """The exact minimiser of a piecewise-linear energy, one linear program for each example.

    For `entropy == 0`, on a box or the simplex, and networks with the activations relu, leaky_relu
    and identity, their sums, maxima and multiples. It looks inside the energy; a program has as
    many variables as the network has units, so that it is for small networks and for checks.
    """

    def check(self, problem: Problem) -> None:
        """Refuse what this solver is not for."""
        if problem.entropy:
            raise ValueError(
                f"`entropy` must be 0 for LinearProgram, got {problem.entropy:g}: use "
                "icnn.BundleEntropy()"
            )
        regions_of(problem)
        check_pieces(problem.source, problem.x)

    def solve(self, problem: Problem) -> Record:
        """One program for each example that has finite numbers."""
        record, start, regions = Record(problem, TOL), problem.start, regions_of(problem)
        # Dropout in front of y is drawn when the energy is first called: here, and below again.
        with torch.random.fork_rng([start.device] if start.is_cuda else []):
            write = writer(problem.source, problem.x, start)
        tangent = problem.tangent(start)
        record.look(start, tangent, record.lower, 0)
        y, slope = start.flatten(start_dim=1).double(), tangent.slope.clone()
        offset = torch.full_like(tangent.value, -torch.inf)
        broken = torch.zeros_like(record.active)
        size = tangent.value.abs() + (slope * y).abs().sum(dim=1)
        for row in record.active.nonzero().flatten().tolist():
            program = Program(y.shape[1])
            energy = write(program, row)
            if not program.finite(energy):
                broken[row] = True
                continue
            own = program.evaluate(energy, y[row].cpu().numpy())
            slack = torch.finfo(start.dtype).eps ** 0.5 * (1 + float(size[row]))
            if not abs(own - float(tangent.value[row])) <= slack:
                raise ValueError(
                    "`energy` must be what its layers say for LinearProgram, got "
                    f"{float(tangent.value[row]):g} instead of {own:g} in example {row}: does it "
                    "draw at random (then call energy.eval()), or define its own `at` or `forward`?"
                )
            found = program.minimise(energy, regions[row], row)
            cut = program.minorant(energy, found)
            y[row], slope[row], offset[row] = (
                torch.from_numpy(part) for part in (found.x[: program.n], *cut)
            )
        y = problem.domain.project(y.reshape(start.shape)).to(start.dtype)
        value = problem.evaluate(y).masked_fill(broken, torch.nan)
        record.look(y, Tangent(value, slope), problem.bound(slope, offset), 1)
        # There is no second step: what is left of a gap is a matter of rounding.
        record.status = torch.where(record.active, int(Status.STALLED), record.status)
        return record
