"""What a failed step says: out of memory, or which op failed."""

from placewise.core.errors import ExecutionError, NothingFits, PlacewiseError, one_line

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # what allocators say


def step_failure(name: str, problem: Exception) -> PlacewiseError:
    """Returns what the error of an op means for who wants the step to run: it does not fit, or it can't be run."""
    if is_out_of_memory(problem):
        return NothingFits(f"{name}: the step runs out of memory: {one_line(problem)}")
    return ExecutionError(f"{name}: an op of the step fails: {type(problem).__name__}: {one_line(problem)}")


def is_out_of_memory(problem: BaseException) -> bool:
    """Returns whether an error says that memory was short, on a GPU or on the host."""
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(problem) for words in NO_MEMORY)
