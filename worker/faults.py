"""What can go wrong in a worker, one class per decision, and how an engine exception reads to the client.

Knows codes and exit statuses; must not know sockets or MLX.
"""

from supervisor.protocol import Code

EXIT_UNLOADABLE = 65
"""The supervisor does not try such a model again until its files change."""
EXIT_FAILED = 70
"""The engine could not be started this time, or keeps failing."""
EXIT_GPU_FAULT = 74
"""Metal gave up on a command buffer: whatever this process submits from then on may be ignored or come out wrong."""
FAULTS_IN_A_ROW = 3
"""A generator that was rebuilt this often without one good step in between will not get better by rebuilding."""

OF_MEMORY = ("allocate", "out of memory", "insufficient memory", "outofmemory", "metal::malloc")
"""Metal's allocator also gives up over the number of buffers: "Resource limit (499000) exceeded"."""


class LoadFailed(Exception):
    """The model could not be loaded this time; another try may fare better."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, code: Code = Code.MODEL_FAILED) -> None:
        super().__init__(message)
        self.code = code


class ModelUnloadable(LoadFailed):
    """These files will never load with this build: damaged, incomplete, or an architecture it does not know."""

    exit_code = EXIT_UNLOADABLE

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.MODEL_UNLOADABLE)


class BadJob(Exception):
    """The request cannot be served as it is; the message is for its sender."""


def failure_of(error: Exception) -> Code:
    """What the end of a worker is called that died of it."""
    return Code.OUT_OF_MEMORY if code_of(error) is Code.OUT_OF_MEMORY else Code.MODEL_FAILED


def code_of(error: Exception) -> Code:
    """What a failed step is called. MLX reports failed allocations of every backend, and what the GPU did, as RuntimeError."""
    if isinstance(error, MemoryError):
        return Code.OUT_OF_MEMORY
    text = str(error).lower()
    if any(word in text for word in OF_MEMORY):
        return Code.OUT_OF_MEMORY
    return Code.GPU_FAULT if any(word in text for word in ("command buffer", "commandbuffer")) else Code.INTERNAL
