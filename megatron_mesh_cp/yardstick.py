"""The shortest schedule of a small tile, proven: the yardstick of the greedy scheduler.

An exhaustive search by constraint programming (Google OR-Tools CP-SAT, a package of the `test` extra; nothing else
needs it): every order of transfers on every link and of blocks on the compute stream is open, waiting included. Inputs
of one chain come in order, which loses nothing as they are alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from .greedy import INPUTS, Work

_TICKS = 1000  # of the unit of the durations: they are rounded to whole ticks


@dataclass(frozen=True)
class Optimum:
    """seconds: of the best schedule found; bound: proven to be impossible to beat; equal where `proven`."""

    seconds: float
    bound: float
    proven: bool


def optimum(work: Work, limit: float = 60.0, ticks: int = _TICKS) -> Optimum:
    """The shortest schedule of a tile's work, or the best bounds found within `limit` seconds of search.

    Raises ValueError where OR-Tools is not installed, or a duration is no whole number of 1/ticks.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ValueError("the exhaustive search needs OR-Tools; install the extra: pip install -e .[test]") from None

    def whole(seconds: float) -> int:
        value = round(seconds * ticks)
        if abs(value - seconds * ticks) > 1e-6 * max(1.0, seconds * ticks):
            raise ValueError(f"duration {seconds}: the search needs whole numbers of 1/{ticks}; give more ticks")
        return value

    model = cp_model.CpModel()
    horizon = whole(sum(r.seconds for chain in work.chains for r in chain) + work.a * work.b * work.block)
    end = model.new_int_var(0, horizon, "end")
    machines: list[list] = [[] for _ in range(work.links + 1)]

    def add(machine: int, seconds: float, name: str):
        start = model.new_int_var(0, horizon, name)
        interval = model.new_fixed_size_interval_var(start, whole(seconds), name)
        machines[machine].append(interval)
        model.add(interval.end_expr() <= end)
        return interval

    rounds = [
        [add(0 if work.links == 1 else chain % 2, r.seconds, f"{chain}.{k}") for k, r in enumerate(work.chains[chain])]
        for chain in range(4)
    ]
    blocks = {(x, y): add(work.links, work.block, f"{x},{y}") for x in range(work.a) for y in range(work.b)}
    for chain, intervals in enumerate(rounds):
        for number, (interval, round_) in enumerate(zip(intervals, work.chains[chain], strict=True)):
            if number and (chain in INPUTS or round_.after_previous):
                model.add(interval.start_expr() >= intervals[number - 1].end_expr())
            for (x, y), block in blocks.items():
                if chain in INPUTS and (x, y)[chain] == round_.brings:
                    model.add(block.start_expr() >= interval.end_expr())
                elif chain not in INPUTS and (x, y)[chain - 2] in round_.needs:
                    model.add(interval.start_expr() >= block.end_expr())
    for intervals in machines:
        model.add_no_overlap(intervals)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Optimum(horizon / ticks, work.bound(), False)
    return Optimum(
        solver.objective_value / ticks, solver.best_objective_bound / ticks, proven=status == cp_model.OPTIMAL
    )
