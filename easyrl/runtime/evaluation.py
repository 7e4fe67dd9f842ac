"""Have the problems of an evaluation answered: between two iterations, and in `easyrl eval`.

Workers answer with the weights that they have. Training does not change: each completion's random
stream depends on round, problem and sample alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from easyrl import events
from easyrl.config import Config
from easyrl.runtime.fleet import Fleet
from easyrl.runtime.ledger import Ledger
from easyrl.runtime.placement import Placement
from easyrl.types import IndexedPrompt, Prompt


def ledger_of_evaluation(
    config: Config,
    placement: Placement,
    round_: int,
    problems: Sequence[Prompt],
    *,
    num_samples: int = 1,
) -> Ledger:
    """Open the book of an evaluation, in which each problem is a group."""

    def evaluate(
        prompts: Sequence[IndexedPrompt], is_last_round: bool, known: Mapping[int, int]
    ) -> events.Evaluate:
        problems = [prompt for _, prompt in prompts]
        return events.Evaluate(round_, problems, num_samples, known)

    return Ledger(
        config,
        placement,
        problems.__getitem__,
        evaluate,
        iteration=None,
        first_index=0,
        num_groups=len(problems),
        num_samples=num_samples,
        max_replacements=0,
    )


def answers_of(
    fleet: Fleet, ledger: Ledger, next_event: Callable[[], events.WorkerEvent]
) -> Iterator[events.PromptEvaluated]:
    """Send the problems to whichever rollout worker is free; yield the answers as they arrive."""
    fleet.ledger = ledger
    try:
        while not ledger.is_complete:
            event = next_event()
            if isinstance(event, events.PromptEvaluated):
                yield event
    finally:
        fleet.ledger = None
