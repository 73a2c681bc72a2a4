"""An exact solver for pairwise energies: it chooses one label per variable so that the sum of all costs is least.

The stages, in the order in which `solve` runs them:

1. `reduce`: drop labels that are impossible or dominated by another label; merge variables of degree two and less into
   their neighbours.
2. `eliminate`: dynamic programming over the remaining variables, if its tables are small enough.
3. `Messages`: sequential tree-reweighted message passing gives a lower bound of the cost, and of that with each label.
   Rounding gives a labelling, and dynamic programming over the likeliest labels a better one. A label whose own bound
   exceeds the cost of that labelling is dropped; then back to 1.
4. `split`: if that stalls, the labels of one variable are divided between two subproblems, and both are solved.
"""

from shardc.solver.energy import Energy, Infeasible, PairCosts, evaluate
from shardc.solver.solve import WORK, Solution, solve

__all__ = ["Energy", "Infeasible", "PairCosts", "WORK", "Solution", "evaluate", "solve"]
