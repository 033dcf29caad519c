"""What the failure of a step means: out of memory, or an op that can't be run."""

from placewise.core.errors import ExecutionError, NothingFits, PlacewiseError, one_line

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # in the messages of allocators


def step_failure(name: str, problem: Exception) -> PlacewiseError:
    """Returns our error for the error of an op: the step does not fit in memory, or it can't be run."""
    if is_out_of_memory(problem):
        return NothingFits(f"{name}: the step runs out of memory: {one_line(problem)}")
    return ExecutionError(f"{name}: an op of the step fails: {type(problem).__name__}: {one_line(problem)}")


def is_out_of_memory(problem: BaseException) -> bool:
    """Returns whether an error is about too little memory, on an accelerator or on the host."""
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(problem) for words in NO_MEMORY)
