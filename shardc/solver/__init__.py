"""A small exact solver of sums of pairwise costs: it chooses one label for every variable.

The stages, in the order in which `solve` runs them:

1. `reduce`: drop labels that cannot be used or that another label makes useless, merge variables of degree
   two and less into their neighbours.
2. `eliminate`: dynamic programming over what is left, if its tables are small enough.
3. `messages` and `rounding`: sequential tree-reweighted message passing gives a lower bound, rounding a labelling.
   A label whose own bound is above the value of the labelling is dropped; then back to 1.
4. `branch`: where that stalls, one variable's labels are split in two and both halves are solved.
"""

from shardc.solver.energy import Energy, Infeasible, PairCosts, evaluate
from shardc.solver.solve import Solution, solve

__all__ = ["Energy", "Infeasible", "PairCosts", "Solution", "evaluate", "solve"]
