"""An exact solver for pairwise energies: it chooses one label per variable so that the sum of all costs is least.

The stages, in the order in which `solve` runs them:

1. `reduce`: drop labels that are impossible or dominated by another label; merge variables of degree two and less into
   their neighbours.
2. `eliminate`: dynamic programming over the remaining variables, if its tables are small enough.
3. `Messages` and `round_messages`: sequential tree-reweighted message passing gives a lower bound, rounding gives a
   labelling. A label whose own bound exceeds the cost of that labelling is dropped; then back to 1.
4. `split`: if that stalls, the labels of one variable are divided between two subproblems, and both are solved.
"""

from shardc.solver.energy import Energy, Infeasible, PairCosts, evaluate
from shardc.solver.solve import Solution, solve

__all__ = ["Energy", "Infeasible", "PairCosts", "Solution", "evaluate", "solve"]
