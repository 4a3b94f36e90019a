"""All that steers and watches one sequence's tokens: its sampler, its logits processors, and what they note on the way.

State of one sequence only, so that nothing can leak to a neighbour. Runs on the engine thread.
"""

from worker.constraint import Constraint
from worker.job import Job
from worker.logprobs import Recorder
from worker.mlx_types import Processor
from worker.sampling import processors_for, sampler_for


class Controls:
    def __init__(self, job: Job, choice: int, vocab_size: int, eos_ids: frozenset[int], *, generated_tokens: int = 0) -> None:
        """`generated_tokens` are there already where an answer goes on that was put aside; a grammar reads them by itself."""
        self.sampler = sampler_for(job.sampling, choice, eos_ids, drawn_tokens=generated_tokens)
        self._recorder = None if job.logprobs is None else Recorder(job.logprobs)
        self._constraint = None if job.matcher is None else Constraint(job.matcher, len(job.prompt), eos_ids)
        changes = processors_for(job.sampling, len(job.prompt), vocab_size, eos_ids)
        # What the model said comes before every change, what the grammar forbids after.
        line: list[Processor | None] = [self._recorder, *changes, self._constraint]
        self.processors: list[Processor] = [processor for processor in line if processor is not None]

    @property
    def trouble(self) -> str | None:
        """Why the answer cannot follow its grammar any further."""
        return None if self._constraint is None else self._constraint.trouble

    def logprobs(self, position: int, token: int) -> list[dict[str, object]] | None:
        """Of the token at that index of prompt and answer; None where nobody asked."""
        return None if self._recorder is None else self._recorder.take(position, token)
