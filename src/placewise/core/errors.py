"""The errors that placewise raises on purpose.

PlacewiseError
├── InputError              the input is wrong; one line names the file, the element and the rule (exit code 2)
│   ├── GraphError          a graph or its file
│   ├── ClusterError        a cluster or its file
│   ├── ProblemError        a graph and a cluster that do not fit together, or an invalid placement or order
│   ├── PlanError           a plan or its file
│   ├── ProfileError        a profile or its file
│   ├── ModelError          a model's name or its options
│   ├── CaptureError        a step that can't be recorded
│   ├── ExecutionError      a plan, a step or a batch that can't run on this machine
│   │   ├── RandomOnSeveralHosts ops that draw random numbers are on several hosts
│   │   └── StepChanged     the model or the optimizer is not what it was when the step was captured
│   │       └── OtherBranch the batch or a buffer decides for another step than the captured one
│   ├── StrategyError       a strategy's name or its parameters, or a strategy that can't solve this problem
│   └── StoreError          a damaged run file, or a run that another process is writing
├── WorkerDied              worker processes have died too often (exit code 1)
└── NothingFits             no placement fits into memory (exit code 3)
"""


class PlacewiseError(Exception):
    """The base class of all errors that placewise raises on purpose."""


class InputError(PlacewiseError):
    """The input is wrong; the message is one line that names the file, the element and the rule."""


class GraphError(InputError):
    """A graph, or its file, breaks a rule of the format."""


class ClusterError(InputError):
    """A cluster, or its file, breaks a rule of the format."""


class ProblemError(InputError):
    """A graph and a cluster do not fit together, or a placement or an order is not valid for this problem."""


class PlanError(InputError):
    """A plan, or its file, breaks a rule of the format, or is for another problem."""


class ProfileError(InputError):
    """A profile, or its file, breaks a rule of the format, or is for another cluster."""


class ModelError(InputError):
    """A model's name or one of its options is unknown or out of range."""


class CaptureError(InputError):
    """A step can't be recorded."""


class ExecutionError(InputError):
    """A plan, a step or a batch can't run on this machine."""


class RandomOnSeveralHosts(ExecutionError):
    """Ops that draw random numbers are on several hosts, whose generators would not give eager code's numbers."""


class StepChanged(ExecutionError):
    """The model or the optimizer has changed so that its step is another one than the captured step."""


class OtherBranch(StepChanged):
    """The batch, or a buffer of the model, decides for another step than the captured one."""


class StrategyError(InputError):
    """A strategy's name or one of its parameters is unknown or out of range, or it can't solve this problem."""


class StoreError(InputError):
    """A run file is damaged or is not a run file, does not contain the run, or is being written by another process."""


class WorkerDied(PlacewiseError):
    """A process that evaluated placements has died, and so had those before it."""


class NothingFits(PlacewiseError):
    """No placement that was tried fits the memory of every device."""


def one_line(problem: BaseException) -> str:
    """Returns an exception's message without line breaks."""
    return " ".join(str(problem).split()) or type(problem).__name__
